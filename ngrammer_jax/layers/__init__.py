"""Layers, each usable on its own in any Flax model: one idea of a paper per file.

A name is imported when it is first used: a layer does not wait for the others.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from ngrammer_jax.layers.attention import persistent as persistent
  from ngrammer_jax.layers.attention.attention import Attention as Attention
  from ngrammer_jax.layers.attention.persistent import PersistentVectors as PersistentVectors
  from ngrammer_jax.layers.attention.span import AdaptiveSpan as AdaptiveSpan
  from ngrammer_jax.layers.attention.span import DynamicSpan as DynamicSpan
  from ngrammer_jax.layers.feed_forward import FeedForward as FeedForward
  from ngrammer_jax.layers.ngram.memory import NGramMemory as NGramMemory
  from ngrammer_jax.layers.ngram.ngrammer import NGrammer as NGrammer
  from ngrammer_jax.layers.ngram.quantizer import ProductQuantizer as ProductQuantizer
  from ngrammer_jax.layers.normalization import LayerNorm as LayerNorm
  from ngrammer_jax.layers.recurrent.readout import AttentionReadout as AttentionReadout
  from ngrammer_jax.layers.recurrent.readout import NGramReadout as NGramReadout
  from ngrammer_jax.layers.recurrent.recurrence import Recurrence as Recurrence
  from ngrammer_jax.layers.recurrent.word_memory import RecurrentMemory as RecurrentMemory

_FILES = {  # the file of each layer
  'AdaptiveSpan': 'attention.span',
  'Attention': 'attention.attention',
  'AttentionReadout': 'recurrent.readout',
  'DynamicSpan': 'attention.span',
  'FeedForward': 'feed_forward',
  'LayerNorm': 'normalization',
  'NGramMemory': 'ngram.memory',
  'NGramReadout': 'recurrent.readout',
  'NGrammer': 'ngram.ngrammer',
  'PersistentVectors': 'attention.persistent',
  'ProductQuantizer': 'ngram.quantizer',
  'Recurrence': 'recurrent.recurrence',
  'RecurrentMemory': 'recurrent.word_memory',
}


def __getattr__(name: str) -> Any:
  """Imports a layer from its file, or the module `persistent`."""
  if name == 'persistent':
    return importlib.import_module(f'{__name__}.attention.persistent')
  if name not in _FILES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  layer = getattr(importlib.import_module(f'{__name__}.{_FILES[name]}'), name)
  globals()[name] = layer
  return layer


def __dir__() -> list[str]:
  return sorted({*globals(), *_FILES, 'persistent'})
