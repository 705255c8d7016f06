"""Parquet files: only the columns of the text are read, page by page."""

from collections.abc import Iterator
import pathlib

from ngrammer_jax.data.formats import columns
from ngrammer_jax.data.formats.places import Layout, Place

BATCH = 32  # rows that are decoded at a time
BUFFER = 128 << 10  # bytes that are read at a time


def read(path: pathlib.Path, place: Place, layout: Layout) -> Iterator[tuple[bytes, Place]]:
  """Yields the text of each row from a place on, and the place of the next row.

  Row groups before the place are not read. One that is larger than memory is read in parts, if its
  pages are small.
  """
  from pyarrow import parquet  # only for such files

  document = place.document
  with path.open('rb') as source:
    file = parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)
    names = file.schema_arrow.names
    first, group = document, 0
    while group < file.num_row_groups and first >= file.metadata.row_group(group).num_rows:
      first -= file.metadata.row_group(group).num_rows
      group += 1
    for number in range(group, file.num_row_groups):
      for batch in file.iter_batches(BATCH, [number], list(layout.fields), use_threads=False):
        for text in columns.texts(path, batch, layout, names, first):
          document += 1
          yield text, Place(document)
        first = max(first - len(batch), 0)
