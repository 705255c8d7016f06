"""Corpora too large to be tokenised beforehand: many files (shards) of many documents.

A shard is read from any of its documents on. In `.jsonl` and `.json`, a document is the `text` of a
line; in `.txt`, what stands between empty lines. `.gz` may follow: then the shard is unpacked up to
the document, and others are not touched.
"""

from collections.abc import Iterator
import dataclasses
import gzip
import json
import pathlib
from typing import Protocol
import zlib

from ngrammer_jax import errors

KINDS = ('.jsonl', '.json', '.txt')
SPLITS = {'validation': 'valid', 'test': 'test', 'train': 'train'}  # by a part of the name


class Shards(Protocol):
  """The shards of a split.

  Attributes:
    names: of the shards.
    files: what can be compared by size and time.
  """

  names: tuple[str, ...]
  files: tuple[pathlib.Path, ...]

  def read(self, shard: int, number: int = 0, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yields what is stored of each document from `number` on, and the offset of the next.

    Offsets are what this method has given out for that document; 0 for the first.
    """

  def text(self, shard: int, number: int, stored: bytes) -> bytes:
    """The text of a document. Raises BadInput where there is none."""


@dataclasses.dataclass(frozen=True)
class FileShards:
  """Files of JSON lines, or of plain text."""

  files: tuple[pathlib.Path, ...]

  @property
  def names(self) -> tuple[str, ...]:
    """As they are said in errors."""
    return tuple(map(str, self.files))

  def read(self, shard: int, number: int = 0, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """See `Shards`. A document of JSON is a line, and its number that of the line from 0 on."""
    path = self.files[shard]
    documents = _paragraphs if _kind(path) == '.txt' else iter

    def cannot_be_read(error):
      return errors.BadInput(f'{path} cannot be read after byte {offset:,}: {error}')

    try:
      file = gzip.open(path) if path.suffix == '.gz' else path.open('rb')
    except OSError as error:
      raise cannot_be_read(error) from error
    with file:
      found = documents(file)
      while True:
        try:  # not around what is done with a document
          if file.tell() < offset:
            file.seek(offset)
          stored = next(found, None)
        except (EOFError, OSError, zlib.error) as error:
          raise cannot_be_read(error) from error
        if stored is None:
          return
        offset += len(stored)
        yield stored, offset

  def text(self, shard: int, number: int, stored: bytes) -> bytes:
    """See `Shards`. An empty line is an empty document."""
    path = self.files[shard]
    try:
      text = stored.decode()
    except UnicodeDecodeError as error:
      raise errors.BadInput(f'{path}, document {number + 1:,}: {error.reason} in UTF-8') from error
    if not text.strip():
      return b''
    if _kind(path) == '.txt':
      return text.strip('\r\n').encode()
    try:
      return json.loads(text.rstrip())['text'].encode()
    except json.JSONDecodeError as error:
      raise errors.BadInput(
        f'{path}, line {number + 1:,}: not JSON, column {error.colno}: {error.msg}'
      ) from error
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeEncodeError) as error:
      raise errors.BadInput(
        f'{path}, line {number + 1:,}: expected an object with a "text", found {text.strip()[:60]}'
      ) from error


def find(path: pathlib.Path) -> dict[str, FileShards]:
  """The shards of a folder, by split. Raises BadInput where train or validation has none."""
  found = {split: [] for split in SPLITS}
  for file in sorted(path.rglob('*')) if path.is_dir() else ():
    split = next((split for split, word in SPLITS.items() if word in file.name), None)
    hidden = any(part.startswith('.') for part in file.relative_to(path).parts)
    if split is not None and _kind(file) in KINDS and file.is_file() and not hidden:
      found[split].append(file)
  found = {split: found[split] for split in ('train', 'validation', 'test')}
  missing = [split for split in ('train', 'validation') if not found[split]]
  if missing:
    raise errors.BadInput(
      f'data.path={path} has no shards of {" and ".join(missing)}: expected a folder with files '
      f'such as c4-train.00000-of-01024.json.gz or validation.txt, that have "train" or "valid" '
      f'in their names and end in {", ".join(KINDS)}, with or without .gz'
    )
  return {split: FileShards(tuple(files)) for split, files in found.items() if files}


def _kind(path: pathlib.Path) -> str:
  return path.with_suffix('').suffix if path.suffix == '.gz' else path.suffix


def _paragraphs(lines: Iterator[bytes]) -> Iterator[bytes]:
  """Lines up to and with the empty ones that follow."""
  kept: list[bytes] = []
  for line in lines:
    if kept and line.strip() and not kept[-1].strip() and b''.join(kept).strip():
      yield b''.join(kept)
      kept = []
    kept.append(line)
  if b''.join(kept).strip():
    yield b''.join(kept)
