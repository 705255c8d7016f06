"""Arrow files, as `datasets.save_to_disk` and Feather write them."""

from collections.abc import Iterable, Sequence
import pathlib
from typing import Any, BinaryIO


def open_batches(
  path: pathlib.Path, source: BinaryIO, fields: Sequence[str], first: int
) -> tuple[Sequence[str], Iterable[Any], int]:
  """Returns the columns of a file, its batches, and which row of theirs is row `first`."""
  import pyarrow as pa  # only for such files

  is_file = source.read(6) == b'ARROW1'
  source.seek(0)
  if isinstance(path, pathlib.Path):
    source = pa.memory_map(str(path))
  reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
  batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
  return reader.schema.names, batches, first
