"""File formats, identified by suffix and first bytes, for every command.

A file is text, JSON lines, Parquet or Arrow, maybe compressed. Other known formats are refused by
name, with a remedy. `file_log` logs the format of each file.
"""

import codecs
import json
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.files import compression
from ngrammer_jax.system import file_errors, git_lfs

HEAD = 1 << 16  # bytes to inspect
TEXT, LINES, PARQUET, ARROW = 'text', 'JSON lines', 'Parquet', 'Arrow'
FORMAT_SUFFIXES = {
  '.txt': TEXT,
  '.text': TEXT,
  '.jsonl': LINES,
  '.ndjson': LINES,
  '.json': LINES,
  '.parquet': PARQUET,
  '.arrow': ARROW,
}
GGUF = 'a GGUF model'
COLUMNS = {b'PAR1': PARQUET, b'ARROW1': ARROW, b'\xff\xff\xff\xff': ARROW}
# What other files are, by their first bytes.
REFUSED = {
  b'PARE': 'an encrypted Parquet file',
  b'7z\xbc\xaf': 'an archive',
  b'Rar!': 'an archive',
  b'\x04"M\x18': 'an archive',
  b'\xd0\xcf\x11\xe0': 'a document of an office program',
  b'{\\rtf': 'a document of an office program',
  b'\x1f\x9d': 'compressed by compress or lzma',
  b']\0\0': 'compressed by compress or lzma',
  b'%PDF': 'a PDF',
  b'\x93NUMPY': 'a NumPy array',
  b'ORC': 'ORC',
  b'Obj\x01': 'Avro',
  b'SQLite format 3': 'a database',
  b'GGUF': GGUF,
}
BYTE_ORDER_MARKS = {
  codecs.BOM_UTF32_LE: 32,
  codecs.BOM_UTF32_BE: 32,
  codecs.BOM_UTF16_LE: 16,
  codecs.BOM_UTF16_BE: 16,
}
UNKNOWN_COMPRESSION = ('.br', '.lz4', '.lzma', '.z')
REMEDY = 'write its text as .txt, .jsonl or .parquet'
UTF8_REMEDY = 'convert it to UTF-8'


def suffix(path: pathlib.Path) -> str:
  """Returns the suffix of a file in lower case, without the suffix of its compression."""
  if path.suffix.lower() in compression.SUFFIXES:
    path = pathlib.PurePosixPath(path.name).with_suffix('')
  return path.suffix.lower()


def format_of_suffix(path: pathlib.Path) -> str:
  """Returns the format of a file by its suffix; TEXT without a suffix."""
  return FORMAT_SUFFIXES.get(suffix(path), TEXT)


def identify(path: pathlib.Path, any_bytes: bool = False) -> str:
  """Returns the format of a file: TEXT, LINES, PARQUET or ARROW.

  Args:
    path: the file.
    any_bytes: whether files of unknown format, including binary ones, may be TEXT.

  Raises:
    BadInput: another format, or a damaged file.
  """
  if path.suffix.lower() in UNKNOWN_COMPRESSION:
    suffixes = ', '.join(compression.SUFFIXES)
    raise errors.BadInput(f'{path} has an unsupported compression: use one of {suffixes}')
  with file_errors.translate_damage(path), compression.open_binary(path) as file:
    head = file.read(HEAD)
  suffix_format = format_of_suffix(path)
  file_format = identify_bytes(path, head, suffix_format, any_bytes)
  if suffix_format in (PARQUET, ARROW) and head and file_format != suffix_format:
    raise errors.BadInput(
      f'{path} is damaged: it is named {suffix(path)}, but is not {suffix_format}'
    )
  return file_format


def identify_bytes(
  name: pathlib.Path | str, head: bytes, named: str = TEXT, any_bytes: bool = False
) -> str:
  """Returns the format of content with these first bytes; see `identify`.

  Args:
    name: name of the content in error messages.
    head: its first bytes.
    named: the format by its suffix.
    any_bytes: see `identify`.
  """
  git_lfs.check(name, head)
  other = recognize(head)
  if other in COLUMNS.values():
    return other
  if other is not None and other.startswith('UTF'):
    raise errors.BadInput(f'{name} is {other}: {UTF8_REMEDY}')
  if other is not None:
    raise errors.BadInput(f'{name} is {other}, not text: {REMEDY}')
  if b'\0' in head and not any_bytes:
    raise errors.BadInput(f'{name} is binary, not text: {REMEDY}, or use data.vocabulary=bytes')
  return LINES if _is_json_lines(name, head, named) else TEXT


def recognize(head: bytes) -> str | None:
  """Returns the name of a known non-text format by the first bytes; otherwise None."""
  if head[257:262] == b'ustar':
    return 'a tar archive'
  for magic, name in (COLUMNS | REFUSED).items():
    if head.startswith(magic) and (b'\0' in head or not magic.isalpha()):  # a text may begin so
      return name
  for mark, bits in BYTE_ORDER_MARKS.items():
    if head.startswith(mark):
      return f'UTF-{bits}'
  if b'\0' in head:
    zeros_of_halves = [half.count(0) / max(len(half), 1) for half in (head[::2], head[1::2])]
    if max(zeros_of_halves) > 0.4 and min(zeros_of_halves) < 0.1:
      return 'UTF-16'
  return None


def _is_json_lines(name: pathlib.Path | str, head: bytes, named: str) -> bool:
  """Whether each line is a JSON value, by the name or because the first two lines are objects."""
  lines = head.removeprefix(codecs.BOM_UTF8).split(b'\n')
  if len(head) == HEAD:
    lines.pop()  # it may be a part of a line
  lines = [line.strip() for line in lines if line.strip()][:2]
  is_value = bool(lines) and (lines[0] in (b'{', b'[', b'[{') or isinstance(_parse(lines[0]), list))
  if (is_value and named == LINES) or _is_array_of_objects(head):
    raise errors.BadInput(
      f'{name} is one JSON value, not lines such as {{"text": "..."}}: of objects, '
      f"jq -c '.[]' writes them"
    )
  if named == LINES:
    return True
  return bool(lines) and all(isinstance(_parse(line), dict) for line in lines)


def _is_array_of_objects(head: bytes) -> bool:
  """Whether content is a JSON array of objects; truncated content is judged by the first object."""
  text = head.removeprefix(codecs.BOM_UTF8).strip()
  is_cut = len(head) == HEAD and text.startswith(b'[') and _parse(text, is_whole=False) is None
  if is_cut:
    return isinstance(_parse(text[1:], is_whole=False), dict)
  value = _parse(text)
  return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _parse(data: bytes, is_whole: bool = True) -> Any:
  """Returns the JSON value of content, or of its beginning; None: no JSON."""
  text = data.decode(errors='replace').lstrip()
  try:
    value, end = json.JSONDecoder().raw_decode(text)
  except (ValueError, RecursionError):
    return None
  if is_whole and text[end:].strip():
    return None
  return value
