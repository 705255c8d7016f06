"""Reads the documents of all splits of a corpus once, in the order of the splits."""

from collections.abc import Iterable, Iterator, Mapping
import functools
import logging
import pathlib

from ngrammer_jax.data.documents import duplicates
from ngrammer_jax.data.documents.corpus import Document
from ngrammer_jax.data.documents.held_out import InterleavedSplit


class SplitReader:
  """Reads the documents of all splits once.

  Some documents are read before their split: documents held out of the training files, and with
  `drops_duplicates` all later splits, because a training document is a duplicate if a later split
  has it. They wait in a temporary file.

  Args:
    splits: the documents of each split, train first.
    folder: folder of the temporary files.
    drops_duplicates: whether to drop training documents that are repeated, or in another split.
  """

  def __init__(
    self, splits: Mapping[str, Iterable[Document]], folder: pathlib.Path, drops_duplicates: bool
  ):
    self._splits = splits
    self._drops_duplicates = drops_duplicates
    self._waiting = {split: _WaitingDocuments(folder / f'{split}.waiting') for split in splits}
    self._sources_read: list[Iterable] = []

  def __iter__(self) -> Iterator[tuple[str, Iterator[Document]]]:
    """Yields each split and its documents; read these before the next split."""
    for split in self._splits:
      documents = self._read(split)
      if self._drops_duplicates and split == 'train':
        documents = self._distinct(documents)
      yield split, documents

  def _read(self, split: str) -> Iterator[Document]:
    """Yields the documents of a split; documents of other splits in the same files wait."""
    for other, document in self._read_source(split):
      if other == split:
        yield document
      else:
        self._waiting[other].append(document)
    yield from self._waiting[split]

  def _read_source(self, split: str) -> Iterator[tuple[str, Document]]:
    """Yields documents with their splits, from the unread files of a split."""
    documents = self._splits[split]
    source = documents
    if isinstance(documents, InterleavedSplit):
      source = documents.source
    if any(source is other for other in self._sources_read):
      return
    self._sources_read.append(source)
    if isinstance(documents, InterleavedSplit):
      yield from source
    else:
      for document in documents:
        yield split, document

  def _distinct(self, documents: Iterator[Document]) -> Iterator[Document]:
    """Yields distinct training documents that are not in other splits."""
    keys = set()
    for split in self._splits:
      if split == 'train':
        continue
      for other, document in self._read_source(split):
        self._waiting[other].append(document)
      keys |= {duplicates.key(document.read_chunks()) for document in self._waiting[split]}
    num_dropped = 0
    for document in documents:
      key = duplicates.key(document.read_chunks())
      if key in keys:
        num_dropped += 1
      else:
        keys.add(key)
        yield document
    logging.info('data.drop_duplicates: %s training documents are left out', f'{num_dropped:,}')


class _WaitingDocuments:
  """Documents in a temporary file."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._size = 0
    self._chunks: list[tuple[str, int, list[int]]] = []  # name, offset, sizes of the chunks
    self._file = None

  def append(self, document: Document) -> None:
    """Writes a document."""
    if self._file is None:
      self._file = self._path.open('wb')
    sizes = []
    for chunk in document.read_chunks():
      self._file.write(chunk)
      sizes.append(len(chunk))
    self._chunks.append((document.name, self._size, sizes))
    self._size += sum(sizes)

  def __iter__(self) -> Iterator[Document]:
    if self._file is not None:
      self._file.close()
    for name, offset, sizes in self._chunks:
      yield Document(name, functools.partial(self._read, offset, sizes))

  def _read(self, offset: int, sizes: list[int]) -> Iterator[bytes]:
    with self._path.open('rb') as file:
      file.seek(offset)
      for size in sizes:
        yield file.read(size)
