"""Arrow files of `datasets.save_to_disk` and Feather."""

from collections.abc import Iterator, Sequence
import pathlib
from typing import Any

from ngrammer_jax.data.formats import columns

ROWS = 32  # whose texts are copied at a time, of batches of any size


def read_batches(
  path: pathlib.Path, fields: Sequence[str], row: int
) -> Iterator[tuple[Any, Sequence[str]]]:
  """Yields the batches of a file from a row on, with the available columns."""
  import pyarrow as pa  # only for such files

  if isinstance(path, pathlib.Path):
    source = pa.memory_map(str(path))
  else:
    source = path.open()
  is_file = source.read(6) == b'ARROW1'
  source.seek(0)
  if is_file:
    reader = pa.ipc.open_file(source)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
  else:
    batches = reader = pa.ipc.open_stream(source)
  for batch in columns.skip(batches, row):
    for first in range(0, len(batch), ROWS):
      yield batch.slice(first, ROWS), reader.schema.names
