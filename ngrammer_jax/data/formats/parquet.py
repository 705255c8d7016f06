"""Parquet files: only the columns of the text are read."""

import bisect
from collections.abc import Iterator, Sequence
import itertools
import math
import pathlib
from typing import Any
import weakref

from ngrammer_jax.data.formats import columns

BATCH, BUFFER = 32, 128 << 10  # rows that are decoded, and bytes that are read, at a time
PART = 1 << 20  # bytes of text for which a file is opened
SMALL, HUGE = 8 << 20, 256 << 20  # bytes of a row group
MAX_DECODERS = 16
_decoders: weakref.WeakSet[Any] = weakref.WeakSet()


def read_batches(
  path: pathlib.Path, fields: Sequence[str], row: int
) -> Iterator[tuple[Any, Sequence[str]]]:
  """Yields the batches of a file from a row on, with the columns that the file has.

  An open file holds its metadata and a decoder, several MB, and a host may read hundreds of files:
  a file is closed after each part of its text, and a row group is decoded again for its next part.
  Large row groups are decoded once, page by page, by the first MAX_DECODERS files, and huge ones
  always. In a bucket each row group is read once.
  """
  num_rows = math.inf  # until the file is opened
  while row < num_rows:
    batches, row, num_rows = _read_part(path, fields, row)
    yield from batches


def _read_part(path, fields, row):
  """Returns batches from a row on, the row after them, and the number of rows of the file."""
  import pyarrow as pa  # only for such files
  from pyarrow import parquet

  is_local = isinstance(path, pathlib.Path)
  source = pa.OSFile(str(path)) if is_local else path.open()
  file = parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)
  names, options = file.schema_arrow.names, {'columns': list(fields), 'use_threads': False}
  groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
  ends = list(itertools.accumulate((group.num_rows for group in groups), initial=0))
  if row >= ends[-1]:
    return (), row, ends[-1]
  first = bisect.bisect_right(ends, row) - 1
  size = max(groups[first].total_byte_size, 1)
  part = PART if is_local else max(PART, size)
  rows = max(groups[first].num_rows * part // size, 1)
  if size <= SMALL:
    last = first + 1
    while ends[last] < row + rows and last < len(groups) and groups[last].total_byte_size <= part:
      last += 1
    table = file.read_row_groups(range(first, last), **options).slice(row - ends[first], rows)
    row += len(table)
    return _release([(table, names)]), row, ends[-1]
  batches = columns.skip(file.iter_batches(BATCH, [first], **options), row - ends[first])
  batches = ((batch, names) for batch in batches)
  if size <= HUGE and is_local and len(_decoders) >= MAX_DECODERS:
    part = [*itertools.islice(batches, max(rows // BATCH, 1))]
    return _release(part), row + sum(len(batch) for batch, _ in part), ends[-1]
  _decoders.add(batches)
  return batches, ends[first + 1], ends[-1]


def _release(batches):
  """Yields each batch without keeping it."""
  while batches:
    yield batches.pop(0)
