"""The header of a GGUF file: metadata (including a tokenizer) and locations of tensors.

Every size is checked before allocation. A model may be split into several files,
NAME-00001-of-00003.gguf and so on: the first has the metadata, and each of them some tensors.
"""

from collections.abc import Mapping
import contextlib
import functools
import pathlib
import re
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.system import file_errors

MAX_HEADER = 1 << 26  # bytes; the largest vocabularies of today need a tenth
MAX_ENTRIES = 1 << 12  # keys, and tensors; the largest Llama has 1,138 tensors
MAX_TEXTS = 1 << 20  # of all lists; the largest vocabularies and their merges are 800,000
DEFAULT_ALIGNMENT = 32
SPLIT_NAME = re.compile(r'(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf')
STRING = 8
ARRAY = 9
NUMBERS = {  # dtypes of the other types of values
  0: 'u1',
  1: 'i1',
  2: '<u2',
  3: '<i2',
  4: '<u4',
  5: '<i4',
  6: '<f4',
  7: '?',
  10: '<u8',
  11: '<i8',
  12: '<f8',
}


class Entry(NamedTuple):
  """The location of a tensor.

  Attributes:
    path: its file.
    shape: its shape, rows first.
    kind: the number of its type.
    first_byte: its first byte in the file.
  """

  path: pathlib.Path
  shape: tuple[int, ...]
  kind: int
  first_byte: int


def is_gguf(path: pathlib.Path) -> bool:
  """Whether a path is a GGUF file, by name or content."""
  with contextlib.suppress(*file_errors.DAMAGE_ERRORS):
    if path.is_file():
      with path.open('rb') as file:
        return path.suffix == '.gguf' or file.read(4) == b'GGUF'
  return False


