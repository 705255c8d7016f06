"""A memory of n-grams in a safetensors file of another code, and how to load and write it.

A `FileLayout` says which arrays it has. Tables are read and written in `row_files.blocks`.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.interop import conversion, row_files

METADATA_KEY = 'ngram_memory'
# What the rows of the hash depend on, besides the sizes of the tables.
HASH_FACTS = {
  'polynomial': ('vocabulary',),
  'engram': ('vocabulary', 'seed', 'layer'),
  'ple': ('vocabulary', 'seed', 'index'),
}


class Table(NamedTuple):
  """The table: its arrays in the file, and its shape.

  Attributes:
    rows: number of rows of each array by name, in the order of the table. Rows of the table beyond
      them are padding, which is zero.
    shape: its shape.
  """

  rows: Mapping[str, int]
  shape: tuple[int, int]

  def between(self, start: int, stop: int) -> Iterator[tuple[str, int, slice]]:
    """Yields the arrays with rows of a range of the table: name, first row there, rows here.

    The rows are numbered from `start` on.
    """
    first = 0
    for name, rows in self.rows.items():
      low, high = max(start, first), min(stop, first + rows)
      if low < high:
        yield name, low - first, slice(low - start, high - start)
      first += rows


@dataclasses.dataclass(frozen=True)
class FileLayout:
  """The arrays of one memory in a file.

  Attributes:
    origin: description of the official code, for error messages.
    prefix: prefix of all names. Other names with this prefix are an error, all others are ignored.
    table: the table.
    sources: the source of each other parameter by its path, such as `params/gate/key/bias`.
    hash: the hash of the memory.
    numbers: arrays of integers in the file that follow from the hash, by name.
    codebook: the variables of a memory with compressed token ids that are not in a file.
    embedding: name of the token embedding, whose rows are the vocabulary. It is never loaded.
  """

  origin: str
  prefix: str
  table: Table
  sources: Mapping[str, conversion.Source]
  hash: hashes.NumpyHash
  numbers: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  codebook: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  embedding: str | None = None

  @property
  def facts(self) -> dict[str, int]:
    """What the rows of the hash depend on, besides the sizes of the tables."""
    return {name: getattr(self.hash, name) for name in HASH_FACTS[self.hash.kind]}

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array in the file, by name."""
    width = self.table.shape[1]
    shapes = {name: (rows, width) for name, rows in self.table.rows.items()}
    shapes |= {name: values.shape for name, values in self.numbers.items()}
    return conversion.names(self.sources) | shapes

  def load(
    self,
    paths: row_files.Path | Sequence[row_files.Path],
    *,
    made_with: Mapping[str, int] = types.MappingProxyType({}),
    dtype: Any = None,
    sharding: jax.sharding.Sharding | None = None,
  ) -> dict[str, Any]:
    """Loads the variables of a memory, a range of rows of the table at a time.

    Each process reads only the rows of its own devices.

    Args:
      paths: a safetensors file, or the files of one model.
      made_with: what is known of the model of the file: `vocabulary` (with compressed ids, the
        number of classes), `seed`, and `layer` (`engram`: number of the block, from 0) or `index`
        (`ple`: place among the layers of the memory, from 0). What the file does not state is
        needed.
      dtype: dtype of the parameters, such as 'bfloat16' for a large table that is not trained.
        None: float32, which trains; float64 stays float64 in 64-bit mode.
      sharding: sharding of the table. None: on the first device.

    Returns:
      {'params': ...}, and 'codebook' for compressed ids, for `layer.apply`.

    Raises:
      BadInput: an array is missing, extra or of the wrong shape or dtype; the file has rows of
        another vocabulary, seed or layer, or does not state them; values are not finite.
    """
    arrays, metadata = row_files.stored_arrays(paths)
    arrays = conversion.without_wrappers(arrays, self.shapes(), self.origin)
    _check_arrays(arrays, self)
    stated = json.loads(metadata.get(METADATA_KEY, '{}'))
    _check_hash(arrays, self, stated, made_with)
    names = conversion.names(self.sources)
    others = {name: arrays[name].read(0, arrays[name].shape[0]) for name in names}
    variables = conversion.convert(others, self.sources, self.origin, dtype=dtype)
    stored = arrays[next(iter(self.table.rows))].dtype
    dtype = jax.dtypes.canonicalize_dtype(dtype or jnp.promote_types(stored, jnp.float32))
    broken: dict[int, int] = {}  # devices may have the same rows

    def read(start, stop):
      rows = _read_table(arrays, self.table, start, stop)
      broken[start] = conversion.count_not_finite(rows)
      return rows.astype(dtype)

    variables['params']['table'] = _fill_table(read, self.table.shape, dtype, sharding)
    conversion.check_finite(self.origin, {'the table': sum(broken.values())})
    if self.codebook:
      variables['codebook'] = jax.tree.map(jnp.asarray, dict(self.codebook))
    return variables

  def save(self, variables: Mapping[str, Any], path: row_files.Path) -> None:
    """Writes the parameters of a memory, a range of rows of the table at a time.

    The arrays have the dtypes of the parameters. The metadata of the file have the vocabulary, the
    seed and the layer of the hash.

    Args:
      variables: {'params': ...} of the memory, on the devices of this process.
      path: the file; one of this name is replaced.

    Raises:
      BadInput: the parameters are not those of the memory, or other processes have parts of the
        table.
    """
    params = dict(variables['params'])
    table = params.pop('table', np.empty(0))
    conversion.check_shapes({'table': self.table.shape}, {'table': np.shape(table)}, self.origin)
    if isinstance(table, jax.Array) and not table.is_fully_addressable:
      raise errors.BadInput('the table is on devices of several processes: write it from one')
    arrays = dict(self.numbers) | conversion.restore({'params': params}, self.sources, self.origin)
    dtypes = {name: array.dtype for name, array in arrays.items()}
    dtypes |= dict.fromkeys(self.table.rows, table.dtype)
    described = {name: (shape, dtypes[name]) for name, shape in self.shapes().items()}
    metadata = {'format': 'pt', METADATA_KEY: json.dumps(self.facts)}
    with row_files.new_file(path, described, metadata) as write:
      for name, array in arrays.items():
        write(name, 0, array)
      row_bytes = self.table.shape[1] * table.dtype.itemsize
      for start, stop in row_files.blocks(0, sum(self.table.rows.values()), row_bytes):
        rows = _table_rows(table, start, stop)
        for name, first, selected in self.table.between(start, stop):
          write(name, first, rows[selected])


