"""Safetensors files, read and written a range of rows at a time.

The library saves only whole arrays. A file is the length of the header (8 bytes, little-endian),
the header (JSON) and the bytes of the arrays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import math
import os
import pathlib
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.interop import safetensors

DTYPES = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': ml_dtypes.bfloat16,
  'I64': np.int64,
  'I32': np.int32,
  'U8': np.uint8,
}
MAX_HEADER = 2**22  # bytes, of about 35,000 arrays: many more than a file of today has
BLOCK_BYTES = 2**25  # maximum bytes of array rows to read or write at once
FLOATS = ('F64', 'F32', 'F16', 'BF16')  # codes of the dtypes that weights may have
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
Path = str | os.PathLike[str]


class StoredArray(NamedTuple):
  """An array in a file: the file, the code of its dtype, its shape, and its first byte there."""

  path: Path
  code: str
  shape: tuple[int, ...]
  first_byte: int

  @property
  def dtype(self) -> np.dtype:
    """The dtype."""
    return np.dtype(DTYPES[self.code])

  @property
  def row_bytes(self) -> int:
    """Bytes of a row."""
    return math.prod(self.shape[1:]) * self.dtype.itemsize

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` to before `stop`, and reads no others."""
    first_byte = self.first_byte + start * self.row_bytes
    count = (stop - start) * self.row_bytes
    values = np.fromfile(self.path, np.uint8, count, offset=first_byte).view(self.dtype)
    return values.reshape(stop - start, *self.shape[1:])


def blocks(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
  """Yields the first and last row (exclusive) of each block of at most BLOCK_BYTES.

  A large array is read and written block by block.
  """
  size = max(BLOCK_BYTES // max(row_bytes, 1), 1)
  for first in range(start, stop, size):
    yield first, min(first + size, stop)


def stored_arrays(paths: Path | Sequence[Path]) -> tuple[dict[str, StoredArray], dict[str, str]]:
  """Returns the arrays of all files by name, and the metadata of the files; reads headers only.

  Raises:
    BadInput: a missing or corrupt file, or an array name in two files.
  """
  arrays: dict[str, StoredArray] = {}
  metadata: dict[str, str] = {}
  for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
    safetensors.check_file(path)
    with open(path, 'rb') as file:
      (length,) = struct.unpack('<Q', file.read(8))
      if length > MAX_HEADER:
        raise errors.BadInput(f'{path} is damaged: its header has more than {MAX_HEADER:,} bytes')
      header = json.loads(file.read(length))
    metadata |= header.pop('__metadata__', {})
    for name, entry in header.items():
      if name in arrays:
        raise errors.BadInput(f'{arrays[name].path} and {path} both have {name}: load one of them')
      first_byte = 8 + length + entry['data_offsets'][0]
      arrays[name] = StoredArray(path, entry['dtype'], tuple(entry['shape']), first_byte)
  return arrays, metadata


@contextlib.contextmanager
def new_file(
  path: Path, arrays: Mapping[str, tuple[tuple[int, ...], Any]], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, int, np.ndarray], None]]:
  """Yields a function that writes rows of an array, in any order: `write(name, start, rows)`.

  The file gets its name at the end, and does not exist after an error.

  Args:
    path: the file; an existing file is replaced.
    arrays: shape and dtype of each array, by name.
    metadata: texts by name.
  """
  header: dict[str, Any] = {'__metadata__': dict(metadata)}
  stored: dict[str, StoredArray] = {}  # with the first byte after the header
  end = 0
  for name in _widest_first(arrays):
    shape, dtype = arrays[name]
    code = _CODES[np.dtype(dtype)]
    start = end
    end += math.prod(shape) * np.dtype(dtype).itemsize
    header[name] = {'dtype': code, 'shape': list(shape), 'data_offsets': [start, end]}
    stored[name] = StoredArray(path, code, tuple(shape), start)
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  head = struct.pack('<Q', len(text)) + text

  def write(name: str, start: int, rows: np.ndarray) -> None:
    file.seek(len(head) + stored[name].first_byte + start * stored[name].row_bytes)
    file.write(np.ascontiguousarray(rows, stored[name].dtype).view(np.uint8).data)

  unfinished = pathlib.Path(f'{path}.unfinished')
  try:
    with open(unfinished, 'wb') as file:
      file.write(head)
      file.truncate(len(head) + end)
      yield write
    os.replace(unfinished, path)
  finally:
    unfinished.unlink(missing_ok=True)


def _widest_first(arrays: Mapping[str, tuple[tuple[int, ...], Any]]) -> list[str]:
  """Returns the names, wide dtypes first, so that every array is aligned.

  The safetensors library uses the same order.
  """

  def width(name: str) -> int:
    _, dtype = arrays[name]
    return np.dtype(dtype).itemsize

  return sorted(arrays, key=width, reverse=True)
