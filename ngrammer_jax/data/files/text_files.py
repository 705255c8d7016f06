"""Plain or compressed text files: read in bounded chunks; errors name file and position."""

import codecs
from collections.abc import Iterable, Iterator
import io
import json
import logging
import pathlib
import re
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.files import compression
from ngrammer_jax.system import file_errors

CHUNK_SIZE = 1 << 20  # bytes
SPACE = re.compile(rb'(?<=\S) (?=\S)')
LONG = 10_000_000  # bytes; longer documents are tokenised in pieces


def read_chunks(path: pathlib.Path) -> Iterator[bytes]:
  """Yields the bytes of a file in chunks, see `split_chunks`."""
  return split_chunks(read_bytes(path))


def read_lines(path: pathlib.Path) -> Iterator[bytes]:
  """Yields the lines of a file with their ends; lines longer than a chunk are split."""
  for chunk in read_chunks(path):
    yield from io.BytesIO(chunk)


def split_chunks(parts: Iterable[bytes]) -> Iterator[bytes]:
  """Yields the same bytes in chunks of at most CHUNK_SIZE.

  A chunk ends after a newline; if it has none, after a space; else between two characters.
  """
  buffer = b''
  for part in parts:
    buffer += part
    while len(buffer) >= CHUNK_SIZE:
      end = buffer.rfind(b'\n', 0, CHUNK_SIZE) + 1
      if not end:
        end = buffer.rfind(b' ', 0, CHUNK_SIZE) + 1
      if not end:
        end = _last_character_start(buffer, CHUNK_SIZE)
      yield buffer[:end]
      buffer = buffer[end:]
  if buffer:
    yield buffer


def split_long(text: bytes) -> Iterator[bytes]:
  """Yields a text; one longer than LONG in pieces of about CHUNK_SIZE.

  A piece begins with a space between two words, so that tokenizers that split at white space give
  equal tokens. Without a nearby space, it begins with any character.
  """
  start = 0
  if len(text) > LONG:
    size = f'{len(text) / 1e6:,.0f} MB'
    logging.info('a document of %s is tokenised in pieces, cut at spaces between words', size)
    while start + CHUNK_SIZE < len(text):
      limit = start + CHUNK_SIZE
      character = start + _last_character_start(text[start : limit + 1], CHUNK_SIZE)
      spaces = SPACE.finditer(text, max(limit - 4096, start + 1), limit)
      stop = max((space.start() for space in spaces), default=character)
      yield text[start:stop]
      start = stop
  yield text[start:]


def _last_character_start(text: bytes, limit: int) -> int:
  """Returns the last index up to `limit` (but at least 1) that starts a UTF-8 character."""
  indices = range(min(limit, len(text) - 1), max(limit - 4, 0), -1)
  return next((index for index in indices if text[index] & 0xC0 != 0x80), limit)


def byte_range(parts: Iterable[bytes], start: int, stop: int) -> Iterator[bytes]:
  """Yields bytes [start, stop) of the concatenated parts."""
  offset = 0
  for part in parts:
    if selected := part[max(start - offset, 0) : max(stop - offset, 0)]:
      yield selected
    offset += len(part)


def read_bytes(path: pathlib.Path) -> Iterator[bytes]:
  """Yields the bytes of a plain or compressed file CHUNK_SIZE at a time."""
  with file_errors.translate_damage(path), compression.open_binary(path) as file:
    while data := file.read(CHUNK_SIZE):
      yield data


def decode(data: bytes, location: str, remedy: str = 'convert it', offset: int = 0) -> str:
  """Returns the text of UTF-8 bytes.

  Args:
    data: the bytes.
    location: file and part, for the error message.
    remedy: remedy for other encodings.
    offset: position of `data` in the part, in bytes.

  Raises:
    BadInput: the bytes are not UTF-8.
  """
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    raise errors.BadInput(
      f'{location} is not valid UTF-8 at byte {offset + error.start:,} '
      f'(0x{data[error.start]:02x}): {remedy}'
    ) from error


def parse_json(data: bytes, location: str, remedy: str, utf8_remedy: str = 'convert it') -> Any:
  """Returns the value of JSON bytes, such as a line. Raises BadInput if they are not JSON."""
  text = decode(data.removeprefix(codecs.BOM_UTF8), location, utf8_remedy)
  try:
    return json.loads(text.rstrip())
  except (ValueError, RecursionError) as error:
    raise errors.BadInput(f'{location} is not JSON: {error}; {remedy}') from error


def quote_line(line: bytes) -> str:
  """Returns the beginning of a line in quotes, for error messages."""
  text = line.decode(errors='replace').rstrip('\r\n')
  return f'"{text[:40]}..."' if len(text) > 43 else f'"{text}"'
