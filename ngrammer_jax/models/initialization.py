"""Initial weights of published code, for comparison with its results.

Without a recipe every layer has its own initializers: kernels of variance 1 / inputs, embeddings
of variance 1 / width, biases of 0.

`transformer_xl` (PyTorch): kernels, embeddings, u and v are normal with `deviation`, scales of
norms 1 + normal with `deviation`, projections of an adaptive softmax normal with
`projection_deviation`, biases 0.
`adaptive_span`: embeddings are unit normal, kernels and biases uniform up to 1 / sqrt(inputs).
Memories of n-grams and of product keys, spans, persistent vectors and convolutions keep their own
initializers.
"""

import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp

from ngrammer_jax.config import initial, product_memory
from ngrammer_jax.config.ngram import memory as ngram_memory

# The bias of each weight of an output layer.
_BIAS_OF = {'embedding': 'bias', 'softmax_weight': 'softmax_bias', 'cluster_weight': 'cluster_bias'}
_OWN = ('ngrammer', ngram_memory.PREFIX, ngram_memory.TABLE_PREFIX, product_memory.NAME)
_PROJECTIONS = ('projection', 'softmax_projection')
_DISTANCES = ('content_bias', 'position_bias', 'distance_embedding', 'position')


def reinitialize(config: initial.InitialConfig, params: Any, key: jax.Array) -> Any:
  """Returns the parameters with new values by the recipe; the key of each depends on its name."""
  fan_in = _bias_fan_in(params)

  def reinitialize_leaf(path, leaf):
    names = path_names(path)
    if any(name.startswith(_OWN) for name in names):
      return leaf
    leaf_key = jax.random.fold_in(key, zlib.crc32('/'.join(names).encode()))
    if config.recipe == 'transformer_xl':
      return _init_transformer_xl(config, leaf_key, names, leaf)
    return _init_adaptive_span(leaf_key, names, leaf, fan_in)

  return jax.tree_util.tree_map_with_path(reinitialize_leaf, params)


def _bias_fan_in(params: Any) -> dict[tuple[str, ...], int]:
  """Returns the number of inputs of every linear map, by the path of its bias."""
  fan_in = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    names = path_names(path)
    *layer, last = names
    suffix = param_suffix(names)
    if last == 'kernel':
      # The output of attention is summed over heads and features, all others over the first axis.
      summed = leaf.shape[:-1] if layer[-1] == 'out' else leaf.shape[:1]
      fan_in[*layer, 'bias'] = math.prod(summed)
    elif suffix in _BIAS_OF:
      fan_in[*layer, last.replace(suffix, _BIAS_OF[suffix])] = leaf.shape[-1]
  return fan_in


def _init_transformer_xl(
  config: initial.InitialConfig, key: jax.Array, names: list[str], leaf: jax.Array
) -> jax.Array:
  """Returns a new value of a parameter, or the parameter if the recipe does not cover it."""
  suffix = param_suffix(names)
  if suffix == 'distance_bias':
    return jnp.zeros_like(leaf)
  if suffix not in ('scale', 'kernel', *_BIAS_OF, *_PROJECTIONS, *_DISTANCES):
    return leaf
  deviation = config.projection_deviation if suffix in _PROJECTIONS else config.deviation
  value = deviation * jax.random.normal(key, leaf.shape, leaf.dtype)
  if suffix == 'scale':
    return 1 + value
  return value


def _init_adaptive_span(
  key: jax.Array, names: list[str], leaf: jax.Array, fan_in: dict[tuple[str, ...], int]
) -> jax.Array:
  """Returns a new value of a parameter, or the parameter if the recipe does not cover it."""
  suffix = param_suffix(names)
  if suffix in ('embedding', 'distance_embedding'):
    return jax.random.normal(key, leaf.shape, leaf.dtype)
  if suffix in _PROJECTIONS:
    inputs = leaf.shape[0]  # width of the cluster
  elif suffix in ('softmax_weight', 'cluster_weight'):
    inputs = leaf.shape[-1]
  elif suffix == 'kernel':
    inputs = fan_in.get((*names[:-1], 'bias'))
  else:
    inputs = fan_in.get(tuple(names))
  if inputs is None:
    return leaf
  bound = inputs**-0.5
  return jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)


def path_names(path: Any) -> list[str]:
  """Returns the names along the path of a parameter."""
  return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def param_suffix(names: list[str]) -> str:
  """Returns the last name of a path without a cluster number: `embedding` for `embedding_0`."""
  prefix, _, number = names[-1].rpartition('_')
  return prefix if number.isdigit() else names[-1]
