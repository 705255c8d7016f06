"""Parquet files: reads only text columns, with bounded memory.

An open file needs several MB for metadata and a decoder, and a host may read hundreds of files. So
a file is closed after each part of its text, and a row group is decoded again for its next part.
Large row groups are decoded once, page by page, by the first MAX_DECODERS files, and huge ones
always. In a bucket each row group is read once.
"""

import bisect
from collections.abc import Iterator, Sequence
import itertools
import math
import pathlib
from typing import Any, NamedTuple
import weakref

from ngrammer_jax.data.formats import columns

BATCH_ROWS = 32  # decoded at a time
BUFFER_BYTES = 128 << 10  # read at a time
PART_BYTES = 1 << 20  # of text per opening of a file
SMALL_GROUP = 8 << 20  # bytes of a row group
HUGE_GROUP = 256 << 20
MAX_DECODERS = 16
_decoders: weakref.WeakSet[Any] = weakref.WeakSet()


Batches = Iterator[tuple[Any, Sequence[str]]]  # each with the names of all columns of the file


class _Part(NamedTuple):
  """Consecutive rows of a file.

  Attributes:
    batches: their batches.
    end: the row after them.
    num_rows: number of rows of the file.
  """

  batches: Batches
  end: int
  num_rows: int


def read_batches(path: pathlib.Path, fields: Sequence[str], row: int) -> Batches:
  """Yields the batches of a file from a row on, with the columns that the file has."""
  num_rows = math.inf  # until the file is opened
  while row < num_rows:
    part = _read_part(path, fields, row)
    row = part.end
    num_rows = part.num_rows
    yield from part.batches


def _read_part(path: pathlib.Path, fields: Sequence[str], row: int) -> _Part:
  """Returns rows of a file from a row on."""
  import pyarrow as pa  # only for such files
  from pyarrow import parquet

  is_local = isinstance(path, pathlib.Path)
  if is_local:
    source = pa.OSFile(str(path))
  else:
    source = path.open()
  file = parquet.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False)
  names = file.schema_arrow.names
  groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
  ends = list(itertools.accumulate((group.num_rows for group in groups), initial=0))
  num_rows = ends[-1]
  if row >= num_rows:
    return _Part(iter(()), row, num_rows)
  first = bisect.bisect_right(ends, row) - 1
  size = max(groups[first].total_byte_size, 1)
  part_bytes = PART_BYTES
  if not is_local:
    part_bytes = max(PART_BYTES, size)
  rows = max(groups[first].num_rows * part_bytes // size, 1)
  if size <= SMALL_GROUP:
    last = first + 1
    while (
      ends[last] < row + rows and last < len(groups) and groups[last].total_byte_size <= part_bytes
    ):
      last += 1
    table = file.read_row_groups(range(first, last), columns=list(fields), use_threads=False)
    table = table.slice(row - ends[first], rows)
    return _Part(_release([table], names), row + len(table), num_rows)
  batches = file.iter_batches(BATCH_ROWS, [first], columns=list(fields), use_threads=False)
  batches = columns.skip(batches, row - ends[first])
  if size <= HUGE_GROUP and is_local and len(_decoders) >= MAX_DECODERS:
    part = list(itertools.islice(batches, max(rows // BATCH_ROWS, 1)))
    return _Part(_release(part, names), row + sum(map(len, part)), num_rows)
  decoder = ((batch, names) for batch in batches)
  _decoders.add(decoder)
  return _Part(decoder, ends[first + 1], num_rows)


def _release(batches: list[Any], names: Sequence[str]) -> Batches:
  """Yields each batch without keeping it."""
  while batches:
    yield batches.pop(0), names
