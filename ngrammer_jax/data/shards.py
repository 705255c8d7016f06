"""Corpora that are too large to tokenise in advance: many files (shards) of many documents.

A shard can be read from any of its documents. In `.jsonl` and `.json` files, a document is the
`text` of a line; in `.txt` files, documents are separated by empty lines. `.gz` may be appended:
then the shard is decompressed up to the document, other shards are not read.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
from typing import Protocol

from ngrammer_jax import errors
from ngrammer_jax.data import split_files, text_files
from ngrammer_jax.system import files

SUFFIXES = ('.jsonl', '.json', '.txt')
REMEDY = 'expected one object with a "text" per line'


class Shards(Protocol):
  """The shards of a split.

  Attributes:
    files: the file of each shard.
  """

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

  def read(self, shard: int, document: int = 0, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """See `Shards`. A JSON document is a line, and its number is the line number from 0."""
    path = self.files[shard]
    with files.translate_damage(path), text_files.open_binary(path) as file:
      file.seek(offset)
      for record in _split_paragraphs(file) if _file_type(path) == '.txt' else file:
        offset += len(record)
        yield record, offset

  def text(self, shard: int, document: int, record: bytes) -> bytes:
    """See `Shards`. An empty line is an empty document."""
    path = self.files[shard]
    is_plain = _file_type(path) == '.txt'
    location = f'{path}, {"document" if is_plain else "line"} {document + 1:,}'
    text = text_files.decode(record, location)
    if not text.strip():
      return b''
    if is_plain:
      return text.strip('\r\n').encode()
    try:
      return text_files.parse_json(record, location, REMEDY)['text'].encode()
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
      raise errors.BadInput(
        f'{location}: expected an object with a "text", found {text.strip()[:60]}'
      ) from error


def find(folder: pathlib.Path) -> dict[str, FileShards]:
  """Returns the shards of a folder, by split.

  Raises:
    BadInput: there are no shards for train or validation.
  """
  files = (file for file in split_files.visible_files(folder) if _file_type(file) in SUFFIXES)
  files_by_split = split_files.group_by_split(files)
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
