"""Arrow files, as `datasets.save_to_disk` and Feather write them."""

from collections.abc import Iterator
import pathlib

from ngrammer_jax.data.formats import columns
from ngrammer_jax.data.formats.places import Layout, Place


def read(path: pathlib.Path, place: Place, layout: Layout) -> Iterator[tuple[bytes, Place]]:
  """Yields the text of each row from a place on, and the place of the next row."""
  import pyarrow as pa  # only for such files

  document = first = place.document
  with pa.memory_map(str(path)) if isinstance(path, pathlib.Path) else path.open('rb') as source:
    is_file = source.read(6) == b'ARROW1'
    source.seek(0)
    reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    names = reader.schema.names
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
      for text in columns.texts(path, batch, layout, names, first):
        document += 1
        yield text, Place(document)
      first = max(first - len(batch), 0)
