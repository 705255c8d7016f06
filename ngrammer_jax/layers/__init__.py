"""Layers for any Flax model: each file has one idea of a paper, usable on its own.

Names are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from ngrammer_jax.layers.attention import persistent as persistent
  from ngrammer_jax.layers.attention.attention import Attention as Attention
  from ngrammer_jax.layers.attention.persistent import PersistentVectors as PersistentVectors
  from ngrammer_jax.layers.attention.span import AdaptiveSpan as AdaptiveSpan
  from ngrammer_jax.layers.attention.span import DynamicSpan as DynamicSpan
  from ngrammer_jax.layers.copy_memory import CopyMemory as CopyMemory
  from ngrammer_jax.layers.feed_forward import FeedForward as FeedForward
  from ngrammer_jax.layers.ngram.memory import NGramMemory as NGramMemory
  from ngrammer_jax.layers.ngram.ngrammer import NGrammer as NGrammer
  from ngrammer_jax.layers.ngram.quantizer import ProductQuantizer as ProductQuantizer
  from ngrammer_jax.layers.normalization import LayerNorm as LayerNorm
  from ngrammer_jax.layers.product_keys.memory import ProductMemory as ProductMemory
  from ngrammer_jax.layers.recurrent.readout import AttentionReadout as AttentionReadout
  from ngrammer_jax.layers.recurrent.readout import NGramReadout as NGramReadout
  from ngrammer_jax.layers.recurrent.recurrence import Recurrence as Recurrence
  from ngrammer_jax.layers.recurrent.word_memory import RecurrentMemory as RecurrentMemory
  from ngrammer_jax.layers.token_shift import TokenShift as TokenShift

# The public layers, and the submodules; both are attributes of this module.
_LAYERS = {  # of each file
  'attention.attention': ('Attention',),
  'attention.persistent': ('PersistentVectors',),
  'attention.span': ('AdaptiveSpan', 'DynamicSpan'),
  'copy_memory': ('CopyMemory',),
  'feed_forward': ('FeedForward',),
  'ngram.memory': ('NGramMemory',),
  'ngram.ngrammer': ('NGrammer',),
  'ngram.quantizer': ('ProductQuantizer',),
  'normalization': ('LayerNorm',),
  'product_keys.memory': ('ProductMemory',),
  'recurrent.readout': ('AttentionReadout', 'NGramReadout'),
  'recurrent.recurrence': ('Recurrence',),
  'recurrent.word_memory': ('RecurrentMemory',),
  'token_shift': ('TokenShift',),
}
_MODULES = (
  'activations',
  'adaptive_softmax',
  'attention',
  'axis_names',
  'context',
  'convolution',
  'copies',
  'copy_memory',
  'dense',
  'document_masks',
  'dropout',
  'feed_forward',
  'mesh_axes',
  'ngram',
  'normalization',
  'parameter_kinds',
  'product_keys',
  'products',
  'recurrent',
  'row_sums',
  'softmax',
  'state',
  'token_classes',
  'token_ids',
  'token_shift',
)
__all__ = sorted(['persistent', *(name for names in _LAYERS.values() for name in names)])


def __getattr__(name: str) -> Any:
  """Imports a layer from its file, or a submodule."""
  if name == 'persistent':
    return importlib.import_module(f'{__name__}.attention.persistent')
  if name in _MODULES:
    return importlib.import_module(f'{__name__}.{name}')
  for file, names in _LAYERS.items():
    if name in names:
      layer = getattr(importlib.import_module(f'{__name__}.{file}'), name)
      globals()[name] = layer
      return layer
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted([*__all__, *_MODULES])
