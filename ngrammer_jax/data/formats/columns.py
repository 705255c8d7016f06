"""Text columns of Parquet and Arrow files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import json
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.formats import text_fields
from ngrammer_jax.data.formats.interface import FilePosition, ReadOptions

# Batches of rows from a row of a file on, each with the names of all columns of the file.
ReadBatches = Callable[[pathlib.Path, Sequence[str], int], Iterator[tuple[Any, Sequence[str]]]]


def read(
  path: pathlib.Path, position: FilePosition, options: ReadOptions, read_batches: ReadBatches
) -> Iterator[tuple[bytes, FilePosition]]:
  """Yields the text of each row from a position on, and the position of the next row.

  The fields of a row are joined by a newline. A conversation is JSON, see `conversations.parse`.

  Args:
    path: the file.
    position: start position.
    options: options with the text columns.
    read_batches: `read_batches` of the format's module.

  Raises:
    BadInput: a missing column, or one of another type.
  """
  document = position.document
  for batch, names in read_batches(path, options.fields, document):
    columns = [_texts(path, batch, field, names, options) for field in options.fields]
    del batch  # or it is in memory until the last text of it is read
    for fields in zip(*columns, strict=True):
      document += 1
      text = b'\n'.join(field for field in fields if field is not None)
      yield text, FilePosition(document)


def skip(batches: Iterable[Any], rows: int) -> Iterator[Any]:
  """Yields batches without the first `rows` rows."""
  for batch in batches:
    if rows < len(batch):
      yield batch.slice(rows)
    rows = max(rows - len(batch), 0)


def _texts(
  path: pathlib.Path, batch: Any, field: str, names: Sequence[str], options: ReadOptions
) -> list[bytes | None]:
  """Returns the texts of a column; a dot in its name separates nested fields.

  Conversations of any type are returned as JSON.
  """
  import pyarrow as pa
  from pyarrow import compute

  field_names = [field]
  if field not in batch.schema.names:
    field_names = field.split('.')
  try:
    column = batch.column(field_names[0])
    for name in field_names[1:]:
      column = compute.struct_field(column, name)
  except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
    raise errors.BadInput(
      f'{path} has no column {field!r}, but {", ".join(names)}: '
      f'{text_fields.remedy_for_missing(options, names)}'
    ) from error
  if options.is_chat:
    values = column.to_pylist()
    return [json.dumps(value, ensure_ascii=False).encode() for value in values]
  try:
    return column.cast(pa.large_binary()).to_pylist()
  except pa.ArrowNotImplementedError as error:
    remedy = options.remedy
    if _holds_messages(column.type):
      remedy = text_fields.remedy_for_messages(options, field)
    raise errors.BadInput(
      f'{path}: column {field!r} of {", ".join(names)} holds {column.type}, not text: {remedy}'
    ) from error


def _holds_messages(column_type: Any) -> bool:
  """Whether a column has lists of objects with a role."""
  import pyarrow as pa

  if not (pa.types.is_list(column_type) or pa.types.is_large_list(column_type)):
    return False
  entry = column_type.value_type
  return pa.types.is_struct(entry) and entry.get_field_index('role') >= 0
