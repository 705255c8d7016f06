"""The prompts of a file: lines of text, or the field `prompt` of JSON lines or of a table."""

import pathlib
import sys

from ngrammer_jax import errors
from ngrammer_jax.data import formats, kinds, text_files
from ngrammer_jax.system import file_errors

STANDARD_INPUT = pathlib.Path('-')
LAYOUT = formats.Layout(('prompt',), has_paragraphs=False, remedy='name it "prompt"')


def read(path: pathlib.Path) -> list[str]:
  """Returns the prompts of a file, or of standard input for `-`. An empty one stays empty.

  Raises:
    BadInput: the file cannot be read, or a line of JSON has no prompt.
  """
  name = f'--prompts={path}'
  if path == STANDARD_INPUT:
    with file_errors.translate_damage(name):
      data = sys.stdin.buffer.read()
    file = formats.DocumentFile(path, kinds.identify_bytes(name, data[: kinds.HEAD]), LAYOUT)
    records = data.splitlines(keepends=True)
  elif path.exists():
    file = formats.DocumentFile.open(path, LAYOUT)
    records = [record for record, _ in file.read()]
  else:
    raise errors.BadInput(f'{name}: no such file; expected one prompt per line')
  if not any(records):
    raise errors.BadInput(f'{name} is empty; expected one prompt per line')
  is_json = file.format == kinds.LINES
  numbered = [(i, r) for i, r in enumerate(records) if r.strip() or not is_json]
  is_named = kinds.FORMAT_SUFFIXES.get(kinds.suffix(path)) == kinds.LINES
  has_prompt = not is_json or is_named or b'"prompt"' in numbered[0][1]
  if file.format != kinds.TEXT and has_prompt:
    file_format, texts = file.format, [file.text(i, record).decode() for i, record in numbered]
  else:
    text = text_files.decode(b''.join(r for _, r in numbered), str(path)).removeprefix('\ufeff')
    text = text.replace('\r\n', '\n').replace('\r', '\n')  # of Windows
    file_format, texts = kinds.TEXT, text.removesuffix('\n').split('\n')
  if path != STANDARD_INPUT:
    counts = f'{len(texts):,} prompts'
    kinds.log_files(name, {'': [path]}, counts=counts, formats={path: file_format})
  return texts
