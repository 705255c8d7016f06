"""The bytes of a text as tokens."""

from collections.abc import Iterable

import numpy as np

from ngrammer_jax.data.vocabularies import base


class ByteVocabulary(base.Vocabulary):
  """The 256 byte values as ids, and id 256 as the document start."""

  kind = 'bytes'
  fields = {}
  encoding = 'bytes'
  size = 257
  document_start = 256
  document_end = 256
  definition = ('bytes',)

  def encode(self, text: bytes, special: bool = False) -> np.ndarray:
    return np.frombuffer(text, np.uint8)

  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()
