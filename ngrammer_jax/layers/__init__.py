"""Layers, each usable on its own in any Flax model: one idea of a paper per file."""

from ngrammer_jax.layers.attention import persistent
from ngrammer_jax.layers.attention.attention import Attention
from ngrammer_jax.layers.attention.persistent import PersistentVectors
from ngrammer_jax.layers.attention.span import AdaptiveSpan, DynamicSpan
from ngrammer_jax.layers.feed_forward import FeedForward
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.ngram.ngrammer import NGrammer
from ngrammer_jax.layers.ngram.quantizer import ProductQuantizer
from ngrammer_jax.layers.normalization import LayerNorm
from ngrammer_jax.layers.recurrent.readout import AttentionReadout, NGramReadout
from ngrammer_jax.layers.recurrent.recurrence import Recurrence
from ngrammer_jax.layers.recurrent.word_memory import RecurrentMemory

__all__ = [
  'AdaptiveSpan',
  'Attention',
  'AttentionReadout',
  'DynamicSpan',
  'FeedForward',
  'LayerNorm',
  'NGramMemory',
  'NGramReadout',
  'NGrammer',
  'PersistentVectors',
  'ProductQuantizer',
  'Recurrence',
  'RecurrentMemory',
  'persistent',
]
