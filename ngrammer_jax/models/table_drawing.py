"""Initial tables in host memory, drawn in pieces with bits identical to one whole draw.

The random bits of a value are a function of the key and of the index of the value in the array. A
generator whose key also holds the index of the first value can therefore draw a part of an array.
The whole array would not fit into memory twice.
"""

from collections.abc import Collection
import functools
import math
from typing import Any

from flax import traverse_util
import jax
from jax.extend import random as generators
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import host_arrays, sharding
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.models import host_tables

PIECE_VALUES = 2**22  # drawn at a time


def create(
  model: Any, one_row: Any, abstract: Any, keys: Any, replaced: Collection[str] = ()
) -> Any:
  """Returns a train state whose arrays in host memory are made there, from one with a row of each.

  Args:
    model: the language model.
    one_row: the state of `with_one_row`, on the devices.
    abstract: shapes and dtypes of the state.
    keys: the collection `host_rows.KEYS` of the initial variables.
    replaced: names of parameters that another run replaces: they are 0.
  """
  shapes = host_arrays.by_name(abstract)
  keys = traverse_util.flatten_dict(keys, sep='/')
  tables = {f'params/{name}': name for name in host_tables.names(model.config)}
  modules = host_tables.modules(model.config, model.vocabulary_size)

  def make(path, leaf):
    name = sharding.leaf_name(path)
    if name not in shapes:
      return leaf
    shape = shapes[name]
    parameter = tables.get(name)
    if parameter is not None and parameter not in replaced:
      key = np.asarray(keys[parameter])
      own = host_arrays.rows_of_process(shape.shape[0])
      rows = draw(modules[parameter], key, shape.dtype, host_tables.processor(), own)
      return host_arrays.from_rows(rows, shape.shape)
    V, *rest = shape.shape
    own = host_arrays.rows_of_process(V)
    array = np.empty((own.stop - own.start, *rest), shape.dtype)
    array[:] = np.asarray(leaf)
    return host_arrays.from_rows(array, shape.shape)

  return jax.tree_util.tree_map_with_path(make, one_row)


def draw(
  module: NGramMemory, key: np.ndarray, dtype: np.dtype, device: jax.Device, rows: slice
) -> np.ndarray:
  """Returns rows of the initial table of a memory, [V, E].

  Args:
    module: the memory.
    key: the data of the key of the table.
    dtype: dtype of the table.
    device: the processor.
    rows: which ones of the V rows.
  """
  V, E = module.table_shape()
  has_offsets = jax.config.jax_threefry_partitionable and key.shape == (2,)
  key = jax.device_put(key, device)
  if not has_offsets:  # another generator
    table_VxE = np.asarray(_draw_rows(module, V, key, None))
    return table_VxE[rows].astype(dtype)
  count = min(rows.stop - rows.start, max(1, PIECE_VALUES // E))
  result = np.empty((rows.stop - rows.start, E), dtype)
  for first in range(rows.start, rows.stop, max(1, count)):
    first = min(first, rows.stop - count)  # the last piece begins in the one before
    offset = np.array(divmod(first * E, 2**32), np.uint32)
    piece = slice(first - rows.start, first - rows.start + count)
    result[piece] = _draw_rows(module, count, key, offset)
  return result


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw_rows(
  module: NGramMemory, rows: int, key_data: jax.Array, offset_2: jax.Array | None
) -> jax.Array:
  """Returns some rows of a table, from a value index in two words; None: 0."""
  if offset_2 is None:
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
