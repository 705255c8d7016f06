"""A corpus on disk: its files, its documents by split, and shards of documents."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import pathlib
from typing import Any, Protocol

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.files import buckets, text_files
from ngrammer_jax.data.formats.interface import START, DocumentText, FilePosition
from ngrammer_jax.system import files

# The keys of a config that decide on its text, beside the files.
KEYS = (
  'newlines',
  'text_field',
  'document_separator',
  'validation_share',
  'begin_of_text',
  'drop_duplicates',
)


@dataclasses.dataclass(frozen=True)
class Document:
  """A document of a corpus.

  Attributes:
    name: the file, with the part in files of several documents.
    read_chunks: yields the bytes in chunks; may be called any number of times.
  """

  name: str
  read_chunks: Callable[[], Iterator[bytes]]


@dataclasses.dataclass
class DocumentCounts:
  """Counts of omitted and changed documents.

  Attributes:
    empty: number of empty (omitted) documents.
    null: number of null values among them.
    replaced: number of halves of UTF-16 characters replaced by U+FFFD.
  """

  empty: int = 0
  null: int = 0
  replaced: int = 0

  def add(self, document: DocumentText) -> None:
    """Counts a document."""
    self.null += document.is_null
    self.replaced += document.num_replaced

  def warnings(self) -> list[str]:
    """Returns warnings about the documents."""
    messages = []
    if self.null:
      messages.append(
        f'{self.null:,} documents are null in the file, and skipped as empty ones: if the text is '
        f'in another field, set data.text_field'
      )
    if self.replaced:
      messages.append(
        f'{self.replaced:,} halves of UTF-16 characters (lone surrogates) are replaced by U+FFFD'
      )
    return messages


def counts_of(documents: Iterable[Document]) -> DocumentCounts:
  """Returns the counts of documents in their last iteration; empty for files of one document."""
  return getattr(documents, 'counts', DocumentCounts())


def whole_file(path: pathlib.Path) -> Document:
  """Returns a file as one document."""
  return Document(str(path), functools.partial(text_files.read_chunks, path))


class Shards(Protocol):
  """The shards of a split: files of many documents.

  Attributes:
    files: the file of each shard.
  """

  files: tuple[pathlib.Path, ...]

  def read(
    self, shard: int, position: FilePosition = START
  ) -> Iterator[tuple[bytes, FilePosition]]:
    """Yields the record of each document from a position on, and the position of the next one.

    The position was yielded by this method, or is the first one.
    """

  def text(self, shard: int, document: int, record: bytes) -> DocumentText | None:
    """Returns the text of a document; None for another split.

    Raises BadInput if its record is invalid.
    """


def _has_no_checksum() -> None:
  """Accepts the files of a corpus without published checksums."""


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus on disk.

  Attributes:
    name: name of the corpus.
    files: its files.
    splits: the documents of each split.
    encoding: encoding of the characters of a character vocabulary, see `Vocabulary`.
    is_altered: the documents are not the raw text of the files, so bits per byte are undefined.
    verify: checks the files against published checksums, if any.
    train_shards: shards of the training split, if it is streamed: tokenised during training.
    is_sectioned: the documents are sections of one text, each of whole lines. If the vocabulary's
      line end is also its document start, no further token separates them.
    first_sizes: sizes at the start of the run of shards damaged since then, by number and name. A
      repaired file must not change the hash of the corpus.
    files_by_split: the files of each split, as a JSON value, if not clear from `files`.
  """

  name: str
  files: tuple[pathlib.Path, ...]
  splits: dict[str, Iterable[Document]]
  encoding: str = 'utf-8'
  is_altered: bool = False
  verify: Callable[[], None] = _has_no_checksum
  train_shards: Shards | None = None
  is_sectioned: bool = False
  first_sizes: Mapping[tuple[int, str], int] = dataclasses.field(default_factory=dict)
  files_by_split: Any = None

  def identity(self, config: data_config.DataConfig) -> list[Any]:
    """Returns the identity of the text: files with sizes, times and splits, and keys; for JSON."""
    stamps = [_stamp(path) for path in self.files]
    sizes = sorted(self.first_sizes.items())
    keys = [getattr(config, key) for key in KEYS]
    if config.chat:
      keys += [config.chat, config.loss_on]
    return [self.name, stamps, sizes, self.files_by_split, keys]

  def too_little_text(self, split: str, counts: DocumentCounts) -> errors.BadInput:
    """Returns the error of a split without text, for documents with these counts."""
    problem = f'the {split} split of {self.name} is empty'
    if counts.empty:
      kind = 'null' if counts.null == counts.empty else 'without text'
      return errors.BadInput(
        f'{problem}: its {counts.empty:,} documents, the first in {self.files[0]}, are {kind}: set '
        f'data.text_field to the name of the field with the text'
      )
    return errors.BadInput(f'{problem}: {self.files[0]} holds too little text')


def _stamp(path: pathlib.Path) -> tuple[str, int, str | int]:
  """Returns the path of a file, its size, and its version."""
  if isinstance(path, pathlib.Path):
    return str(path.resolve()), files.size(path), path.stat().st_mtime_ns
  if isinstance(path, buckets.BucketFile):
    return str(path), files.size(path), path.version
  return str(path), files.size(path), path.stat().mtime  # C4 in a bucket