def parts(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns all files of the model of a file, in order, by its name alone."""
  match = SPLIT_NAME.fullmatch(path.name)
  if match is None or not 1 <= int(match['number']) <= int(match['count']):
    return [path]
  count = match['count']
  numbers = range(1, int(count) + 1)
  return [path.with_name(f'{match["model"]}-{number:05}-of-{count}.gguf') for number in numbers]


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Entry]]:
  """Returns the metadata and the tensors of a model by name; cached.

  Args:
    path: its file, or any part of it.

  Raises:
    BadInput: a part is missing.
    ValueError: a header is damaged.
  """
  files = parts(path)
  missing = [file.name for file in files if not file.is_file()]
  if missing:
    raise errors.BadInput(
      f'it is one of {len(files):,} files of a model, and {missing[0]} is missing'
      f'{errors.and_more(missing)}: get all files'
    )
  statuses = [file.stat() for file in files]
  versions = [(status.st_size, status.st_mtime_ns) for status in statuses]
  return _read_parts(tuple(files), tuple(versions))


@functools.lru_cache(maxsize=1)  # a model and its tokenizer: 100,000 texts
def _read_parts(
  files: tuple[pathlib.Path, ...], versions: tuple[tuple[int, int], ...]
) -> tuple[dict[str, Any], dict[str, Entry]]:
  """Returns the metadata of the first file, and the tensors of all; see `read`.

  Args:
    files: the parts of a model.
    versions: size and time of each file, to distinguish versions.
  """
  metadata: dict[str, Any] = {}
  entries: dict[str, Entry] = {}
  for number, (file, (size, _)) in enumerate(zip(files, versions, strict=True)):
    try:
      part_metadata, part_entries = _read_file(file, size)
      _check_part(part_metadata, number, len(files))
      repeated = entries.keys() & part_entries.keys()
      if repeated:
        raise ValueError(f'another part has {min(repeated)} too')
    except ValueError as error:
      if len(files) == 1 or isinstance(error, errors.BadInput):
        raise
      raise ValueError(f'{file.name}: {error}') from error
    entries |= part_entries
    if number == 0:
      metadata = part_metadata
  expected = metadata.get('split.tensors.count', len(entries))
  if expected != len(entries):
    raise ValueError(f'it has {len(entries):,} tensors, but split.tensors.count is {expected}')
  return metadata, entries


def _check_part(metadata: Mapping[str, Any], number: int, count: int) -> None:
  """Raises BadInput or ValueError unless metadata belong to part `number` of `count`, from 0."""
  stated_count = metadata.get('split.count', 1)
  if count == 1 and isinstance(stated_count, int) and stated_count > 1:
    raise errors.BadInput(
      f'it is one of {stated_count:,} files of a model: name them NAME-00001-of-'
      f'{stated_count:05}.gguf and so on, as they were named'
    )
  if count == 1:
    return
  for key, expected in {'split.count': count, 'split.no': number}.items():
    if metadata.get(key) != expected:
      raise ValueError(f'{key} is {metadata.get(key)}, but the name of the file says {expected}')


def _read_file(path: pathlib.Path, size: int) -> tuple[dict[str, Any], dict[str, Entry]]:
  """Returns the metadata and the tensors of one file."""
  with path.open('rb') as file:
    header = _Header(file, size)
    if header.take(4) != b'GGUF':
      raise ValueError('it does not begin with GGUF')
    version = header.number(4)
    if version not in (2, 3):
      raise ValueError(f'it has version {version} of the format, expected 2 or 3')
    num_tensors = header.number(8)
    num_keys = header.number(8)
    if max(num_tensors, num_keys) > MAX_ENTRIES:
      counts = f'{num_tensors:,} tensors and {num_keys:,} keys'
      raise ValueError(f'it has {counts}, expected at most {MAX_ENTRIES:,}')
    metadata = _read_metadata(header, num_keys)
    entries = _read_entries(header, path, num_tensors)
  alignment = metadata.get('general.alignment', DEFAULT_ALIGNMENT)
  if not isinstance(alignment, int) or not 1 <= alignment <= MAX_HEADER:
    raise ValueError(f'general.alignment is {alignment}')
  start = -(-header.position // alignment) * alignment
  for name, entry in entries.items():
    if entry.first_byte % alignment:
      raise ValueError(f'{name} does not begin at a multiple of {alignment} bytes')
    entries[name] = entry._replace(first_byte=start + entry.first_byte)
  return metadata, entries


def _read_metadata(header: '_Header', num_keys: int) -> dict[str, Any]:
  """Returns the values of all keys."""
  metadata: dict[str, Any] = {}
  for _ in range(num_keys):
    key = header.text()
    if key in metadata:
      raise ValueError(f'it has the key {key} twice')
    metadata[key] = header.value(header.number(4))
  return metadata


def _read_entries(header: '_Header', path: pathlib.Path, num_tensors: int) -> dict[str, Entry]:
  """Returns the tensors by name; their first bytes still count from the end of the header."""
  entries: dict[str, Entry] = {}
  for _ in range(num_tensors):
    name = header.text()
    dimensions = header.number(4)
    if name in entries:
      raise ValueError(f'it has the tensor {name} twice')
    if not 1 <= dimensions <= 4:
      raise ValueError(f'{name} has {dimensions} dimensions')
    sizes = [header.number(8) for _ in range(dimensions)]  # the last axis first
    kind = header.number(4)
    first_byte = header.number(8)
    entries[name] = Entry(path, tuple(reversed(sizes)), kind, first_byte)
  return entries


class _Header:
  """Reads values one after another, with checks against the end of the file."""

  def __init__(self, file: BinaryIO, size: int):
    self._file = file
    self._size = size
    self.position = 0
    self._num_texts = 0

  def take(self, count: int) -> bytes:
    """Returns the next bytes. Raises ValueError if there are fewer."""
    self.position += count
    if self.position > self._size:
      raise ValueError('the file ends inside its header')
    if self.position > MAX_HEADER:
      raise ValueError(f'its header has more than {MAX_HEADER:,} bytes')
    return self._file.read(count)

  def number(self, size: int) -> int:
    """Returns the next unsigned number of `size` bytes."""
    return int.from_bytes(self.take(size), 'little')

  def text(self) -> str:
    """Returns the next string."""
    return self.take(self.number(8)).decode()

  def value(self, kind: int) -> Any:
    """Returns the next value of a type: a number, a string, a list of strings or an array."""
    if kind == ARRAY:
      return self._array(self.number(4), self.number(8))
    (value,) = self._array(kind, 1)
    return value if kind == STRING else value.item()

  def _array(self, kind: int, count: int) -> Any:
    """Returns the next values of a type."""
    if kind == STRING:
      self._num_texts += count
      if self._num_texts > MAX_TEXTS:
        raise ValueError(f'it has more than {MAX_TEXTS:,} strings')
      return [self.text() for _ in range(count)]
    if kind not in NUMBERS:
      raise ValueError(f'a value has the unknown type {kind}')
    dtype = np.dtype(NUMBERS[kind])
    return np.frombuffer(self.take(count * dtype.itemsize), dtype)
