"""The prompts of a file: lines of text, or the field `prompt` of JSON lines or a table.

JSON lines of a chat may have the field `messages` instead.
"""

from collections.abc import Collection, Sequence
import dataclasses
import json
import logging
import pathlib
import sys
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data import formats
from ngrammer_jax.data.files import file_formats, file_log, text_files
from ngrammer_jax.system import file_errors

STANDARD_INPUT = pathlib.Path('-')
OPTIONS = formats.ReadOptions(
  ('prompt',), has_paragraphs=False, remedy='name it "prompt"', can_be_chat=False
)
CHAT_OPTIONS = formats.ReadOptions(
  ('messages',),
  has_paragraphs=False,
  is_chat=True,
  remedy='name a text "prompt"',
  can_be_chat=False,
)

Prompt = str | list[dict[str, Any]]  # a text, or messages


def read(path: pathlib.Path, is_chat: bool = False) -> list[Prompt]:
  """Returns the prompts of a file, or of standard input for `-`, including empty ones.

  Args:
    path: the file.
    is_chat: whether JSON lines may have messages in place of a prompt.

  Raises:
    BadInput: an unreadable file, or a line of JSON without a prompt.
  """
  name = f'--prompts={path}'
  file, records = _read_records(path, name)
  if not any(records):
    raise errors.BadInput(f'{name} is empty; expected one prompt per line')
  is_json = file.format == file_formats.LINES
  numbered = [(i, r) for i, r in enumerate(records) if r.strip() or not is_json]
  field = _find_field(file, numbered[0][1], is_chat)
  file_format = file.format
  if field == 'messages':
    if not is_chat:
      raise errors.BadInput(f'{name} has messages in place of prompts: add --chat to answer them')
    file = dataclasses.replace(file, options=CHAT_OPTIONS)
    prompts = [json.loads(text) for text in _parse(file, numbered, name)]
  elif field == 'prompt':
    prompts = _parse(file, numbered, name)
  else:
    file_format = file_formats.TEXT
    prompts = _split_lines(b''.join(record for _, record in numbered), path)
  if path != STANDARD_INPUT:
    counts = f'{len(prompts):,} prompts'
    file_log.log_files(name, {'': [path]}, counts=counts, formats={path: file_format})
  return prompts


def _find_field(file: formats.DocumentFile, first: bytes, is_chat: bool) -> str | None:
  """Returns the prompt field by the first record with one; None: prompts are lines of text."""
  if file.format == file_formats.TEXT:
    return None
  if file.format != file_formats.LINES:
    return 'prompt'
  fields = _fields(first)
  if 'messages' in fields and (is_chat or 'prompt' not in fields):
    return 'messages'
  suffix = file_formats.suffix(file.path)
  is_lines = file_formats.FORMAT_SUFFIXES.get(suffix) == file_formats.LINES
  if 'prompt' in fields or is_lines:
    return 'prompt'  # if it is absent, the error says which fields there are
  return None


def _fields(record: bytes) -> Collection[str]:
  """Returns the fields of a record of JSON lines; empty for other values than objects."""
  try:
    value = json.loads(record)
  except ValueError:
    return ()
  return value.keys() if isinstance(value, dict) else ()


def _parse(
  file: formats.DocumentFile, numbered: Sequence[tuple[int, bytes]], name: str
) -> list[str]:
  """Returns the text of each record, or messages as JSON. Raises BadInput for a missing one."""
  texts = []
  num_replaced = 0
  for i, record in numbered:
    document = file.text(i, record)
    if document.is_null and file.options.is_chat:
      raise errors.BadInput(f'{name}, line {i + 1:,}: "messages" is null: leave the line out')
    num_replaced += document.num_replaced
    texts.append(document.text.decode())
  if num_replaced:
    logging.warning(
      f'{name}: {num_replaced:,} halves of UTF-16 characters (lone surrogates) are replaced by '
      f'U+FFFD'
    )
  return texts


def _read_records(path: pathlib.Path, name: str) -> tuple[formats.DocumentFile, list[bytes]]:
  """Returns a file, or standard input, and its records."""
  if path == STANDARD_INPUT:
    with file_errors.translate_damage(name):
      data = sys.stdin.buffer.read()
    file_format = file_formats.identify_bytes(name, data[: file_formats.HEAD])
    return formats.DocumentFile(path, file_format, OPTIONS), data.splitlines(keepends=True)
  if not path.exists():
    raise errors.BadInput(f'{name}: no such file; expected one prompt per line')
  file = formats.DocumentFile.open(path, OPTIONS)
  return file, [record for record, _ in file.read()]


def _split_lines(data: bytes, path: pathlib.Path) -> list[str]:
  """Returns the lines of a text, also with Windows line ends."""
  text = text_files.decode(data, str(path)).removeprefix('\ufeff')
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return text.removesuffix('\n').split('\n')
