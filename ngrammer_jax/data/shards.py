"""Corpora that are too large to tokenise in advance: many files (shards) of many documents.

A shard is read from any place on, see `formats`; other shards are not read for it.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import hashlib
import math
import pathlib
from typing import Protocol

from ngrammer_jax import errors
from ngrammer_jax.data import formats, kinds, split_files
from ngrammer_jax.data.formats import ANY, START, FilePosition, Layout

HELD_OUT_BYTES = 32 << 20  # of files that are held out for validation, and of their text


class Shards(Protocol):
  """The shards of a split.

  Attributes:
    files: the file of each shard.
  """

  files: tuple[pathlib.Path, ...]

  def read(self, shard: int, place: FilePosition = START) -> Iterator[tuple[bytes, FilePosition]]:
    """Yields the record of each document from a place on, and the place of the next document.

    The place is one that this method yielded, or that of the first document.
    """

  def text(self, shard: int, document: int, record: bytes) -> bytes | None:
    """Returns the text of a document; None for one of another split.

    Raises BadInput if its record is invalid.
    """


@dataclasses.dataclass(frozen=True)
class FileShards:
  """Files of documents.

  Attributes:
    files: the file of each shard.
    layout: where the text of a document is.
    held_out: the share of the documents of each file that are held out; 0: none.
    is_held_out: whether these are the documents, or the files, that are held out.
  """

  files: tuple[pathlib.Path, ...]
  layout: Layout = ANY
  held_out: float = 0.0
  is_held_out: bool = False

  @functools.cached_property
  def _file(self) -> Callable[[int], formats.DocumentFile]:
    return functools.cache(lambda shard: formats.DocumentFile.open(self.files[shard], self.layout))

  def read(self, shard: int, place: FilePosition = START) -> Iterator[tuple[bytes, FilePosition]]:
    """See `Shards`."""
    yield from self._file(shard).read(place)

  def text(self, shard: int, document: int, record: bytes) -> bytes | None:
    """See `Shards`."""
    if self.held_out:
      # Multiples of the golden ratio are spread evenly, also among the rows that share a file.
      is_held_out = document * 0.6180339887498949 % 1 > 1 - self.held_out
      if is_held_out != self.is_held_out:
        return None
    return self._file(shard).text(document, record)


def find(
  root: pathlib.Path, layout: Layout = ANY, share: float | None = None
) -> tuple[dict[str, FileShards], list[pathlib.Path]]:
  """Returns the shards of a folder by split, and the files that are none.

  Without a file for validation, whole shards are held out, or documents if there is one shard.

  Args:
    root: the folder, or one file.
    layout: where the text of a document is.
    share: what is held out; None: 0.05, if no name speaks of a split.

  Raises:
    BadInput: there are no shards for train or validation.
  """
  paths = split_files.visible_files(root)
  shards = [path for path in paths if kinds.suffix(path) in kinds.FORMAT_SUFFIXES]
  if not shards:
    raise errors.BadInput(
      f'data.path={root} has no shards: expected a folder of files with one of the suffixes '
      f'{", ".join(kinds.FORMAT_SUFFIXES)}, optionally followed by .gz, .bz2, .xz, .zst or .zip'
    )
  files_by_split, _ = split_files.find(root, shards, share)
  if not files_by_split:
    files_by_split, share = {'train': shards}, share or 0.05
  by_split = {split: FileShards(tuple(files), layout) for split, files in files_by_split.items()}
  if 'validation' not in by_split:
    by_split |= _hold_out(by_split['train'], root, share)
  used = {file for split in by_split.values() for file in split.files}
  return by_split, [path for path in paths if path not in used]


def _hold_out(train: FileShards, root: pathlib.Path, share: float) -> Mapping[str, FileShards]:
  """Returns the shards of train and validation: whole files by their names, nothing is read."""
  if len(train.files) == 1:
    train = dataclasses.replace(train, held_out=share)
    return {'train': train, 'validation': dataclasses.replace(train, is_held_out=True)}
  sizes = {file: file.stat().st_size for file in train.files}
  limit = min(share * sum(sizes.values()), HELD_OUT_BYTES)
  name = lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest()
  held_out, total = [], 0
  for file in sorted(train.files, key=name)[: max(math.ceil(share * len(sizes)), 1)]:
    if total < limit:
      held_out.append(file)
      total += sizes[file]
  files = tuple(file for file in train.files if file not in held_out)
  validation = FileShards(tuple(held_out), train.layout, is_held_out=True)
  return {'train': dataclasses.replace(train, files=files), 'validation': validation}
