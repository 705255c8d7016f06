"""Text: JSON lines, paragraphs between empty lines, or documents between separators."""

from collections.abc import Iterator
import pathlib
from typing import Any, BinaryIO

from ngrammer_jax import errors
from ngrammer_jax.data.files import compression, text_files
from ngrammer_jax.data.formats.interface import FilePosition, ReadOptions


def read(
  path: pathlib.Path, position: FilePosition, options: ReadOptions, is_json: bool
) -> Iterator[tuple[bytes, FilePosition]]:
  """Yields the bytes of each document from a position on, and the position of the next one.

  A JSON document is a line, and its number is the line number from 0.
  """
  document, offset, frame = position
  with compression.open_binary(path, frame, offset) as file:
    for record in _split(file, options, is_json):
      document += 1
      offset += len(record)
      yield record, FilePosition(document, *compression.frame_offset(file, offset))


def _split(file: BinaryIO, options: ReadOptions, is_json: bool) -> Iterator[bytes]:
  """Yields the bytes of each document, with what separates it from the next one."""
  if is_json:
    return file
  if options.separator is not None:
    return _split_at(file, options.separator.encode())
  if options.has_paragraphs:
    return _split_paragraphs(file)
  return iter([file.read()])


def parse(record: bytes, location: str, options: ReadOptions) -> bytes:
  """Returns the text of a line of JSON. An empty line, and null, is an empty document."""
  if not record.strip():
    return b''
  needed = f'object with a "{options.fields[0]}"'
  value = text_files.parse_json(record, location, f'expected one {needed} per line')
  texts = [_field(value, field) for field in options.fields]
  try:
    return '\n'.join(text for text in texts if text is not None).encode()
  except UnicodeEncodeError as error:
    half = ascii(error.object[error.start])
    raise errors.BadInput(
      f'{location}: the text has half of a UTF-16 character, {half}, which is not Unicode: replace '
      f'it by "\\ufffd", or leave the line out'
    ) from error
  except TypeError as error:
    names = ', '.join(value) if isinstance(value, dict) else 'none'
    beginning = text_files.quote_line(record.strip())[1:-1]
    raise errors.BadInput(
      f'{location}: expected an {needed}, found {beginning}, with the fields {names}: '
      f'{options.remedy}'
    ) from error


def _field(value: Any, name: str) -> Any:
  """Returns the value of a field, text or None; something else if there is no such field."""
  if not isinstance(value, dict):
    return ...
  outer, dot, inner = name.partition('.')
  if dot and name not in value:
    return _field(value.get(outer), inner)
  return value.get(name, ...)


def _split_at(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
  """Yields each document together with the separator after it."""
  buffer = b''
  # Reads grow with a document, or a long one would be searched again for each of them.
  while data := file.read(max(text_files.CHUNK_SIZE, len(buffer))):
    *documents, buffer = (buffer + data).split(separator)
    for document in documents:
      yield document + separator
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
