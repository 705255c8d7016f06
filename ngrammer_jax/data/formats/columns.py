"""The columns of Parquet and Arrow that hold the text of documents."""

from collections.abc import Iterator
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.formats.places import Layout


def check(path: pathlib.Path, schema: Any, layout: Layout) -> None:
  """Raises BadInput unless each field is a column of text; the message names those that are."""
  import pyarrow as pa

  for name in layout.fields:
    kind = _find(schema, name)
    if kind is None:
      raise errors.BadInput(
        f'{path} has no column {name!r}, but {", ".join(schema.names)}: {layout.remedy}'
      )
    if pa.types.is_dictionary(kind):
      kind = kind.value_type
    if not (_is_string(kind) or pa.types.is_null(kind)):
      raise errors.BadInput(
        f'{path}: column {name!r} of {", ".join(schema.names)} holds {kind}, not text: '
        f'{layout.remedy}'
      )


def _find(schema: Any, name: str) -> Any:
  """Returns the type of a column, or of a field within it; None if there is none."""
  names = schema.names if hasattr(schema, 'names') else [field.name for field in schema]
  if name in names:
    return schema.field(name).type
  outer, dot, inner = name.partition('.')
  kind = schema.field(outer).type if dot and outer in names else None
  return _find(kind, inner) if hasattr(kind, 'get_field_index') else None


def _is_string(kind: Any) -> bool:
  from pyarrow import types

  tests = types.is_string, types.is_large_string, types.is_string_view
  tests += types.is_binary, types.is_large_binary, types.is_binary_view
  return any(test(kind) for test in tests)


def texts(batch: Any, fields: tuple[str, ...], first: int = 0) -> Iterator[bytes]:
  """Yields the text of each row from `first` on, the fields of a row joined by a newline."""
  import pyarrow as pa
  from pyarrow import compute

  columns = []
  for name in fields:
    outer, *inner = [name] if name in batch.schema.names else name.split('.')
    column = batch.column(outer).slice(first)
    column = compute.struct_field(column, inner) if inner else column
    columns.append(column.cast(pa.large_binary()).to_pylist())
  for parts in zip(*columns, strict=True):
    yield b'\n'.join(part for part in parts if part is not None)
