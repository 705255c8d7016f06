"""A memory of n-grams in a safetensors file of another code, and how to load and write it.

Its parameters are those of ours, reshaped and transposed: a `FileLayout` says how, for both
directions. Tables are read and written in ranges of ROWS_AT_ONCE rows.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import types
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.interop import conversion, row_files, scaled_floats

ROWS_AT_ONCE = 2**16
METADATA_KEY = 'ngram_memory'
# What the rows of the hash depend on, besides the sizes of the tables.
HASH_FACTS = {
  'polynomial': ('vocabulary',),
  'engram': ('vocabulary', 'seed', 'layer'),
  'ple': ('vocabulary', 'seed', 'index'),
}


class Piece(NamedTuple):
  """Rows of an array in a file, from `start` to before `stop`."""

  name: str
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Part:
  """A parameter, which is the rows of one or several pieces.

  Attributes:
    path: path of the parameter.
    pieces: its rows in the file, in this order.
    row_shape: shape of such a row.
    shape: shape that the rows are reshaped to.
    axes: the axes that are then transposed to, as in `np.transpose`.
    is_reversed: whether the first axis of the parameter is then reversed.
  """

  path: str
  pieces: tuple[Piece, ...]
  row_shape: tuple[int, ...]
  shape: tuple[int, ...]
  axes: tuple[int, ...]
  is_reversed: bool = False

  def from_rows(self, rows: np.ndarray) -> np.ndarray:
    """Returns the parameter of the rows in the file."""
    value = rows.reshape(self.shape).transpose(self.axes)
    return value[::-1] if self.is_reversed else value

  def to_rows(self, value: np.ndarray) -> np.ndarray:
    """Returns the rows in the file of the parameter."""
    value = value[::-1] if self.is_reversed else value
    return value.transpose(np.argsort(self.axes)).reshape(-1, *self.row_shape)

  @property
  def parameter_shape(self) -> tuple[int, ...]:
    """Shape of the parameter."""
    return tuple(self.shape[axis] for axis in self.axes)


class Table(NamedTuple):
  """The table: its rows in the file, its shape, and the array of its scales if it has 8 bits.

  Rows of the parameter beyond those of the file are padding, which is zero.
  """

  pieces: tuple[Piece, ...]
  shape: tuple[int, int]
  scale: str | None = None


@dataclasses.dataclass(frozen=True)
class FileLayout:
  """The arrays of one memory in a file.

  Attributes:
    origin: description of the official code, for error messages.
    prefix: prefix of all names. Other names with this prefix are an error, all others are ignored.
    table: the table.
    parts: the other parameters.
    hash: the hash of the memory.
    numbers: arrays of integers in the file that follow from the hash, by name.
    codebook: the variables of a memory with compressed token ids that are not in a file.
    embedding: name of the token embedding, whose rows are the vocabulary. It is never loaded.
  """

  origin: str
  prefix: str
  table: Table
  parts: tuple[Part, ...]
  hash: hashes.NumpyHash
  numbers: Mapping[str, np.ndarray]
  codebook: Mapping[str, np.ndarray]
  embedding: str | None = None

  @property
  def facts(self) -> dict[str, int]:
    """What the rows of the hash depend on, besides the sizes of the tables."""
    return {name: getattr(self.hash, name) for name in HASH_FACTS[self.hash.kind]}

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array in the file, by name."""
    rows, width = self.table.shape
    pieces = [(piece, (width,)) for piece in self.table.pieces]
    pieces += [(piece, part.row_shape) for part in self.parts for piece in part.pieces]
    last_first = sorted(pieces, key=lambda item: item[0].stop)
    shapes = {piece.name: (piece.stop, *row_shape) for piece, row_shape in last_first}
    if self.table.scale is not None:
      shapes[self.table.scale] = (self.table.pieces[0].stop, width // scaled_floats.SCALED_VALUES)
    return shapes | {name: values.shape for name, values in self.numbers.items()}

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
      dtype: dtype of the parameters. None: those of the file, float32 for a table of 8 bits.
      sharding: sharding of the table. None: on the first device.

    Returns:
      {'params': ...}, and 'codebook' for compressed ids, for `layer.apply`.

    Raises:
      BadInput: an array is missing, extra or of the wrong shape or dtype; the file has rows of
        another vocabulary, seed or layer, or does not state them.
    """
    arrays, metadata = row_files.stored_arrays(paths)
    _check_arrays(arrays, self)
    _check_hash(arrays, self, _stated_facts(metadata, paths), made_with)
    params = {
      part.path: jnp.asarray(part.from_rows(_read(arrays, part.pieces)), dtype)
      for part in self.parts
    }
    if dtype is None:
      stored = arrays[self.table.pieces[0].name].dtype
      dtype = np.float32 if self.table.scale is not None else stored
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    read = lambda start, stop: _read_table(arrays, self.table, start, stop).astype(dtype)
    params['table'] = _fill_table(read, self.table.shape, dtype, sharding)
    variables = {'params': traverse_util.unflatten_dict(params, sep='/')}
    if self.codebook:
      variables['codebook'] = jax.tree.map(jnp.asarray, dict(self.codebook))
    return variables

  def save(self, variables: Mapping[str, Any], path: row_files.Path) -> None:
    """Writes the parameters of a memory, a range of rows of the table at a time.

    The arrays have the dtypes of the parameters, but a table with scales has 8 bits. The metadata
    of the file have the vocabulary, the seed and the layer of the hash.

    Args:
      variables: {'params': ...} of the memory, on the devices of this process.
      path: the file; one of this name is replaced.

    Raises:
      BadInput: the parameters are not those of the memory; other processes have parts of the
        table; or a table that would have 8 bits has values that are not finite.
    """
    params = traverse_util.flatten_dict(variables['params'], sep='/')
    expected = {part.path: part.parameter_shape for part in self.parts}
    shapes = {name: np.shape(value) for name, value in params.items()}
    conversion.check_shapes(expected | {'table': self.table.shape}, shapes, self.origin)
    if isinstance(params['table'], jax.Array) and not params['table'].is_fully_addressable:
      raise errors.BadInput(
        'the table is on the devices of several processes: write it from one process'
      )
    metadata = {'format': 'pt', METADATA_KEY: json.dumps(self.facts)}
    with row_files.Writer(path, _file_arrays(params, self), metadata) as writer:
      for name, values in self.numbers.items():
        writer.write(name, 0, values)
      for part in self.parts:
        rows = part.to_rows(np.asarray(params[part.path]))
        for piece, start, stop in _pieces_between(part.pieces, 0, len(rows)):
          writer.write(piece.name, piece.start, rows[start:stop])
      _write_table(writer, params['table'], self.table)


def _check_arrays(arrays, layout):
  """Raises BadInput for arrays of the wrong name, shape or dtype."""
  expected = layout.shapes()
  shapes = {
    name: array.shape
    for name, array in arrays.items()
    if name in expected or name.startswith(layout.prefix)
  }
  conversion.check_shapes(expected, shapes, layout.origin, (layout.embedding,))
  codes = {name: ('I64', 'I32') for name in layout.numbers}
  if layout.table.scale is not None:
    codes |= {piece.name: ('F8_E4M3',) for piece in layout.table.pieces}
    codes[layout.table.scale] = ('F8_E8M0',)
  for name in expected:
    choices = codes.get(name, ('F64', 'F32', 'F16', 'BF16'))
    if arrays[name].code not in choices:
      raise errors.BadInput(
        f'{name} has the dtype {arrays[name].code}, expected {" or ".join(choices)} for '
        f'{layout.origin}'
      )


def _stated_facts(metadata, paths):
  """Returns what the metadata of a file that `save` wrote state of the hash; {} of another file."""
  text = metadata.get(METADATA_KEY, '{}')
  try:
    facts = json.loads(text)
  except json.JSONDecodeError:
    facts = None
  if not isinstance(facts, dict):
    raise errors.BadInput(
      f'{paths} has the metadata {METADATA_KEY}={text!r}, expected a JSON object such as '
      f'{{"vocabulary": 4096}}: write the file again'
    )
  return facts


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


def _ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
  """Yields ranges of at most ROWS_AT_ONCE rows."""
  for first in range(start, stop, ROWS_AT_ONCE):
    yield first, min(first + ROWS_AT_ONCE, stop)


def _pieces_between(
  pieces: Sequence[Piece], start: int, stop: int
) -> Iterator[tuple[Piece, int, int]]:
  """Yields the pieces with rows of the parameter from `start` to before `stop`, cut to those.

  The numbers are the rows of the parameter.
  """
  first = 0
  for name, begin, end in pieces:
    last = first + end - begin
    low, high = max(start, first), min(stop, last)
    if low < high:
      yield Piece(name, begin + low - first, begin + high - first), low, high
    first = last


def _read(arrays, pieces, start=0, stop=2**62):
  """Returns rows of a parameter."""
  selected = _pieces_between(pieces, start, stop)
  return np.concatenate([arrays[p.name].read(p.start, p.stop) for p, _, _ in selected])


def _read_table(arrays, table, start, stop):
  """Returns rows of the table, as float32 if they have scales; zeros beyond those of the file."""
  count = sum(piece.stop - piece.start for piece in table.pieces)
  if start >= count:
    return np.zeros((stop - start, table.shape[1]), np.float32)
  rows = _read(arrays, table.pieces, start, stop)
  if table.scale is not None:
    rows = scaled_floats.dequantize(rows, arrays[table.scale].read(start, start + len(rows)))
  return np.pad(rows, ((0, stop - start - len(rows)), (0, 0)))


def _fill_table(read, shape, dtype, sharding):
  """Returns a table of the rows that `read(start, stop)` returns."""
  sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shards = []
  for device, (row_slice, columns) in sharding.addressable_devices_indices_map(shape).items():
    start, stop, _ = row_slice.indices(shape[0])
    width = len(range(*columns.indices(shape[1])))
    blocks = ((low - start, read(low, high)[:, columns]) for low, high in _ranges(start, stop))
    fill = _fill_device if _is_device_memory(sharding, device) else _fill_host
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    shards.append(fill(blocks, (stop - start, width), dtype, place))
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _fill_device(blocks, shape, dtype, place):
  """Returns an array of the blocks, which are written into it one by one."""
  values = jnp.zeros(shape, dtype, device=place)
  for first, block in blocks:
    values = _update_rows(values, block, first).block_until_ready()  # or blocks would queue up
  return values


def _fill_host(blocks, shape, dtype, place):
  """Returns an array of the blocks in host memory, where computations do not write."""
  values = np.empty(shape, dtype)
  for first, block in blocks:
    values[first : first + len(block)] = block
  return jax.device_put(values, place)


@functools.partial(jax.jit, donate_argnums=0)
def _update_rows(values, block, first):
  """Returns the values with other rows, in the same memory."""
  return jax.lax.dynamic_update_slice_in_dim(values, block, first, 0)


def _is_device_memory(sharding, device):
  """Returns whether arrays of this sharding are in the memory that the device computes in."""
  return sharding.memory_kind in (None, device.default_memory().kind)


def _file_arrays(params, layout):
  """Returns shape and dtype of each array to write, by name."""
  dtypes = dict.fromkeys(layout.numbers, np.dtype(np.int64))
  for part in layout.parts:
    for piece in part.pieces:
      other = dtypes.get(piece.name, params[part.path].dtype)
      dtypes[piece.name] = jnp.promote_types(other, params[part.path].dtype)
  table = layout.table
  is_scaled = table.scale is not None
  table_dtype = ml_dtypes.float8_e4m3fn if is_scaled else params['table'].dtype
  dtypes |= dict.fromkeys((piece.name for piece in table.pieces), table_dtype)
  if is_scaled:
    dtypes[table.scale] = ml_dtypes.float8_e8m0fnu
  return {name: (shape, dtypes[name]) for name, shape in layout.shapes().items()}


def _write_table(writer, values, table):
  """Writes the rows of the table that are in the file."""
  for start, stop in _ranges(0, sum(piece.stop - piece.start for piece in table.pieces)):
    rows = _table_rows(values, start, stop)
    if table.scale is not None:
      if not np.isfinite(rows).all():
        raise errors.BadInput(
          f'rows {start:,} to {stop - 1:,} of the table have values that are not finite, which '
          f'8 bits with scales cannot have'
        )
      rows, scales = scaled_floats.quantize(rows)
      writer.write(table.scale, start, scales)
    for piece, low, high in _pieces_between(table.pieces, start, stop):
      writer.write(piece.name, piece.start, rows[low - start : high - start])


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
