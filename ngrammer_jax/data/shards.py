"""Corpora that are too large to tokenise in advance: many files (shards) of many documents.

A shard can be read from any of its documents. In `.jsonl` and `.json` files, a document is the
`text` of a line; in `.txt` files, documents are separated by empty lines. `.gz` may be appended:
then the shard is decompressed up to the document, other shards are not read.
"""

from collections.abc import Iterator
import dataclasses
import gzip
import json
import pathlib
from typing import Protocol
import zlib

from ngrammer_jax import errors

SUFFIXES = ('.jsonl', '.json', '.txt')
# Part of the file name; the first match counts.
SPLIT_WORDS = {'validation': 'valid', 'test': 'test', 'train': 'train'}


class Shards(Protocol):
  """The shards of a split.

  Attributes:
    names: one name per shard, for error messages.
    files: the files, to compare by size and modification time.
  """

  names: tuple[str, ...]
  files: tuple[pathlib.Path, ...]

  def read(self, shard: int, document: int = 0, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yields the record of each document from `document` on, and the offset of the next document.

    `offset` is the one that this method yielded for `document`, or 0 for the first document.
    """

  def text(self, shard: int, document: int, record: bytes) -> bytes:
    """Returns the text of a document. Raises BadInput if its record is invalid."""


@dataclasses.dataclass(frozen=True)
class FileShards:
  """Files of JSON lines or plain text."""

  files: tuple[pathlib.Path, ...]

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the shards, for error messages."""
    return tuple(map(str, self.files))

  def read(self, shard: int, document: int = 0, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """See `Shards`. A JSON document is a line, and its number is the line number from 0."""
    path = self.files[shard]
    split_records = _split_paragraphs if _file_type(path) == '.txt' else iter

    def read_error(error):
      return errors.BadInput(f'{path} cannot be read after byte {offset:,}: {error}')

    try:
      file = gzip.open(path) if path.suffix == '.gz' else path.open('rb')
    except OSError as error:
      raise read_error(error) from error
    with file:
      records = split_records(file)
      while True:
        try:  # does not include the yield: errors of the caller are not errors of the file
          if file.tell() < offset:
            file.seek(offset)
          record = next(records, None)
        except (EOFError, OSError, zlib.error) as error:
          raise read_error(error) from error
        if record is None:
          return
        offset += len(record)
        yield record, offset

  def text(self, shard: int, document: int, record: bytes) -> bytes:
    """See `Shards`. An empty line is an empty document."""
    path = self.files[shard]
    try:
      text = record.decode()
    except UnicodeDecodeError as error:
      raise errors.BadInput(
        f'{path}, document {document + 1:,}: not valid UTF-8: {error.reason}'
      ) from error
    if not text.strip():
      return b''
    if _file_type(path) == '.txt':
      return text.strip('\r\n').encode()
    try:
      return json.loads(text.rstrip())['text'].encode()
    except json.JSONDecodeError as error:
      raise errors.BadInput(
        f'{path}, line {document + 1:,}: not JSON, column {error.colno}: {error.msg}'
      ) from error
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeEncodeError) as error:
      raise errors.BadInput(
        f'{path}, line {document + 1:,}: expected an object with a "text", found '
        f'{text.strip()[:60]}'
      ) from error


def find(folder: pathlib.Path) -> dict[str, FileShards]:
  """Returns the shards of a folder, by split.

  Raises:
    BadInput: there are no shards for train or validation.
  """
  files_by_split = {split: [] for split in ('train', 'validation', 'test')}
  for file in sorted(folder.rglob('*')) if folder.is_dir() else ():
    split = next((split for split, word in SPLIT_WORDS.items() if word in file.name), None)
    is_hidden = any(part.startswith('.') for part in file.relative_to(folder).parts)
    if split is not None and _file_type(file) in SUFFIXES and file.is_file() and not is_hidden:
      files_by_split[split].append(file)
  missing = [split for split in ('train', 'validation') if not files_by_split[split]]
  if missing:
    raise errors.BadInput(
      f'data.path={folder} has no shards for {" and ".join(missing)}: expected a folder with files '
      f'such as c4-train.00000-of-01024.json.gz or validation.txt, with "train" or "valid" in '
      f'their names and one of the suffixes {", ".join(SUFFIXES)}, optionally followed by .gz'
    )
  return {split: FileShards(tuple(files)) for split, files in files_by_split.items() if files}


def _file_type(path: pathlib.Path) -> str:
  """Returns the suffix of a file, without `.gz`."""
  return path.with_suffix('').suffix if path.suffix == '.gz' else path.suffix


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
