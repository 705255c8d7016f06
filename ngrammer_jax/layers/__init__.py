"""Layers, each usable on its own in any Flax model: one idea of a paper per file."""

from ngrammer_jax.layers.attention import Attention
from ngrammer_jax.layers.feed_forward import FeedForward
from ngrammer_jax.layers.ngrammer import NGrammer
from ngrammer_jax.layers.normalization import LayerNorm
from ngrammer_jax.layers.persistent import PersistentVectors
from ngrammer_jax.layers.quantizer import ProductQuantizer
from ngrammer_jax.layers.span import AdaptiveSpan, DynamicSpan

__all__ = [
  'AdaptiveSpan',
  'Attention',
  'DynamicSpan',
  'FeedForward',
  'LayerNorm',
  'NGrammer',
  'PersistentVectors',
  'ProductQuantizer',
]
