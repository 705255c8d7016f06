"""Text: JSON lines, paragraphs between empty lines, or documents between separators."""

from collections.abc import Iterator
import pathlib
from typing import Any, BinaryIO

from ngrammer_jax import errors
from ngrammer_jax.data import compression, text_files
from ngrammer_jax.data.formats.positions import FilePosition, Layout


def read(
  path: pathlib.Path, place: FilePosition, layout: Layout, is_json: bool
) -> Iterator[tuple[bytes, FilePosition]]:
  """Yields the bytes of each document from a place on, and the place of the next one.

  A JSON document is a line, and its number is the line number from 0.
  """
  document, offset, frame = place
  with compression.open_binary(path, frame, offset) as file:
    if is_json:
      split = file
    elif layout.separator is not None:
      split = _split_at(file, layout.separator.encode())
    else:
      split = _split_paragraphs(file) if layout.has_paragraphs else iter([file.read()])
    for record in split:
      document, offset = document + 1, offset + len(record)
      yield record, FilePosition(document, *compression.place(file, offset))


def parse(record: bytes, location: str, layout: Layout) -> bytes:
  """Returns the text of a line of JSON. An empty line, and null, is an empty document."""
  if not record.strip():
    return b''
  needed = f'object with a "{layout.fields[0]}"'
  value = text_files.parse_json(record, location, f'expected one {needed} per line')
  texts = [_field(value, field) for field in layout.fields]
  try:
    return '\n'.join(text for text in texts if text is not None).encode()
  except (TypeError, UnicodeEncodeError) as error:
    names = ', '.join(value) if isinstance(value, dict) else 'none'
    beginning = text_files.quote_line(record.strip())[1:-1]
    raise errors.BadInput(
      f'{location}: expected an {needed}, found {beginning}, with the fields {names}: '
      f'{layout.remedy}'
    ) from error


def _field(value: Any, name: str) -> Any:
  """Returns the value of a field, text or None; something else if there is no such field."""
  if not isinstance(value, dict):
    return ...
  outer, dot, inner = name.partition('.')
  return _field(value.get(outer), inner) if dot and name not in value else value.get(name, ...)


def _split_at(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
  """Yields each document together with the separator after it."""
  buffer = b''
  # Blocks grow with a document, or a long one would be searched once for each of them.
  while block := file.read(max(text_files.CHUNK_SIZE, len(buffer))):
    *documents, buffer = (buffer + block).split(separator)
    yield from (document + separator for document in documents)
  if buffer:
    yield buffer


def _split_paragraphs(lines: Iterator[bytes]) -> Iterator[bytes]:
  """Yields each paragraph together with the empty lines around it."""
  paragraph: list[bytes] = []
  for line in lines:
    ends_before = paragraph and line.strip() and not paragraph[-1].strip()
    if ends_before and b''.join(paragraph).strip():
      yield b''.join(paragraph)
      paragraph = []
    paragraph.append(line)
  if b''.join(paragraph).strip():
    yield b''.join(paragraph)
