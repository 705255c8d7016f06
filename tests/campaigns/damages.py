"""Damaged workdirs as data, and a function that runs commands over them.

DAMAGES has what may be found in place of each file of a workdir, VALUES files with refused values.
`run` does the same as a shell, and returns the status, what was logged, and what it changed on
disk.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import logging
import os
import pathlib
import random
import shutil
import struct
import sys
from typing import Any
import warnings

from ngrammer_jax.system import process


@dataclasses.dataclass(frozen=True)
class Content:
  """Bytes in place of a file."""

  data: bytes

  def apply(self, path: pathlib.Path) -> None:
    remove(path)
    path.write_bytes(self.data)


@dataclasses.dataclass(frozen=True)
class Change:
  """A changed JSON value: the key is a path of names, the value replaces the one at it.

  ... as a value deletes the key.
  """

  key: str
  value: Any

  def apply(self, path: pathlib.Path) -> None:
    fields = parent = json.loads(path.read_text())
    *names, last = self.key.split('/')
    for name in names:
      parent = parent[name]
    if self.value is ...:
      del parent[last]
    else:
      parent[last] = self.value
    path.write_text(json.dumps(fields))


@dataclasses.dataclass(frozen=True)
class Folder:
  """A folder in place of a file."""

  def apply(self, path: pathlib.Path) -> None:
    remove(path)
    path.mkdir()


def remove(path: pathlib.Path) -> None:
  """Removes a file, a link or a folder, if there is one."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


NESTED = b'[' * 200_000 + b']' * 200_000
# In place of any file of JSON: not what is expected, whatever that is.
ANY = {
  'empty': Content(b''),
  'half an object': Content(b'{"model": '),
  'a list': Content(b'[]'),
  'null': Content(b'null'),
  'a number': Content(b'5'),
  'an empty object': Content(b'{}'),
  'binary': Content(bytes(range(256))),
  'invalid UTF-8': Content(b'{"kind": "\xff"}'),
  'nested': Content(NESTED),
  'nested in an object': Content(b'{"model": ' + NESTED + b'}'),
  'a long number': Content(b'{"model": ' + b'9' * 5000 + b'}'),
  'zeros': Content(bytes(4096)),
  'a folder': Folder(),
}
DAMAGES = {
  'config.json': ANY
  | {
    'a section that is a number': Content(b'{"training": 5}'),
    'no model': Change('model', ...),
    'no training': Change('training', ...),
    'no evaluation': Change('evaluation', ...),
    'a null section': Change('training', None),
    'a section that is a list': Change('optimizer', []),
    'a block that is a number': Change('model/ngram', 5),
    'a text for a number': Change('training/steps', 'many'),
    'a truth for a number': Change('training/steps', True),
    'a list for a number': Change('model/width', [16]),
    'a number too large for a float': Change('optimizer/learning_rate', 10**400),
    'not a number': Change('optimizer/learning_rate', float('nan')),
    'a list for a path': Change('data/path', ['a']),
    'an unknown key': Change('model/wdith', 16),
    'blocks of a wrong type': Change('model/ngram_memories', {'x': 1}),
    'blocks of a wrong number': Change('model/ngram_memories', {'9': {}}),
  },
  'corpus.json': ANY
  | {
    'a number for the hash': Change('content_hash', 5),
    'a list for the hash': Change('content_hash', ['abc']),
  },
  'metrics.jsonl': {
    name: damage for name, damage in ANY.items() if name not in ('empty', 'an empty object')
  }
  | {
    'no step': Content(b'{"loss": 1.0}\n'),
    'a text for a step': Content(b'{"step": "2", "loss": 1.0}\n'),
    'a truth for a step': Content(b'{"step": true, "loss": 1.0}\n'),
    'a text for a loss': Content(b'{"step": 2, "loss": "low"}\n'),
    'a list for a loss': Content(b'{"step": 2, "loss": [1]}\n'),
    'an infinite step': Content(b'{"step": Infinity, "loss": 1.0}\n'),
  },
  'vocabulary.json': ANY
  | {
    'an unknown kind': Content(b'{"kind": "letters"}'),
    'a list for a kind': Content(b'{"kind": []}'),
    'a list for characters': Content(
      b'{"kind": "characters", "characters": [1, 2], "encoding": "utf-8", "separated": true}'
    ),
    'a text for a truth': Content(
      b'{"kind": "characters", "characters": "ab", "encoding": "utf-8", "separated": "yes"}'
    ),
    'no words': Content(b'{"kind": "words", "words": []}'),
    'numbers for words': Content(b'{"kind": "words", "words": [1, 2]}'),
    'a text for words': Content(b'{"kind": "words", "words": "<unk>"}'),
    'an unknown field': Content(b'{"kind": "bytes", "size": 3}'),
  },
}
# The commands that read a file. Training writes the vocabulary again.
READERS = {
  'config.json': ('train', 'evaluate', 'generate', 'analyze checkpoint', 'analyze clusters'),
  'corpus.json': ('train', 'evaluate', 'analyze clusters'),
  'metrics.jsonl': ('analyze report',),
  'vocabulary.json': ('evaluate', 'generate', 'analyze clusters'),
}
# Files that are what they should be, with values that are refused: and the text that is named.
VALUES = {
  'config.json': {
    'a long path': (Change('data/path', 'x' * 300), 'data.path=xxx'),
    'the home of nobody': (Change('data/path', '~nosuchuser/text'), 'data.path=~nosuchuser'),
    'lines in a value': (Change('data/corpus', 'a\nb\x1b[31mc'), 'data.corpus='),
    'a very long value': (Change('data/corpus', 'a' * 500_000), 'data.corpus='),
  },
  'corpus.json': {'another hash': (Change('content_hash', 'abc'), 'another text')},
  'vocabulary.json': {
    'a model that is missing': (
      Content(b'{"kind": "sentencepiece", "learned": true}'),
      'vocabulary.model',
    ),
    'a tokenizer that is missing': (Content(b'{"kind": "tokenizer"}'), 'vocabulary.tokenizer.json'),
  },
}


