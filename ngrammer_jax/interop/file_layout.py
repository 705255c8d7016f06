"""Loads and writes n-gram memories in the safetensors files of other implementations.

A `FileLayout` lists the arrays of one memory. Its table is read and written block by block (see
`row_files.blocks`), so a large table does not exist twice in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.interop import named_arrays, row_files, sharded_table
from ngrammer_jax.interop.named_arrays import ArraySource

METADATA_KEY = 'ngram_memory'
# What the rows of a hash depend on, besides the sizes of the tables.
HASH_SETTINGS = {
  'polynomial': ('vocabulary',),
  'engram': ('vocabulary', 'seed', 'layer'),
  'ple': ('vocabulary', 'seed', 'index'),
}


class TableRange(NamedTuple):
  """Rows of one array of the file within a range of the table.

  Attributes:
    name: name of the array.
    first_row: the first of these rows in the array.
    rows: the same rows, numbered from the start of the range.
  """

  name: str
  first_row: int
  rows: slice


class StoredTable(NamedTuple):
  """A table: its arrays in the file, and its shape.

  Attributes:
    rows: number of rows of each array by name, in the order of the table. Further rows of the table
      are zero padding.
    shape: its shape.
  """

  rows: Mapping[str, int]
  shape: tuple[int, int]

  @property
  def num_stored_rows(self) -> int:
    """Number of rows in the file."""
    return sum(self.rows.values())

  def ranges(self, start: int, stop: int) -> Iterator[TableRange]:
    """Yields the rows of each array within a range of the table."""
    first = 0
    for name, rows in self.rows.items():
      low = max(start, first)
      high = min(stop, first + rows)
      if low < high:
        yield TableRange(name, low - first, slice(low - start, high - start))
      first += rows

  def read(self, arrays: Mapping[str, row_files.StoredArray], start: int, stop: int) -> np.ndarray:
    """Returns rows of the table; zeros beyond the rows of the file."""
    parts = []
    for name, first_row, rows in self.ranges(start, stop):
      parts.append(arrays[name].read(first_row, first_row + rows.stop - rows.start))
    if not parts:
      return np.zeros((stop - start, self.shape[1]), np.float32)
    values = np.concatenate(parts)
    return np.pad(values, ((0, stop - start - len(values)), (0, 0)))


@dataclasses.dataclass(frozen=True)
class FileLayout:
  """The arrays of one memory in a file.

  Attributes:
    origin: description of the official code, for error messages.
    prefix: prefix of all names. Other names with this prefix are an error, all others are ignored.
    table: the table.
    sources: the source of each other parameter by its path, such as `params/gate/key/bias`.
    hash: the hash of the memory.
    hash_numbers: integer arrays of the hash, such as its multipliers, by name. The file must have
      the same numbers.
    codebook: variables of a memory with compressed token ids. They are not in the file.
    embedding: name of the token embedding, to read the vocabulary size. It is never loaded.
  """

  origin: str
  prefix: str
  table: StoredTable
  sources: Mapping[str, ArraySource]
  hash: hashes.NumpyHash
  hash_numbers: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  codebook: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  embedding: str | None = None

  @property
  def hash_settings(self) -> dict[str, int]:
    """The settings of the hash, besides the sizes of the tables."""
    return {name: getattr(self.hash, name) for name in HASH_SETTINGS[self.hash.kind]}

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array in the file, by name."""
    width = self.table.shape[1]
    shapes = named_arrays.shapes_by_name(self.sources)
    shapes |= {name: (rows, width) for name, rows in self.table.rows.items()}
    shapes |= {name: values.shape for name, values in self.hash_numbers.items()}
    return shapes

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
      made_with: settings of the model of the file: `vocabulary` (with compressed ids, the number of
        classes), `seed`, and `layer` (`engram`: number of the block, from 0) or `index` (`ple`:
        place among the layers of the memory, from 0). Settings missing in the file are required.
      dtype: dtype of the parameters, such as 'bfloat16' for a large frozen table. None: float32
        (for training); float64 stays float64 in 64-bit mode.
      sharding: sharding of the table. None: on the first device.

    Returns:
      {'params': ...}, and 'codebook' for compressed ids, for `layer.apply`.

    Raises:
      BadInput: an array is missing, extra or of the wrong shape or dtype; the file has rows of
        another vocabulary, seed or layer, or does not state them; non-finite values.
    """
    arrays, metadata = row_files.stored_arrays(paths)
    arrays = named_arrays.without_wrappers(arrays, self.shapes(), self.origin)
    _check_arrays(arrays, self)
    stated = json.loads(metadata.get(METADATA_KEY, '{}'))
    _check_hash(arrays, self, stated, made_with)
    names = named_arrays.shapes_by_name(self.sources)
    others = {name: arrays[name].read(0, arrays[name].shape[0]) for name in names}
    variables = named_arrays.convert(others, self.sources, self.origin, dtype=dtype)
    variables['params']['table'] = self._load_table(arrays, dtype, sharding)
    if self.codebook:
      variables['codebook'] = jax.tree.map(jnp.asarray, dict(self.codebook))
    return variables

  def _load_table(
    self,
    arrays: Mapping[str, row_files.StoredArray],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
  ) -> jax.Array:
    """Returns the table. Raises BadInput for non-finite values."""
    stored = arrays[next(iter(self.table.rows))].dtype
    dtype = jax.dtypes.canonicalize_dtype(dtype or jnp.promote_types(stored, jnp.float32))
    not_finite: dict[int, int] = {}  # by the first row of a block: devices may have the same rows

    def read(start: int, stop: int) -> np.ndarray:
      rows = self.table.read(arrays, start, stop)
      not_finite[start] = named_arrays.count_not_finite(rows)
      return rows.astype(dtype)

    table = sharded_table.fill(read, self.table.shape, dtype, sharding)
    named_arrays.check_finite(self.origin, {'the table': sum(not_finite.values())})
    return table

  def save(self, variables: Mapping[str, Any], path: row_files.Path) -> None:
    """Writes the parameters of a memory, a range of rows of the table at a time.

    The arrays have the dtypes of the parameters. The metadata of the file have the vocabulary, the
    seed and the layer of the hash.

    Args:
      variables: {'params': ...} of the memory, on the devices of this process.
      path: the file; an existing file is replaced.

    Raises:
      BadInput: the parameters do not match the memory, or other processes have parts of the table.
    """
    params = dict(variables['params'])
    table = params.pop('table', np.empty(0))
    named_arrays.check_shapes({'table': self.table.shape}, {'table': np.shape(table)}, self.origin)
    if isinstance(table, jax.Array) and not table.is_fully_addressable:
      raise errors.BadInput('the table is on devices of several processes: write it from one')
    arrays = dict(self.hash_numbers)
    arrays |= named_arrays.restore({'params': params}, self.sources, self.origin)
    dtypes = {name: array.dtype for name, array in arrays.items()}
    dtypes |= dict.fromkeys(self.table.rows, table.dtype)
    described = {name: (shape, dtypes[name]) for name, shape in self.shapes().items()}
    metadata = {'format': 'pt', METADATA_KEY: json.dumps(self.hash_settings)}
    with row_files.new_file(path, described, metadata) as write:
      for name, array in arrays.items():
        write(name, 0, array)
      row_bytes = self.table.shape[1] * table.dtype.itemsize
      for start, stop in row_files.blocks(0, self.table.num_stored_rows, row_bytes):
        block = sharded_table.rows(table, start, stop)
        for name, first_row, rows in self.table.ranges(start, stop):
          write(name, first_row, block[rows])


def _check_arrays(arrays: Mapping[str, row_files.StoredArray], layout: FileLayout) -> None:
  """Raises BadInput for arrays of the wrong name, shape or dtype."""
  expected = layout.shapes()
  for name, array in arrays.items():  # before the names: scales of 8 bits are extra arrays
    choices = row_files.FLOATS
    if name in layout.hash_numbers:
      choices = ('I32', 'I64')
    if name in expected and array.code not in choices:
      product = 'it'
      if array.code.startswith('F8'):
        product = 'its product with its scales'
      raise errors.BadInput(
        f'{name} of {layout.origin} has the dtype {array.code}, not {" or ".join(choices)}: '
        f'convert {product} to {choices[-1]}'
      )
  shapes = {
    name: array.shape
    for name, array in arrays.items()
    if name in expected or name.startswith(layout.prefix)
  }
  named_arrays.check_shapes(expected, shapes, layout.origin, (layout.embedding,))


def _check_hash(
  arrays: Mapping[str, row_files.StoredArray],
  layout: FileLayout,
  metadata: Mapping[str, int],
  made_with: Mapping[str, int],
) -> None:
  """Raises BadInput for a file with another or unknown vocabulary, seed or layer."""
  settings = layout.hash_settings
  stated = [*metadata.items(), *made_with.items()]
  if layout.embedding in arrays:
    stated.append(('vocabulary', arrays[layout.embedding].shape[0]))
  for name, value in stated:
    if name not in settings:
      expected = ', '.join(repr(setting) for setting in settings)
      raise errors.BadInput(f'made_with has {name!r}, expected {expected}')
    if value != settings[name]:
      raise errors.BadInput(
        f'the weights were made with {name}={value}, but the hash of the memory has '
        f'{name}={settings[name]}: it would read other rows'
      )
  _check_hash_numbers(arrays, layout)
  has_multipliers = any(name.endswith('multipliers') for name in layout.hash_numbers)
  missing = [name for name in settings if name not in dict(stated)]
  if missing and not has_multipliers:
    example = ', '.join(f'{name!r}: ...' for name in missing)
    raise errors.BadInput(
      f'the file does not state {", ".join(missing)} of the hash that its rows are for: give '
      f'made_with={{{example}}}, from the config of its model'
    )


def _check_hash_numbers(arrays: Mapping[str, row_files.StoredArray], layout: FileLayout) -> None:
  """Raises BadInput if integers of the file belong to another hash."""
  described = ', '.join(f'{name}={value}' for name, value in layout.hash_settings.items())
  for name, values in layout.hash_numbers.items():
    stored = arrays[name].read(0, len(values))
    if not np.array_equal(stored, values):
      raise errors.BadInput(
        f'{name} is {stored.tolist()} in the file, but {values.tolist()} with {described}: the '
        f'weights are of another vocabulary, seed or layer'
      )
