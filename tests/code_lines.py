"""Counts lines of code: of each folder of the package, and of the files to read for each idea.

  python -m tests.code_lines

Lines of code have no docstrings, comments and blanks.
"""

import argparse
import ast
from collections.abc import Iterable, Sequence
import io
import pathlib
import re
import tokenize
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
SKIPPED = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


class Count(NamedTuple):
  """Numbers of files, of their lines of code, and of all their lines."""

  files: int
  code: int
  lines: int


def count(paths: Iterable[pathlib.Path]) -> Count:
  """Counts the lines of files."""
  texts = [path.read_text(encoding='utf-8') for path in paths]
  return Count(len(texts), sum(map(code_lines, texts)), sum(text.count('\n') for text in texts))


def code_lines(text: str) -> int:
  """Returns the number of lines of code of a text."""
  used: set[int] = set()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type not in (*SKIPPED, tokenize.ENDMARKER):
      used |= {*range(token.start[0], token.end[0] + 1)}
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
      used -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
  return len(used)


def reading_lists() -> dict[str, list[pathlib.Path]]:
  """Returns the files of each list in the section `What to read` of docs/reading.md."""
  page = (ROOT / 'docs' / 'reading.md').read_text(encoding='utf-8')
  section = page.partition('\n## What to read')[2].partition('\n## ')[0]
  lists = (part.partition('\n') for part in section.split('\n### ')[1:])
  link = re.compile(r'^\d+\. \[`[^]]+`\]\(\.\./([^)]+)\)', re.M)
  return {name: [ROOT / path for path in link.findall(text)] for name, _, text in lists}


def main(argv: Sequence[str] | None = None) -> None:
  """Prints all counts, the totals last."""
  argparse.ArgumentParser(description=__doc__).parse_args(argv)
  folders = 'tests', 'launch', 'ngrammer_jax'
  files = {folder: [*(ROOT / folder).rglob('*.py')] for folder in folders}
  packages = sorted({path.parent for path in files['ngrammer_jax']})
  rows = {f'{path.relative_to(ROOT)}/': count(path.glob('*.py')) for path in packages}
  rows |= {f'to read: {name}': count(paths) for name, paths in reading_lists().items()}
  rows |= {f'all of {folder}': count(paths) for folder, paths in files.items()}
  print(f'{"":48}files    code   lines')
  for name, row in rows.items():
    print(f'{name:48}{row.files:5}{row.code:8}{row.lines:8}')


if __name__ == '__main__':
  main()
