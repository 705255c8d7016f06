"""The commands and snippets of the README and of the documentation, as they stand in the text."""

import itertools
import json
import pathlib
import re
import shlex
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / 'README.md'
DOCS = sorted((ROOT / 'docs').glob('*.md'))
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
# Programs of others that commands name, and why no test runs them.
OTHER_PROGRAMS = {
  **dict.fromkeys(('pip', 'git'), 'reads a network'),
  **dict.fromkeys(('gcloud', 'docker', 'sky', 'xpk'), 'needs a cloud'),
  **dict.fromkeys(('tensorboard', 'mkdocs', 'jupyter'), 'serves until it is stopped'),
  **dict.fromkeys(('pytest', 'ruff', 'bash'), 'runs this test, or beside it'),
  **dict.fromkeys(('.', 'source', 'export', 'cd', 'cp', 'tail'), 'no program of ours'),
}
# What a block begins with that has no language and holds commands; other blocks are output.
COMMAND = re.compile(
  rf'(\$ )?((python|for|sbatch|{"|".join(map(re.escape, OTHER_PROGRAMS))}) '
  r'|ngrammer_jax [a-z-]|[A-Z_]+=)'
)
SHELL = ('sh', 'bash', 'shell', 'console')
OPERATORS = re.compile('[;&|<>]+')


class Block(NamedTuple):
  """A fenced block: its page, the number of its first line, its language and its text."""

  page: str
  line: int
  language: str
  text: str

  @property
  def is_shell(self) -> bool:
    return self.language in SHELL or (not self.language and bool(COMMAND.match(self.text)))


def blocks(path: pathlib.Path) -> list[Block]:
  """Returns the fenced blocks of a page."""
  text, page = path.read_text(encoding='utf-8'), path.relative_to(ROOT).as_posix()
  found = re.finditer(r'^```([\w-]*)[^\n]*\n(.*?)^```$', text, re.S | re.M)
  return [Block(page, text.count('\n', 0, b.start()) + 2, b[1], b[2]) for b in found]


def commands(text: str) -> list[list[str]]:
  """Returns the arguments of each command; where lines begin with `$`, others are output.

  `a && b`, `a; b` and `a | b` are two commands, `[--flag]` is a flag, and a loop is its first turn.
  """
  lines = text.replace('\\\n', ' ').splitlines()
  found: list[list[str]] = []
  for line in [line[2:] for line in lines if line.startswith('$ ')] or lines:
    line = re.sub(r' (\d?>&?\S+|"\$@")', '', line)  # where output goes, arguments of a function
    if loop := re.match(r'for (\w+) in (\S+)', line):
      line = line.replace(f'${loop[1]}', loop[2])
    lexer = shlex.shlex(line, posix=True, punctuation_chars=';&|<>')
    lexer.whitespace_split = True
    found.append([])
    for word in lexer:
      if OPERATORS.fullmatch(word):
        found.append([])
      elif word != 'do':
        found[-1].append(re.sub(r'^\[(--.*)\]$', r'\1', word))
  return [argv for argv in found if argv and argv[0] not in ('for', 'done')]


def inline_commands(path: pathlib.Path) -> list[list[str]]:
  """Returns our commands in the sentences of a page."""
  return _inline_commands(path, ('python ', 'ngrammer_jax '))


def all_commands(path: pathlib.Path, program: str) -> list[list[str]]:
  """Returns the commands of another program in the blocks and sentences of a page."""
  in_blocks = [argv for block in blocks(path) if block.is_shell for argv in commands(block.text)]
  return [argv for argv in in_blocks if argv[0] == program] + _inline_commands(path, f'{program} ')


def _inline_commands(path, starts):
  text = re.sub(r'^```.*?^```$', '', path.read_text(encoding='utf-8'), flags=re.S | re.M)
  spans = [' '.join(span.split()) for span in re.findall(r'`([^`]+)`', text)]
  return [argv for span in spans if span.startswith(starts) for argv in commands(span)]


def notebook_commands(path: pathlib.Path) -> list[list[str]]:
  """Returns our commands in the cells of a notebook."""
  cells = [''.join(cell['source']) for cell in json.loads(path.read_text('utf-8'))['cells']]
  scripts = [cell for cell in cells if cell.startswith('%%bash')]
  scripts += [line for cell in cells for line in re.findall(r'^!(.*)$', cell, re.M)]
  return [argv for script in scripts for argv in commands(script) if argv[0] == 'python']


def split_launched(argv: list[str]) -> tuple[list[str], list[str]]:
  """Splits a launcher from the command after `--` or in `--command=`."""
  if '--' in argv:
    return argv[: argv.index('--')], argv[argv.index('--') + 1 :]
  for word in argv:
    if word.startswith('--command='):
      return argv, shlex.split(word.removeprefix('--command=').removeprefix('exec '))
  return argv, []


def split_environment(argv: list[str]) -> tuple[dict[str, str], list[str]]:
  """Splits the variables before a command from it."""
  variables = list(itertools.takewhile(re.compile('[A-Z_]+=').match, argv))
  return dict(word.split('=', 1) for word in variables), argv[len(variables) :]


def program(argv: list[str]) -> tuple[str, list[str]] | None:
  """Returns the module or file that a command runs, and its arguments; None for other programs."""
  _, argv = split_environment(argv)
  if argv[0] == 'sbatch':
    argv = ['python', '-m', 'ngrammer_jax.train', *argv[argv.index('launch/train.sbatch') + 1 :]]
  if argv[0] == 'ngrammer_jax':
    argv = ['python', '-m', *argv]
  if argv[0] != 'python' or len(argv) < 2 or argv[1] == '-c':
    return None
  name, *rest = argv[2:] if argv[1] == '-m' else argv[1:]
  if name == 'ngrammer_jax' and rest and not rest[0].startswith('-'):
    name, *rest = f'ngrammer_jax.{rest[0]}', *rest[1:]
  return name, rest
