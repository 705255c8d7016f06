"""The columns of Parquet and Arrow that hold the text of documents."""

from collections.abc import Callable, Iterable, Iterator
import functools
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.formats.positions import FilePosition, Layout


def read(
  path: pathlib.Path, place: FilePosition, layout: Layout, read_batches: Callable[..., Any]
) -> Iterator[tuple[bytes, FilePosition]]:
  """Yields the text of each row from a place on, and the place of the next row.

  The fields of a row are joined by a newline.

  Args:
    path: the file.
    place: where to begin.
    layout: the columns of the text.
    read_batches: that of the module of a format.

  Raises:
    BadInput: there is no such column, or it holds something else.
  """
  document = place.document
  for batch, names in read_batches(path, layout.fields, document):
    columns = [_texts(path, batch, field, names, layout) for field in layout.fields]
    del batch  # or it is in memory until the last text of it is read
    for parts in zip(*columns, strict=True):
      document += 1
      yield b'\n'.join(part for part in parts if part is not None), FilePosition(document)


def skip(batches: Iterable[Any], rows: int) -> Iterator[Any]:
  """Yields batches without so many rows at the beginning."""
  for batch in batches:
    if rows < len(batch):
      yield batch.slice(rows)
    rows = max(rows - len(batch), 0)


def _texts(path, batch, field, names, layout):
  """Returns the texts of a column, bytes or None."""
  import pyarrow as pa
  from pyarrow import compute

  outer, *inner = [field] if field in batch.schema.names else field.split('.')
  try:
    column = functools.reduce(compute.struct_field, inner, batch.column(outer))
  except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
    raise errors.BadInput(
      f'{path} has no column {field!r}, but {", ".join(names)}: {layout.remedy}'
    ) from error
  try:
    return column.cast(pa.large_binary()).to_pylist()
  except pa.ArrowNotImplementedError as error:
    raise errors.BadInput(
      f'{path}: column {field!r} of {", ".join(names)} holds {column.type}, not text: '
      f'{layout.remedy}'
    ) from error
