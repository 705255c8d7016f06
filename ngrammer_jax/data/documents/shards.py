"""Shards: files of many documents, each read from any position on (see `formats`).

A corpus of shards may be too large to tokenise in advance. Opening a shard reads no other.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
import dataclasses
import functools
import hashlib
import logging
import math
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.data import formats
from ngrammer_jax.data.documents import held_out
from ngrammer_jax.data.documents.corpus import Document, DocumentCounts, Shards, whole_file
from ngrammer_jax.data.files import file_formats, split_files, text_files
from ngrammer_jax.data.formats import (
  DEFAULT_OPTIONS,
  START,
  DocumentText,
  FilePosition,
  ReadOptions,
)

HELD_OUT_BYTES = 32 << 20  # of files held out for validation, and of their text
# Multiples of the golden ratio are spread evenly, also among the rows that share a file.
GOLDEN_RATIO = 0.6180339887498949


@dataclasses.dataclass(frozen=True)
class FileShards:
  """Files of documents.

  Attributes:
    files: the file of each shard.
    options: options of reading their documents.
    held_out_share: held-out share of the documents of each file; 0: whole files, or nothing.
    is_held_out: whether these are the held-out documents or files.
  """

  files: tuple[pathlib.Path, ...]
  options: ReadOptions = DEFAULT_OPTIONS
  held_out_share: float = 0.0
  is_held_out: bool = False

  @functools.cached_property
  def _opened(self) -> dict[int, formats.DocumentFile]:
    return {}

  def _file(self, shard: int) -> formats.DocumentFile:
    """Returns the file of a shard; its format is identified once."""
    if shard not in self._opened:
      self._opened[shard] = formats.DocumentFile.open(self.files[shard], self.options)
    return self._opened[shard]

  def read(
    self, shard: int, position: FilePosition = START
  ) -> Iterator[tuple[bytes, FilePosition]]:
    """See `Shards`."""
    yield from self._file(shard).read(position)

  def text(self, shard: int, document: int, record: bytes) -> DocumentText | None:
    """See `Shards`."""
    if self.held_out_share:
      is_held_out = document * GOLDEN_RATIO % 1 > 1 - self.held_out_share
      if is_held_out != self.is_held_out:
        return None
    return self._file(shard).text(document, record)


@dataclasses.dataclass
class ShardDocuments:
  """Iterates over the documents of shards; each iteration reads the files.

  Attributes:
    shards: the shards.
    keeps_blank: whether white space is a document.
    max_bytes: stop after this much text.
    counts: counts of the documents in the last iteration.
  """

  shards: Shards
  keeps_blank: bool = False
  max_bytes: float = math.inf
  counts: DocumentCounts = dataclasses.field(default_factory=DocumentCounts)

  def __iter__(self) -> Iterator[Document]:
    self.counts = DocumentCounts()
    num_bytes = 0
    for shard, file in enumerate(self.shards.files):
      for document, (record, _) in enumerate(self.shards.read(shard)):
        parsed = self.shards.text(shard, document, record)
        if parsed is None:  # of another split
          continue
        self.counts.add(parsed)
        text = parsed.text
        if not text or not (self.keeps_blank or text.strip()):
          self.counts.empty += 1
          continue
        num_bytes += len(text)
        read = functools.partial(text_files.split_long, text)
        yield Document(f'{file}, document {document + 1:,}', read)
        if num_bytes >= self.max_bytes:
          logging.info('only the first %s bytes are read, the last of %s', f'{num_bytes:,}', file)
          return


def open_documents(
  paths: Sequence[pathlib.Path], options: ReadOptions, all_formats: Collection[str]
) -> list[Document] | ShardDocuments:
  """Returns the documents of files; if all are texts without separator, each file is one document.

  A text has no conversations, see `formats.DocumentFile.open`.

  Args:
    paths: the files.
    options: options of reading their documents.
    all_formats: formats of all files of the corpus.
  """
  are_texts = set(all_formats) == {file_formats.TEXT} and not options.is_chat
  if are_texts and options.separator is None:
    return [whole_file(path) for path in paths]
  return ShardDocuments(FileShards(tuple(paths), options))


def find(
  root: pathlib.Path, options: ReadOptions = DEFAULT_OPTIONS, share: float | None = None
) -> tuple[dict[str, FileShards], list[pathlib.Path]]:
  """Returns the shards of a folder by split, and the other files.

  Without a file for validation, whole shards are held out, or documents if there is one shard.

  Args:
    root: the folder, or one file.
    options: options of reading documents.
    share: held-out share; None: 0.05 if no name mentions a split.

  Raises:
    BadInput: there are no shards for train or validation.
  """
  paths = split_files.visible_files(root)
  suffixes = file_formats.FORMAT_SUFFIXES
  shards = [path for path in paths if file_formats.suffix(path) in suffixes]
  if not shards:
    raise errors.BadInput(
      f'data.path={root} has no shards: expected a folder of files with one of the suffixes '
      f'{", ".join(suffixes)}, optionally followed by .gz, .bz2, .xz, .zst or .zip'
    )
  files_by_split, _ = split_files.find(root, shards, share)
  if not files_by_split:
    files_by_split = {'train': shards}
    share = share or held_out.DEFAULT_SHARE
  by_split = {split: FileShards(tuple(files), options) for split, files in files_by_split.items()}
  if 'validation' not in by_split:
    train, validation = _hold_out(by_split['train'], root, share)
    by_split |= {'train': train, 'validation': validation}
  used = {file for split in by_split.values() for file in split.files}
  return by_split, [path for path in paths if path not in used]


def _hold_out(train: FileShards, root: pathlib.Path, share: float) -> tuple[FileShards, FileShards]:
  """Returns the shards of train and validation: whole files by name, without reading them."""
  if len(train.files) == 1:
    train = dataclasses.replace(train, held_out_share=share)
    return train, dataclasses.replace(train, is_held_out=True)

  def hash_name(file: pathlib.Path) -> bytes:
    return hashlib.sha256(str(file.relative_to(root)).encode()).digest()

  sizes = {file: file.stat().st_size for file in train.files}
  max_bytes = min(share * sum(sizes.values()), HELD_OUT_BYTES)
  max_files = max(math.ceil(share * len(sizes)), 1)
  chosen: list[pathlib.Path] = []
  num_bytes = 0
  for file in sorted(train.files, key=hash_name)[:max_files]:
    if num_bytes < max_bytes:
      chosen.append(file)
      num_bytes += sizes[file]
  files = tuple(file for file in train.files if file not in chosen)
  validation = FileShards(tuple(chosen), train.options, is_held_out=True)
  return dataclasses.replace(train, files=files), validation


def documents_by_split(
  shards_by_split: dict[str, Shards],
) -> dict[str, Iterable[Document]]:
  """Returns the documents of each split; a bounded part of held-out shards."""
  splits = {}
  for split, shards in shards_by_split.items():
    is_held_out = getattr(shards, 'is_held_out', False)
    max_bytes = HELD_OUT_BYTES if is_held_out else math.inf
    splits[split] = ShardDocuments(shards, keeps_blank=True, max_bytes=max_bytes)
  return splits
