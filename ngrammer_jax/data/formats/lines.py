"""Text: JSON lines, paragraphs between empty lines, or documents between separators."""

from collections.abc import Iterator
import pathlib
from typing import Any, BinaryIO

from ngrammer_jax import errors
from ngrammer_jax.data.files import compression, text_files
from ngrammer_jax.data.formats import conversations, text_fields
from ngrammer_jax.data.formats.interface import DocumentText, FilePosition, ReadOptions


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
  """Yields the bytes of each document, with the following separator."""
  if is_json:
    return file
  if options.separator is not None:
    return _split_at(file, options.separator.encode())
  if options.has_paragraphs:
    return _split_paragraphs(file)
  return iter([file.read()])


def parse(record: bytes, location: str, options: ReadOptions) -> DocumentText:
  """Returns the text of a line of JSON, or its messages; empty for an empty line or null.

  Raises:
    BadInput: not JSON, a missing field, or a field of another type.
  """
  if not record.strip():
    return DocumentText(b'')
  needed = f'object with a "{options.fields[0]}"'
  value = text_files.parse_json(record, location, f'expected one {needed} per line')
  values = [text_fields.find(value, field) for field in options.fields]
  if text_fields.MISSING in values:
    raise _missing_field(record, value, location, options)
  if options.is_chat:
    return conversations.parse(values[0], location, options)
  texts = []
  for field, text in zip(options.fields, values, strict=True):
    if text is not None:
      _check_is_text(text, field, location, options)
      texts.append(text)
  joined = text_fields.encode('\n'.join(texts))
  return joined._replace(is_null=not texts)


def _missing_field(
  record: bytes, value: Any, location: str, options: ReadOptions
) -> errors.BadInput:
  """Returns the error of a line without one of the fields."""
  names = list(value) if isinstance(value, dict) else []
  beginning = text_files.quote_line(record.strip())[1:-1]
  return errors.BadInput(
    f'{location}: expected an object with a "{options.fields[0]}", found {beginning}, with the '
    f'fields {", ".join(names) or "none"}: {text_fields.remedy_for_missing(options, names)}'
  )


def _check_is_text(text: Any, field: str, location: str, options: ReadOptions) -> None:
  """Raises BadInput for a field of a type other than text."""
  if isinstance(text, str):
    return
  what = text_fields.describe(text)
  remedy = options.remedy
  if what == 'a list of messages':
    remedy = text_fields.remedy_for_messages(options, field)
  raise errors.BadInput(f'{location}: "{field}" is {what}, not text: {remedy}')


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
