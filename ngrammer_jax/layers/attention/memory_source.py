"""Sources of the memory's keys and values for attention in blocks.

A source reads one block of one key head at a time: from a KV cache, or from a memory of layer
inputs, whose keys and values it projects. The keys and values of the whole memory are never
materialized.

B batch, M memory, R = M + inputs before the memory, D model width, C key heads, H head width, K
tokens of a block.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.layers.attention.cache import KeyValues
from ngrammer_jax.layers.attention.projection import (
  HeadProjection,
  Projections,
  rotate_last,
  with_params,
)
from ngrammer_jax.layers.context import Positions

# Submodules of `HeadProjection` with parameters for single heads.
_PER_HEAD = ('key', 'key_convolution', 'value', 'value_convolution')


class LayerInputs(NamedTuple):
  """A memory of layer inputs; their keys and values are projected in every segment.

  rows_BxRxD: the M inputs before the segment, preceded by `Projections.lookback` more.
  norm: module that normalises them like the inputs of the segment. None: no norm.
  """

  rows_BxRxD: jax.Array
  norm: nn.Module | None = None


@struct.dataclass
class MemorySource:
  """The source of the keys and values of a memory. All None: there is no memory.

  Attributes:
    read: returns the keys and values [B, K, H] of a key head for a block of tokens. Arguments: the
      weights of the head, a block of `rows`, `cache`, and the index of the head.
    weights: arrays [C, ...] with a gradient.
    rows: arrays [B, M, ...]. An array may begin with further rows: then each block has as many
      rows before its own.
    cache: arrays [B, C, M, H].
  """

  read: Callable[..., tuple[jax.Array, jax.Array]] | None = struct.field(
    pytree_node=False, default=None
  )
  weights: Any = None
  rows: Any = None
  cache: Any = None


def from_cache(cached: KeyValues, order_BxM: jax.Array) -> MemorySource:
  """Returns a source that reads cache slots in the order of their tokens."""
  return MemorySource(_read_cache, rows=order_BxM, cache=(cached.keys, cached.values))


def _read_cache(
  weights: None, order_BxK: jax.Array, cache: tuple[jax.Array, jax.Array], head: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the keys and values of a head in some cache slots, [B, K, H]."""
  del weights
  rows_Bx1 = jnp.arange(len(order_BxK))[:, None]
  keys_BxCxMxH, values_BxCxMxH = cache
  return keys_BxCxMxH[rows_Bx1, head, order_BxK], values_BxCxMxH[rows_Bx1, head, order_BxK]


def from_layer_inputs(
  memory: LayerInputs,
  params: Mapping[str, Any],
  positions: Positions,
  options: Projections,
  key_heads: int,
  dtype: jnp.dtype,
) -> MemorySource:
  """Returns a source that projects the layer inputs of a memory.

  Args:
    memory: the layer inputs.
    params: parameters of the attention layer, without boxes.
    positions: positions of the memory and the segment.
    options: options of the projections.
    key_heads: C.
    dtype: dtype of keys and values.
  """
  M = memory.rows_BxRxD.shape[1] - options.lookback
  rotation = positions.rotation
  if rotation is not None:
    rotation = rotation.between(0, M)
  rows = memory.rows_BxRxD, positions.position_BxP[:, :M], rotation
  weights = {}
  for name in _PER_HEAD:
    if name in params:
      weights[name] = jax.tree.map(_heads_first, params[name])
  if 'key_norm' in params:
    weights['key_norm'] = _repeat(params['key_norm'], key_heads)
  norm = memory.norm
  if norm is not None:
    weights['norm'] = _repeat(nn.unbox(norm.variables['params']), key_heads)
    norm = norm.clone(parent=None, name=None)
  return MemorySource(functools.partial(_project_block, options, dtype, norm), weights, rows)


def _heads_first(leaf: jax.Array) -> jax.Array:
  """[..., C, H] -> [C, ..., H]"""
  return jnp.moveaxis(leaf, -2, 0)


def _repeat(tree: Any, count: int) -> Any:
  """Repeats all arrays of a tree along a new first axis."""
  return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def _project_block(
  options: Projections,
  dtype: jnp.dtype,
  norm: nn.Module | None,
  weights: Mapping[str, Any],
  rows: tuple[jax.Array, ...],
  cache: None,
  head: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Reads one block of layer inputs, see `MemorySource.read`."""
  del cache, head
  rows_BxRxD, position_BxK, rotation = rows
  params = {}
  for name in _PER_HEAD:
    if name in weights:
      params[name] = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, -2), weights[name])
  if 'key_norm' in weights:
    params['key_norm'] = weights['key_norm']
  project = HeadProjection(options, dtype, with_params(params))
  features = 1, weights['key']['kernel'].shape[-1]
  with nn.logical_axis_rules(()):  # each device projects its own rows and heads
    if norm is not None:
      rows_BxRxD = norm.apply({'params': weights['norm']}, rows_BxRxD)
    key_BxKx1xH, _ = project('key', rows_BxRxD, features, position_BxK, options.lookback)
    value_BxKx1xH, _ = project('value', rows_BxRxD, features, position_BxK, options.lookback)
  key_BxKx1xH = rotate_last(key_BxKx1xH, rotation)
  return key_BxKx1xH[:, :, 0], value_BxKx1xH[:, :, 0]