# In place of a value of JSON.
VALUES_OF_JSON = (
  *(None, [], {}, '', 'text', '../x', 'x' * 1000, 0, -1, 1, 3, 2**31, 2**63, 10**30, 0.5, 1e308),
  *(True, False, float('nan'), float('inf'), [1, 2], ['a'], {'a': 1}, [[]] * 9),
)
NUMBERS = (0, 1, 7, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)  # in place of bytes of a header


def change_bytes(content: bytes, draw: random.Random, end: int | None = None) -> bytes:
  """Returns bytes with a flipped bit, cut short, with a part twice, or with another number.

  Args:
    content: the bytes.
    draw: draws the change.
    end: number of the first bytes, of which one is changed; None: all.
  """
  changed = bytearray(content)
  place = draw.randrange(min(end or len(changed), len(changed)))
  kind = draw.choice(('flip', 'flip', 'cut', 'double', 'random', 'number'))
  if kind == 'flip':
    changed[place] ^= 1 << draw.randrange(8)
  elif kind == 'cut':
    del changed[place:]
  elif kind == 'double':
    changed[place:place] = changed[place // 2 :]
  elif kind == 'random':
    changed[place : place + 8] = draw.randbytes(8)
  else:
    changed[place : place + 8] = struct.pack('<Q', draw.choice(NUMBERS))
  return bytes(changed)


def change_json(content: bytes, draw: random.Random) -> bytes:
  """Returns JSON in which a value is deleted, replaced, or has another name."""
  fields = json.loads(content)
  parent, key = draw.choice(list(_places(fields)))
  kind = draw.choice(('delete', 'rename', 'replace', 'replace', 'replace', 'add'))
  value = parent[key]
  if kind == 'delete':
    del parent[key]
  elif kind == 'rename' and isinstance(parent, dict):
    parent[f'{key}_'] = parent.pop(key)
  elif kind == 'add' and type(value) in (int, float):
    parent[key] = value + draw.choice((-1, 1, 8, 2**20))
  else:
    parent[key] = draw.choice(VALUES_OF_JSON)
  return json.dumps(fields).encode()


def _places(value: Any, limit: int = 50) -> Iterator[tuple[Any, Any]]:
  """Yields every list and dict of a value with each of its keys; of long ones, the first."""
  keys = list(value) if isinstance(value, dict) else range(len(value))
  for key in keys[:limit]:
    yield value, key
    if isinstance(value[key], dict | list):
      yield from _places(value[key], limit)


def change_safetensors(content: bytes, draw: random.Random) -> bytes:
  """Returns weights whose header is changed as `change_json` does; its length is right."""
  (length,) = struct.unpack('<Q', content[:8])
  header = change_json(content[8 : 8 + length], draw)
  return struct.pack('<Q', len(header)) + header + content[8 + length :]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a command did.

  Attributes:
    status: its exit status, or the exception that it ended with.
    error: standard error.
    changes: paths that were created, deleted or changed.
  """

  status: Any
  error: str
  changes: tuple[str, ...]

  def shortcoming(self, name: str) -> str | None:
    """Why this is not a refusal in one sentence that names a file; None if it is one."""
    if self.status != 2:
      return f'status {self.status!r}'
    lines = self.error.splitlines()
    if not lines or not lines[-1].startswith('error: ') or not self.error.endswith('\n'):
      return 'no sentence'
    if sum(line.startswith('error: ') for line in lines) != 1 or 'Traceback' in self.error:
      return 'more than a sentence'
    if name not in lines[-1]:
      return f'{name} is not named'
    if len(lines[-1]) > process.MAX_MESSAGE + 10 or not lines[-1].isprintable():
      return 'a sentence that cannot be read'
    return f'changed on disk: {", ".join(self.changes)}' if self.changes else None


def run(subcommand: str, arguments: list[str], folders: tuple[pathlib.Path, ...]) -> Outcome:
  """Runs a command as a shell does; what it changes in the folders is in the outcome."""
  main: Callable[[list[str]], Any] = importlib.import_module(f'ngrammer_jax.{subcommand}').main
  before = snapshot(folders)
  argv, root = sys.argv, logging.getLogger()
  handlers, level = root.handlers[:], root.level
  error = io.StringIO()
  try:
    sys.argv, root.handlers = [subcommand, *arguments], []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
      with warnings.catch_warnings(action='ignore'):
        process.run(main)
  except SystemExit as stop:
    status = stop.code
  except Exception as exception:
    status = exception
  finally:
    sys.argv, root.handlers = argv, handlers
    root.setLevel(level)
  after = snapshot(folders)
  changes = sorted(
    path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
  )
  return Outcome(status, error.getvalue(), tuple(changes))


def snapshot(folders: tuple[pathlib.Path, ...]) -> dict[str, str]:
  """Kind and content of everything in some folders, by path; links are not followed."""
  found = {}
  for folder in folders:
    for parent, names, files in os.walk(folder):
      for name in (*names, *files):
        path = pathlib.Path(parent, name)
        if path.is_symlink():
          found[str(path)] = f'link to {path.readlink()}'
        elif path.is_file():
          found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
          found[str(path)] = 'folder' if path.is_dir() else 'other'
  return found
