"""Tokenises the documents of a split into a file of raw unsigned integers."""

import array
from collections.abc import Callable, Iterable, Iterator, Sequence
import logging
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import duplicates
from ngrammer_jax.data.documents.corpus import Document
from ngrammer_jax.data.files import text_files
from ngrammer_jax.data.vocabularies import tokenizer

REMEDY = 'convert it, or use data.vocabulary=bytes'  # for text that is not UTF-8
# Written between documents by many who make corpora, whatever the tokenizer.
SEPARATORS = ('<|endoftext|>', '<|end_of_text|>')


class WrittenSplit(NamedTuple):
  """What was written of a split, beside its tokens.

  Attributes:
    starts: for each document, the index of its first token.
    keys: a short hash of each document, uint64.
    meta: the entry of the split in meta.json.
  """

  starts: np.ndarray
  keys: np.ndarray
  meta: dict[str, Any]


def read_chunks(document: Document, encoding: str, remedy: str = REMEDY) -> Iterator[bytes]:
  """Yields the chunks of a document. Raises BadInput if it has to be UTF-8 and is not."""
  offset = 0
  for chunk in document.read_chunks():
    if encoding == 'utf-8':
      text_files.decode(chunk, document.name, remedy, offset)
    offset += len(chunk)
    yield chunk


def write(
  name: str,
  documents: Iterable[Document],
  vocabulary: vocabularies.Vocabulary,
  separator: Sequence[int],
  file: BinaryIO,
  on_chunk: Callable[[bytes], None] | None = None,
  remedy: str = REMEDY,
) -> WrittenSplit:
  """Writes the tokens of documents and their separators to a file.

  Args:
    name: of the documents, for the log.
    documents: the documents; each is read once.
    vocabulary: tokenises them.
    separator: tokens between two documents.
    file: where the tokens are written.
    on_chunk: is called with each chunk of the text.
    remedy: what to do about text that is not UTF-8.

  Raises:
    BadInput: the text of a document is not in the vocabulary.
  """
  dtype = np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)
  starts = array.array('q')
  keys = bytearray()
  text_bytes = 0
  is_lossless = True
  spelled = dict.fromkeys(_separators(vocabulary), 0)
  for document in documents:
    if starts:
      file.write(np.array(separator, dtype).tobytes())
    starts.append(file.tell() // dtype.itemsize)
    key = duplicates.DocumentKey()
    for chunk in read_chunks(document, vocabulary.encoding, remedy):
      if on_chunk is not None:
        on_chunk(chunk)
      key.update(chunk)
      for token in spelled:
        spelled[token] += chunk.count(token.encode())
      with errors.named(document.name):
        ids = vocabulary.encode(chunk, special=False)
      is_lossless = is_lossless and vocabulary.decode(ids) == chunk
      text_bytes += len(chunk)
      file.write(ids.astype(dtype).tobytes())
    keys += key.digest()[: duplicates.SHORT_KEY]
  _log_separators(name, spelled)
  meta = {
    'tokens': file.tell() // dtype.itemsize,
    'bytes': text_bytes,
    'documents': len(starts),
    'lossless': is_lossless,
    'dtype': dtype.name,
  }
  return WrittenSplit(np.array(starts, np.int64), np.frombuffer(bytes(keys), np.uint64), meta)


def _separators(vocabulary: vocabularies.Vocabulary) -> list[str]:
  """Returns the spellings that may separate documents of a text."""
  special_tokens = [s for s in tokenizer.DOCUMENT_SEPARATORS if s in vocabulary.special_tokens]
  return list(dict.fromkeys((*SEPARATORS, *special_tokens)))


def _log_separators(name: str, counts: dict[str, int]) -> None:
  """Logs a warning for the separators that a text spells: they are tokenised as words."""
  for token, count in counts.items():
    if count:
      logging.warning(
        f'{name}: {token} occurs {count:,} times, as ordinary text: if it separates documents, set '
        f"data.document_separator='{token}'"
      )