def _check_arrays(arrays, layout):
  """Raises BadInput for arrays of the wrong name, shape or dtype."""
  expected = layout.shapes()
  codes = {name: ('I32', 'I64') for name in layout.numbers}
  for name, array in arrays.items():  # before the names: 8 bits have scales, which are extra
    choices = codes.get(name, row_files.FLOATS)
    if name in expected and array.code not in choices:
      product = 'its product with its scales' if array.code.startswith('F8') else 'it'
      raise errors.BadInput(
        f'{name} of {layout.origin} has the dtype {array.code}, not {" or ".join(choices)}: '
        f'convert {product} to {choices[-1]}'
      )
  is_own = lambda name: name in expected or name.startswith(layout.prefix)
  shapes = {name: array.shape for name, array in arrays.items() if is_own(name)}
  conversion.check_shapes(expected, shapes, layout.origin, (layout.embedding,))


def _check_hash(arrays, layout, metadata, made_with):
  """Raises BadInput for a file of another vocabulary, seed or layer, or that does not state it."""
  facts = layout.facts
  stated = [*metadata.items(), *made_with.items()]
  if layout.embedding in arrays:
    stated.append(('vocabulary', arrays[layout.embedding].shape[0]))
  for name, value in stated:
    if name not in facts:
      raise errors.BadInput(f'made_with has {name!r}, expected {", ".join(map(repr, facts))}')
    if value != facts[name]:
      raise errors.BadInput(
        f'the weights were made with {name}={value}, but the hash of the memory has '
        f'{name}={facts[name]}: it would read other rows'
      )
  described = ', '.join(f'{name}={value}' for name, value in facts.items())
  for name, values in layout.numbers.items():
    stored = arrays[name].read(0, len(values))
    if not np.array_equal(stored, values):
      raise errors.BadInput(
        f'{name} is {stored.tolist()} in the file, but {values.tolist()} with {described}: the '
        f'weights are of another vocabulary, seed or layer'
      )
  has_multipliers = any(name.endswith('multipliers') for name in layout.numbers)
  missing = [name for name in facts if name not in dict(stated)]
  if missing and not has_multipliers:
    raise errors.BadInput(
      f'the file does not state {", ".join(missing)} of the hash that its rows are for: give '
      f'made_with={{{", ".join(f"{name!r}: ..." for name in missing)}}}, from the config of its '
      f'model'
    )


