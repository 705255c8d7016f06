"""Layers, each usable on its own in any Flax model: one idea of a paper per file."""

from ngrammer_jax.layers.attention import Attention
from ngrammer_jax.layers.feed_forward import FeedForward
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.ngrammer import NGrammer
from ngrammer_jax.layers.normalization import LayerNorm
from ngrammer_jax.layers.persistent import PersistentVectors
from ngrammer_jax.layers.quantizer import ProductQuantizer
from ngrammer_jax.layers.readout import AttentionReadout, NGramReadout
from ngrammer_jax.layers.recurrence import Recurrence
from ngrammer_jax.layers.recurrent_memory import RecurrentMemory
from ngrammer_jax.layers.span import AdaptiveSpan, DynamicSpan

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
]
