"""The prompts of a file: lines of text, or the field `prompt` of JSON lines or of a table."""

import logging
import pathlib
import sys

from ngrammer_jax import errors
from ngrammer_jax.data import formats
from ngrammer_jax.data.files import file_formats, file_log, text_files
from ngrammer_jax.system import file_errors

STANDARD_INPUT = pathlib.Path('-')
OPTIONS = formats.ReadOptions(
  ('prompt',), has_paragraphs=False, remedy='name it "prompt"', can_be_chat=False
)


def read(path: pathlib.Path) -> list[str]:
  """Returns the prompts of a file, or of standard input for `-`. An empty one stays empty.

  Raises:
    BadInput: the file cannot be read, or a line of JSON has no prompt.
  """
  name = f'--prompts={path}'
  file, records = _read_records(path, name)
  if not any(records):
    raise errors.BadInput(f'{name} is empty; expected one prompt per line')
  is_json = file.format == file_formats.LINES
  numbered = [(i, r) for i, r in enumerate(records) if r.strip() or not is_json]
  is_named_json = file_formats.FORMAT_SUFFIXES.get(file_formats.suffix(path)) == file_formats.LINES
  has_prompt = not is_json or is_named_json or b'"prompt"' in numbered[0][1]
  if file.format != file_formats.TEXT and has_prompt:
    file_format = file.format
    parsed = [file.text(i, record) for i, record in numbered]
    prompts = [document.text.decode() for document in parsed]
    num_replaced = sum(document.num_replaced for document in parsed)
    if num_replaced:
      logging.warning(
        f'{name}: {num_replaced:,} halves of UTF-16 characters (lone surrogates) are replaced by '
        f'U+FFFD'
      )
  else:
    file_format = file_formats.TEXT
    prompts = _split_lines(b''.join(record for _, record in numbered), path)
  if path != STANDARD_INPUT:
    counts = f'{len(prompts):,} prompts'
    file_log.log_files(name, {'': [path]}, counts=counts, formats={path: file_format})
  return prompts


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
  """Returns the lines of a text, of Windows too."""
  text = text_files.decode(data, str(path)).removeprefix('\ufeff')
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return text.removesuffix('\n').split('\n')
