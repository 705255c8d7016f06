"""Initial tables in host memory, drawn in pieces with bits identical to one whole draw.

The random bits of a value are a function of the key and of the index of the value in the array. A
generator whose key also holds the index of the first value can therefore draw a part of an array.
The whole array would not fit into memory twice.
"""

import functools
import math

import jax
from jax.extend import random as generators
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers.ngram.memory import NGramMemory

PIECE_VALUES = 2**22  # drawn at a time


def draw(module: NGramMemory, key: np.ndarray, dtype: np.dtype, device: jax.Device) -> np.ndarray:
  """Returns the initial table of a memory, [V, E].

  Args:
    module: the memory.
    key: the data of the key of the table.
    dtype: dtype of the table.
    device: the processor.
  """
  V, E = module.table_shape()
  if not jax.config.jax_threefry_partitionable or key.shape != (2,):  # another generator
    rows = V
  else:
    rows = min(V, max(1, PIECE_VALUES // E))
  key = jax.device_put(key, device)
  table_VxE = np.empty((V, E), dtype)
  for first in range(0, V, rows):
    first = min(first, V - rows)  # the last piece begins in the one before
    offset = np.array(divmod(first * E, 2**32), np.uint32)
    table_VxE[first : first + rows] = _draw_rows(module, rows, V, key, offset)
  return table_VxE


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draw_rows(
  module: NGramMemory, rows: int, V: int, key_data: jax.Array, offset_2: jax.Array
) -> jax.Array:
  """Returns some of the V rows of a table, from a value index in two words."""
  if rows == V:
    key = jax.random.wrap_key_data(key_data)
  else:
    key = jax.random.wrap_key_data(jnp.concatenate([key_data, offset_2]), impl=_OFFSET_THREEFRY)
  return module.table_initializer()(key, (rows, module.table_shape()[1]), module.table_dtype)


def _random_bits(key_4: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
  """Returns the bits of threefry from an index on.

  Args:
    key_4: two words of the key, and two of the index.
    bit_width: 32 or 64.
    shape: of the result.
  """
  first, second, high_offset, low_offset = key_4
  low = jax.lax.iota(jnp.uint32, math.prod(shape)) + low_offset
  high = high_offset + (low < low_offset).astype(jnp.uint32)
  high, low = generators.threefry2x32_p.bind(first, second, high, low)
  if bit_width == 64:
    bits = high.astype(jnp.uint64) << 32 | low.astype(jnp.uint64)
  elif bit_width == 32:
    bits = high ^ low
  else:
    raise ValueError(f'initial tables support 32 or 64 random bits per value, not {bit_width}')
  return bits.reshape(shape)


def _has_no_other_use(*args: object) -> jax.Array:
  raise NotImplementedError('keys of initial tables cannot be split or folded')


_OFFSET_THREEFRY = generators.define_prng_impl(
  key_shape=(4,),
  seed=_has_no_other_use,
  split=_has_no_other_use,
  fold_in=_has_no_other_use,
  random_bits=_random_bits,
  name='threefry2x32_from_an_index',
  tag='offset',
)
