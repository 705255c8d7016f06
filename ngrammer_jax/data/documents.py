"""What is noticed about the documents of a corpus while it is tokenised in advance."""

from collections.abc import Iterable, Iterator
import dataclasses
import hashlib
import logging

from ngrammer_jax.data import corpora, text_files, vocabularies
from ngrammer_jax.data.vocabularies import tokenizer

WARN_SHARE = 0.01  # of test documents that are in the training text
# Written between documents by many who make corpora, whatever the tokenizer.
SEPARATORS = ('<|endoftext|>', '<|end_of_text|>')


def key() -> 'hashlib._Hash':
  """Returns an empty hash of the text of a document."""
  return hashlib.blake2b(digest_size=16)


def _key_of(document: text_files.Document) -> bytes:
  text_key = key()
  for chunk in document.read_chunks():
    text_key.update(chunk.strip())
  return text_key.digest()


class Overlap:
  """The share of test documents that are found verbatim in the training split.

  Args:
    corpus: the corpus; its test split is read here.
  """

  def __init__(self, corpus: corpora.Corpus):
    is_read = corpus.train_shards is None
    self._test = [_key_of(document) for document in corpus.splits.get('test', ()) if is_read]
    self._left = set(self._test)

  def add(self, split: str, document: bytes) -> None:
    """Adds the key of a document."""
    if split == 'train':
      self._left.discard(document)

  def log(self) -> None:
    """Logs the share, as a warning if it is large."""
    found = sum(document not in self._left for document in self._test)
    if self._test:
      share = found / len(self._test)
      level = logging.WARNING if share > WARN_SHARE else logging.INFO
      count = f'{found:,} of {len(self._test):,}'
      logging.log(level, '%s test documents (%.1f %%) are in train too', count, 100 * share)


@dataclasses.dataclass
class DistinctDocuments:
  """Documents without those that occurred before, or in other splits.

  Attributes:
    documents: the documents.
    others: the documents of the other splits.
    num_empty: number of empty documents in the last iteration.
  """

  documents: Iterable[text_files.Document]
  others: tuple[Iterable[text_files.Document], ...]
  num_empty: int = 0

  def __iter__(self) -> Iterator[text_files.Document]:
    seen = {_key_of(document) for others in self.others for document in others}
    num_dropped = 0
    for document in self.documents:
      if (text_key := _key_of(document)) in seen:
        num_dropped += 1
      else:
        seen.add(text_key)
        yield document
    self.num_empty = getattr(self.documents, 'num_empty', 0)
    logging.info('data.drop_duplicates: %s training documents are left out', f'{num_dropped:,}')


def without_duplicates(corpus: corpora.Corpus) -> corpora.Corpus:
  """Returns a corpus whose training documents occur once, and in no other split."""
  train, *others = corpus.splits.values()
  splits = corpus.splits | {'train': DistinctDocuments(train, tuple(others))}
  return dataclasses.replace(corpus, splits=splits)


class SpelledSeparators:
  """Counts the special tokens that a text spells: they are tokenised as words.

  Args:
    name: name of the text.
    vocabulary: its vocabulary.
  """

  def __init__(self, name: str, vocabulary: vocabularies.Vocabulary):
    own = [s for s in tokenizer.DOCUMENT_SEPARATORS if s in vocabulary.special_tokens]
    self._name, self._counts = name, dict.fromkeys((*SEPARATORS, *own), 0)

  def count(self, chunk: bytes) -> None:
    """Counts those of a part of the text."""
    for token in self._counts:
      self._counts[token] += chunk.count(token.encode())

  def log(self, split: str) -> None:
    """Logs a warning for those that occur."""
    for token, count in self._counts.items():
      if count:
        logging.warning(
          '%s, %s: %s occurs %s times, as ordinary text: if it separates documents, set '
          "data.document_separator='%s'",
          *(self._name, split, token, f'{count:,}', token),
        )