def _read_table(arrays, table, start, stop):
  """Returns rows of the table; zeros beyond those of the file."""
  read = lambda name, first, rows: arrays[name].read(first, first + rows.stop - rows.start)
  parts = [read(*each) for each in table.between(start, stop)]
  if not parts:
    return np.zeros((stop - start, table.shape[1]), np.float32)
  rows = np.concatenate(parts)
  return np.pad(rows, ((0, stop - start - len(rows)), (0, 0)))


def _fill_table(read, shape, dtype, sharding):
  """Returns a table of the rows that `read(start, stop)` returns."""
  sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shards = []
  for device, (row_slice, columns) in sharding.addressable_devices_indices_map(shape).items():
    start, stop, _ = row_slice.indices(shape[0])
    width = len(range(*columns.indices(shape[1])))
    ranges = row_files.blocks(start, stop, shape[1] * dtype.itemsize)
    blocks = ((low - start, read(low, high)[:, columns]) for low, high in ranges)
    fill = _fill_device if _is_device_memory(sharding, device) else _fill_host
    device_sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    shards.append(fill(blocks, (stop - start, width), dtype, device_sharding))
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _fill_device(blocks, shape, dtype, device_sharding):
  """Returns an array of the blocks, which are written into it one by one."""
  values = jnp.zeros(shape, dtype, device=device_sharding)
  for first, block in blocks:
    values = _update_rows(values, block, first).block_until_ready()  # or blocks would queue up
  return values


def _fill_host(blocks, shape, dtype, device_sharding):
  """Returns an array of the blocks in host memory, where computations do not write."""
  values = np.empty(shape, dtype)
  for first, block in blocks:
    values[first : first + len(block)] = block
  return jax.device_put(values, device_sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _update_rows(values, block, first):
  """Returns the values with other rows, in the same memory."""
  return jax.lax.dynamic_update_slice_in_dim(values, block, first, 0)


def _is_device_memory(sharding, device):
  """Returns whether arrays of this sharding are in the memory that the device computes in."""
  return sharding.memory_kind in (None, device.default_memory().kind)


def _table_rows(values: jax.Array | np.ndarray, start: int, stop: int) -> np.ndarray:
  """Returns rows of a table that may be sharded; copies no others from its devices."""
  if isinstance(values, np.ndarray):
    return values[start:stop]
  rows = np.empty((stop - start, values.shape[1]), values.dtype)
  for shard in values.addressable_shards:
    row_slice, columns = shard.index
    first, last, _ = row_slice.indices(len(values))
    low, high = max(start, first), min(stop, last)
    if shard.replica_id == 0 and low < high:  # a replica would only be read twice
      if _is_device_memory(shard.data.sharding, shard.device):
        block = jax.lax.dynamic_slice_in_dim(shard.data, low - first, high - low)
      else:
        block = np.asarray(shard.data)[low - first : high - first]
      rows[low - start : high - start, columns] = block
  return rows
