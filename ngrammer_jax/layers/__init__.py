"""Layers, each usable on its own in any Flax model: one idea of a paper per file."""

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
