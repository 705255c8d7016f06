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
from ngrammer_jax.data.tokens import document_encoder
from ngrammer_jax.data.vocabularies import tokenizer

REMEDY = 'convert it, or use data.vocabulary=bytes'  # for text that is not UTF-8
# Written between documents by many who make corpora, whatever the tokenizer.
SEPARATORS = ('<|endoftext|>', '<|end_of_text|>')


class TokenFiles:
  """The files of the tokens of a split.

  Args:
    tokens: file of the ids, raw unsigned integers.
    dtype: their type.
    counts: file of the loss mask, a byte per token. None: all tokens have a loss.

  Attributes:
    num_tokens: number of tokens written.
    num_counted: number of tokens with loss.
  """

  def __init__(self, tokens: BinaryIO, dtype: np.dtype, counts: BinaryIO | None = None):
    self._tokens = tokens
    self._dtype = dtype
    self._counts = counts
    self.num_tokens = 0
    self.num_counted = 0

  def write(self, ids: np.ndarray, counts: np.ndarray | None = None) -> None:
    """Appends tokens. Without `counts`, they have no loss if the file has a loss mask."""
    self._tokens.write(ids.astype(self._dtype).tobytes())
    self.num_tokens += len(ids)
    if self._counts is None:
      self.num_counted += len(ids)
      return
    if counts is None:
      counts = np.zeros(len(ids), bool)
    self._counts.write(counts.astype(np.uint8).tobytes())
    self.num_counted += int(counts.sum())


def token_dtype(vocabulary: vocabularies.Vocabulary) -> np.dtype:
  """Returns the integer type of the ids of a vocabulary."""
  if vocabulary.size <= 2**16:
    return np.dtype(np.uint16)
  return np.dtype(np.uint32)


class WrittenSplit(NamedTuple):
  """The data of a written split besides its tokens.

  Attributes:
    starts: for each document, the index of its first token.
    keys: a short hash of each document, uint64.
    meta: the entry of the split in meta.json.
  """

  starts: np.ndarray
  keys: np.ndarray
  meta: dict[str, Any]


def read_chunks(document: Document, encoding: str, remedy: str = REMEDY) -> Iterator[bytes]:
  """Yields the chunks of a document. Raises BadInput if it must be UTF-8 but is not."""
  offset = 0
  for chunk in document.read_chunks():
    if encoding == 'utf-8':
      text_files.decode(chunk, document.name, remedy, offset)
    offset += len(chunk)
    yield chunk


def write(
  name: str,
  documents: Iterable[Document],
  encoder: document_encoder.DocumentEncoder,
  separator: Sequence[int],
  files: TokenFiles,
  on_chunk: Callable[[bytes], None] | None = None,
  remedy: str = REMEDY,
) -> WrittenSplit:
  """Writes the tokens of documents and their separators to files.

  Args:
    name: name of the documents in the log.
    documents: the documents; each is read once.
    encoder: encoder of the documents.
    separator: tokens between two documents.
    files: files for the tokens.
    on_chunk: called with each chunk of the text.
    remedy: remedy for text that is not UTF-8.

  Raises:
    BadInput: text outside the vocabulary, or rejected by the encoder.
  """
  vocabulary = encoder.vocabulary
  starts = array.array('q')
  keys = bytearray()
  text_bytes = 0
  is_lossless = encoder.is_text
  spelled: dict[str, int] = {}
  if encoder.is_text:
    spelled = dict.fromkeys(_separators(vocabulary), 0)
  for document in documents:
    if starts:
      files.write(np.array(separator, np.int64))
    starts.append(files.num_tokens)
    key = duplicates.DocumentKey()
    chunks = read_chunks(document, vocabulary.encoding, remedy)
    if not encoder.is_text:
      chunks = [b''.join(chunks)]
    for chunk in chunks:
      if on_chunk is not None:
        on_chunk(chunk)
      key.update(chunk)
      for token in spelled:
        spelled[token] += chunk.count(token.encode())
      with errors.named(document.name):
        (encoded,) = encoder.encode_all([encoder.prepare(chunk)])
      is_lossless = is_lossless and vocabulary.decode(encoded.ids) == chunk
      text_bytes += encoded.num_bytes
      files.write(encoded.ids, encoded.counts)
    keys += key.digest()[: duplicates.SHORT_KEY]
  _log_separators(name, spelled)
  meta = {
    'tokens': files.num_tokens,
    'bytes': text_bytes,
    'documents': len(starts),
    'lossless': is_lossless,
    'dtype': token_dtype(vocabulary).name,
  }
  if encoder.has_counts:
    meta['counted'] = files.num_counted
  return WrittenSplit(np.array(starts, np.int64), np.frombuffer(bytes(keys), np.uint64), meta)


def _separators(vocabulary: vocabularies.Vocabulary) -> list[str]:
  """Returns the possible separators of documents in a text."""
  special_tokens = [s for s in tokenizer.DOCUMENT_SEPARATORS if s in vocabulary.special_tokens]
  return list(dict.fromkeys((*SEPARATORS, *special_tokens)))


def _log_separators(name: str, counts: dict[str, int]) -> None:
  """Logs a warning for separators in a text, which are tokenised as words."""
  for token, count in counts.items():
    if count:
      logging.warning(
        f'{name}: {token} occurs {count:,} times, as ordinary text: if it separates documents, set '
        f"data.document_separator='{token}'"
      )
