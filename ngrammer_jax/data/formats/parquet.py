"""Parquet files: only the columns of the text are read, page by page."""

from collections.abc import Iterable, Sequence
import itertools
import pathlib
from typing import Any, BinaryIO

BATCH = 32  # rows that are decoded at a time
BUFFER = 128 << 10  # bytes that are read at a time


def open_batches(
  path: pathlib.Path, source: BinaryIO, fields: Sequence[str], first: int
) -> tuple[Sequence[str], Iterable[Any], int]:
  """Returns the columns of a file, its batches, and which row of theirs is row `first`.

  Row groups before the row are not read. One that is larger than memory is read in parts, if its
  pages are small.
  """
  from pyarrow import parquet  # only for such files

  file = parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)
  group, count = 0, file.num_row_groups
  while group < count and first >= (rows := file.metadata.row_group(group).num_rows):
    group, first = group + 1, first - rows
  read = lambda group: file.iter_batches(BATCH, [group], list(fields), use_threads=False)
  batches = itertools.chain.from_iterable(map(read, range(group, count)))
  return file.schema_arrow.names, batches, first
