"""Hashes of documents, to find duplicates."""

from collections.abc import Callable, Iterable
import contextlib
import hashlib

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.documents.corpus import Document

SHORT_KEY = 8  # bytes of a key, enough to count copies; to drop one, the whole key decides
COMPARED_BYTES = 16 << 20  # of a streamed training text


class DocumentKey:
  """A hash of the text of a document without surrounding white space, chunk by chunk."""

  def __init__(self):
    self._digest = hashlib.blake2b(digest_size=16)

  def update(self, chunk: bytes) -> None:
    """Adds a chunk of the document."""
    self._digest.update(chunk.strip())

  def digest(self) -> bytes:
    """Returns the hash of all chunks."""
    return self._digest.digest()


def key(chunks: Iterable[bytes]) -> bytes:
  """Returns the hash of a document, see `DocumentKey`."""
  document_key = DocumentKey()
  for chunk in chunks:
    document_key.update(chunk)
  return document_key.digest()


def sample_keys(
  documents: Iterable[Document], read: Callable[[Iterable[bytes]], Iterable[bytes]]
) -> bytes:
  """Returns short keys of the documents in the first COMPARED_BYTES, one after another.

  Args:
    documents: the documents.
    read: yields the chunks of a document, and shows the progress.
  """
  keys = bytearray()
  size = 0
  with contextlib.suppress(errors.BadInput):  # training reports the damage
    for document in documents:
      chunks = list(read(document.read_chunks()))
      keys += key(chunks)[:SHORT_KEY]
      size += sum(map(len, chunks))
      if size >= COMPARED_BYTES:
        break
  return bytes(keys)


def is_in(keys: np.ndarray, sorted_keys: np.ndarray) -> np.ndarray:
  """Returns whether each short key is among sorted ones."""
  return np.searchsorted(sorted_keys, keys, 'right') > np.searchsorted(sorted_keys, keys)
