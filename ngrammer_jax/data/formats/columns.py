"""The columns of Parquet and Arrow that hold the text of documents."""

from collections.abc import Iterator, Sequence
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.formats.places import Layout


def texts(
  path: pathlib.Path, batch: Any, layout: Layout, names: Sequence[str], first: int = 0
) -> Iterator[bytes]:
  """Yields the text of each row from `first` on, the fields of a row joined by a newline.

  Args:
    path: the file.
    batch: rows of it.
    layout: the columns of the text.
    names: all columns of the file.
    first: rows before it are left out.

  Raises:
    BadInput: there is no such column, or it holds something else.
  """
  import pyarrow as pa

  columns = []
  for field in layout.fields:
    try:
      columns.append(_column(batch, field).slice(first).cast(pa.large_binary()).to_pylist())
    except KeyError as error:
      raise errors.BadInput(
        f'{path} has no column {field!r}, but {", ".join(names)}: {layout.remedy}'
      ) from error
    except pa.ArrowNotImplementedError as error:
      raise errors.BadInput(
        f'{path}: column {field!r} of {", ".join(names)} holds {_column(batch, field).type}, not '
        f'text: {layout.remedy}'
      ) from error
  for parts in zip(*columns, strict=True):
    yield b'\n'.join(part for part in parts if part is not None)


def _column(batch: Any, name: str) -> Any:
  """Returns a column, or a field within one. Raises KeyError if there is none."""
  from pyarrow import compute

  outer, *inner = [name] if name in batch.schema.names else name.split('.')
  column = batch.column(outer)
  for part in inner:
    if not hasattr(column.type, 'get_field_index') or column.type.get_field_index(part) < 0:
      raise KeyError(name)
    column = compute.struct_field(column, part)
  return column
