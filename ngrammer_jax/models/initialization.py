"""Initial weights of other people's code, for results that are to be compared with theirs.

Without a recipe every layer draws its own: kernels of variance 1 / inputs, embeddings of
variance 1 / width, biases of 0.
"""

import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp

from ngrammer_jax.config import initial

# Vectors of words and tails, and what the biases of an output layer made of them are called.
_BIAS_OF = {'embedding': 'bias', 'softmax_weight': 'softmax_bias', 'cluster_weight': 'cluster_bias'}
_PROJECTIONS = ('projection', 'softmax_projection')
_DISTANCES = ('content_bias', 'position_bias', 'distance_embedding', 'position')


def redrawn(config: initial.InitialConfig, params: Any, key: jax.Array) -> Any:
  """The parameters with those of the recipe drawn again, each from a key of its name."""
  inputs = {}  # of the linear maps, by the name of their biases

  def note(path, leaf):
    parts = names(path)
    *layer, last = parts
    if last == 'kernel':
      # Attention's output is summed over heads and features, every other over the first axis.
      summed = leaf.shape[:-1] if layer[-1] == 'out' else leaf.shape[:1]
      inputs[*layer, 'bias'] = math.prod(summed)
    elif kind(parts) in _BIAS_OF:
      name = last.replace(kind(parts), _BIAS_OF[kind(parts)])
      inputs[*layer, name] = leaf.shape[-1]

  jax.tree_util.tree_map_with_path(note, params)
  draw = {'transformer_xl': _of_transformer_xl, 'adaptive_span': _of_adaptive_span}[config.recipe]

  def redraw(path, leaf):
    parts = names(path)
    if 'ngrammer' in parts:
      return leaf
    own = jax.random.fold_in(key, zlib.crc32('/'.join(parts).encode()))
    return draw(config, own, parts, leaf, inputs)

  return jax.tree_util.tree_map_with_path(redraw, params)


def _of_transformer_xl(config, key, parts, leaf, inputs):
  del inputs
  what = kind(parts)
  deviation = config.projection_deviation if what in _PROJECTIONS else config.deviation
  normal = lambda: deviation * jax.random.normal(key, leaf.shape, leaf.dtype)
  if what == 'scale':
    return 1 + normal()
  if what == 'distance_bias':
    return jnp.zeros_like(leaf)
  return normal() if what in ('kernel', *_BIAS_OF, *_PROJECTIONS, *_DISTANCES) else leaf


def _of_adaptive_span(config, key, parts, leaf, inputs):
  del config
  what = kind(parts)
  if what in ('embedding', 'distance_embedding'):
    return jax.random.normal(key, leaf.shape, leaf.dtype)
  if what in _PROJECTIONS:
    count = leaf.shape[0]  # from the width of the cluster
  elif what in ('softmax_weight', 'cluster_weight'):
    count = leaf.shape[-1]
  else:
    count = inputs.get((*parts[:-1], 'bias') if what == 'kernel' else tuple(parts))
  if count is None:
    return leaf
  return jax.random.uniform(key, leaf.shape, leaf.dtype, -(count**-0.5), count**-0.5)


def names(path: Any) -> list[str]:
  """The parts of the name of a parameter, from its path."""
  return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def kind(parts: list[str]) -> str:
  """The last part of a name, without the number of a cluster: embedding_0 is an embedding."""
  head, _, number = parts[-1].rpartition('_')
  return head if number.isdigit() else parts[-1]
