"""Documents that occur twice, and separators that a text spells."""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import hashlib
import logging

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import corpora, text_files, vocabularies
from ngrammer_jax.data.vocabularies import tokenizer

SHORT_KEY = 8  # bytes of a key that are kept to count copies; to drop one, the whole key decides
COMPARED_BYTES = 16 << 20  # of a training text that is tokenised during training
# Written between documents by many who make corpora, whatever the tokenizer.
SEPARATORS = ('<|endoftext|>', '<|end_of_text|>')


def key(chunks: Iterable[bytes]) -> bytes:
  """Returns a hash of the text of a document, without the white space around it."""
  digest = hashlib.blake2b(digest_size=16)
  for chunk in chunks:
    digest.update(chunk.strip())
  return digest.digest()


def sample_keys(documents: Iterable[text_files.Document]) -> bytes:
  """Returns short keys of the documents in the first COMPARED_BYTES, one after another."""
  keys, size = bytearray(), 0
  with contextlib.suppress(errors.BadInput):  # the training reports what is damaged
    for document in documents:
      keys += key(chunks := [*document.read_chunks()])[:SHORT_KEY]
      size += sum(map(len, chunks))
      if size >= COMPARED_BYTES:
        break
  return bytes(keys)


@dataclasses.dataclass
class DistinctDocuments:
  """Documents without those that occurred before, or in other splits.

  Attributes:
    documents: the documents.
    others: the documents of the other splits.
  """

  documents: Iterable[text_files.Document]
  others: tuple[Iterable[text_files.Document], ...]

  def __iter__(self) -> Iterator[text_files.Document]:
    keys = {key(document.read_chunks()) for others in self.others for document in others}
    num_dropped = 0
    for document in self.documents:
      if (text_key := key(document.read_chunks())) in keys:
        num_dropped += 1
      else:
        keys.add(text_key)
        yield document
    logging.info('data.drop_duplicates: %s training documents are left out', f'{num_dropped:,}')


def drop_duplicates(config: data_config.DataConfig, corpus: corpora.Corpus) -> corpora.Corpus:
  """Returns a corpus whose training documents occur once, and in no other split, if it says so."""
  if not config.drop_duplicates:
    return corpus
  train, *others = corpus.splits.values()
  splits = corpus.splits | {'train': DistinctDocuments(train, tuple(others))}
  return dataclasses.replace(corpus, splits=splits)


def separators(vocabulary: vocabularies.Vocabulary) -> list[str]:
  """Returns the spellings that may separate documents of a text."""
  special_tokens = [s for s in tokenizer.DOCUMENT_SEPARATORS if s in vocabulary.special_tokens]
  return [*dict.fromkeys((*SEPARATORS, *special_tokens))]


def log_separators(name: str, counts: Mapping[str, int]) -> None:
  """Logs a warning for those of `separators` that a text spells: they are tokenised as words.

  Args:
    name: of the text.
    counts: how often it has each of them.
  """
  for token, count in counts.items():
    if count:
      logging.warning(
        f'{name}: {token} occurs {count:,} times, as ordinary text: if it separates documents, set '
        f"data.document_separator='{token}'"
      )
