"""Parquet files: only the columns of the text are read."""

from collections.abc import Iterable, Sequence
import itertools
import pathlib
from typing import Any, BinaryIO

BATCH, BUFFER = 32, 128 << 10  # rows that are decoded, and bytes that are read, at a time
SMALL, PART = 8 << 20, 1 << 20  # bytes of a small row group, and of its parts


def open_batches(
  path: pathlib.Path, source: BinaryIO, fields: Sequence[str], first: int
) -> tuple[Sequence[str], Iterable[Any], int]:
  """Returns the columns of a file, its batches, and which row of theirs is row `first`.

  Row groups before the row are not read. A small one of a local file is read again for each part:
  an open decoder holds all of it, and a host may read hundreds of files. A large one is decoded
  page by page.
  """
  from pyarrow import parquet  # only for such files

  file = parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)
  options = {'columns': list(fields), 'use_threads': False}
  groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
  number = 0
  while number < len(groups) and first >= groups[number].num_rows:
    first -= groups[number].num_rows
    number += 1

  def batches(number):
    rows, size = groups[number].num_rows, groups[number].total_byte_size
    if size > SMALL:
      return file.iter_batches(BATCH, [number], **options)
    read_part = lambda start: file.read_row_group(number, **options).slice(start, part)
    part_size = PART if isinstance(path, pathlib.Path) else SMALL  # a bucket is read once
    part = max(rows * part_size // max(size, part_size), 1)
    return map(read_part, range(0, rows, part))

  all_batches = itertools.chain.from_iterable(map(batches, range(number, len(groups))))
  return file.schema_arrow.names, all_batches, first
