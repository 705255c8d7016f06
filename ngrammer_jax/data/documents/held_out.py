"""Holds out validation and test documents from a training text without files for them."""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools

from ngrammer_jax.data.documents.corpus import Document, DocumentCounts, counts_of
from ngrammer_jax.data.files import text_files
from ngrammer_jax.data.files.split_files import SPLITS

Splits = dict[str, Iterable[Document]]
DEFAULT_SHARE = 0.05  # of the training text, for each held-out split


def split_of(number: int, period: int, splits: Sequence[str]) -> str:
  """Returns the split of a document.

  A period is divided into equal parts, one for each held-out split; the last document of each part
  is held out.

  Args:
    number: number of the document.
    period: each held-out split has one document per period.
    splits: train, and the held-out splits.
  """
  index = number % period
  num_held_out = len(splits) - 1
  for i in range(num_held_out):
    if index == period * (i + 1) // num_held_out - 1:
      return splits[i + 1]
  return 'train'


@dataclasses.dataclass(frozen=True)
class InterleavedDocuments:
  """Documents of several splits in the same files.

  Attributes:
    documents: the documents of all splits.
    period, splits: select the held-out documents, see `split_of`.
  """

  documents: Iterable[Document]
  period: int
  splits: Sequence[str]

  def __iter__(self) -> Iterator[tuple[str, Document]]:
    """Yields each document with its split."""
    for number, document in enumerate(self.documents):
      yield split_of(number, self.period, self.splits), document


@dataclasses.dataclass(frozen=True)
class InterleavedSplit:
  """The documents of one split of `InterleavedDocuments`."""

  source: InterleavedDocuments
  split: str

  def __iter__(self) -> Iterator[Document]:
    for split, document in self.source:
      if split == self.split:
        yield document

  @property
  def counts(self) -> DocumentCounts:
    """Counts of the documents of all splits in the last iteration; counted in train."""
    if self.split != 'train':
      return DocumentCounts()
    return counts_of(self.source.documents)


def hold_out(
  documents: Iterable[Document], share: float = DEFAULT_SHARE, splits: Sequence[str] = SPLITS
) -> Splits:
  """Divides documents among splits. Returns the documents of each split.

  Args:
    documents: a list of whole files, or documents read from their files in each iteration.
    share: share of the documents (or of each of a few files) for each split but the first.
    splits: train, and the held-out splits.
  """
  period = max(round(1 / share), len(splits))
  if not isinstance(documents, list):
    source = InterleavedDocuments(documents, period, splits)
    return {split: InterleavedSplit(source, split) for split in splits}
  if len(documents) >= period:
    by_split: dict[str, list[Document]] = {split: [] for split in splits}
    for number, document in enumerate(documents):
      by_split[split_of(number, period, splits)].append(document)
    return by_split
  # Too few documents to use whole ones for validation and test: the end of each is held out.
  divided = [DividedText(document, share, len(splits)) for document in documents]
  return {split: [text.part(i) for text in divided] for i, split in enumerate(splits)}


@dataclasses.dataclass(frozen=True)
class DividedText:
  """A text with a held-out end.

  Attributes:
    document: the text.
    share: share of the text for each part but the first.
    num_parts: number of parts.
  """

  document: Document
  share: float
  num_parts: int

  def part(self, index: int) -> Document:
    """Returns a part as a document."""
    return Document(self.document.name, functools.partial(self._read_part, index))

  def _read_part(self, index: int) -> Iterator[bytes]:
    boundaries = self._boundaries
    return text_files.byte_range(
      self.document.read_chunks(), boundaries[index], boundaries[index + 1]
    )

  @functools.cached_property
  def _boundaries(self) -> list[int]:
    """The start of each part, and the end of the last one."""
    size = sum(map(len, self.document.read_chunks()))
    boundaries = [0]
    for num_left in range(self.num_parts - 1, 0, -1):
      target = int((1 - self.share * num_left) * size)
      boundaries.append(_find_boundary(self.document.read_chunks(), target, size))
    return [*boundaries, size]


def _find_boundary(chunks: Iterable[bytes], target: int, size: int) -> int:
  """Returns the first line end after `target`, else word end, else character end."""
  offset = 0
  for chunk in chunks:
    if offset + len(chunk) > target:
      start = target - offset
      stop = start + max(size // 40, 1)  # a later boundary could leave the next split empty
      line = chunk.find(b'\n', max(start - 1, 0), stop) + 1
      word = chunk.find(b' ', max(start - 1, 0), stop) + 1
      indices = range(start, len(chunk))
      character = next((i for i in indices if chunk[i] & 0xC0 != 0x80), len(chunk))
      return offset + (line or word or character)
    offset += len(chunk)
  return size
