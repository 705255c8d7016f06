"""Adapter from vocabularies of this package to seqio."""

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.tasks import tensorflow

tf, seqio = tensorflow.load()

ID_OFFSET = 1  # id in seqio minus id in the vocabulary


class TaskVocabulary(seqio.Vocabulary):
  """A vocabulary as a seqio vocabulary. Its document end is the end-of-sequence token.

  All ids are larger by ID_OFFSET: seqio uses 0 for padding, but 0 is a token of the vocabulary.

  Args:
    vocabulary: the vocabulary to wrap.

  Raises:
    BadInput: the vocabulary has no document end, or cannot encode every text.
  """

  def __init__(self, vocabulary: vocabularies.Vocabulary):
    super().__init__()
    # Words have no document end.
    if vocabulary.document_end is None or vocabulary.num_characters is not None:
      kind = type(vocabulary).__name__.removesuffix('Vocabulary').lower()
      raise errors.BadInput(
        f'a {kind} vocabulary cannot encode every text and its end: fine-tuning needs a run with '
        f'data.vocabulary="sentencepiece" or "bytes"'
      )
    self.vocabulary = vocabulary

  @property
  def bos_id(self):
    return self.vocabulary.document_start + ID_OFFSET

  @property
  def eos_id(self):
    return self.vocabulary.document_end + ID_OFFSET

  @property
  def unk_id(self):
    return ID_OFFSET

  @property
  def _base_vocab_size(self):
    return self.vocabulary.size + ID_OFFSET

  def _encode(self, s: str) -> list[int]:
    return (self.vocabulary.encode(s.encode(), special=False).astype(int) + ID_OFFSET).tolist()

  def _decode(self, ids: list[int]) -> str:
    ids = [i - ID_OFFSET for i in ids if i not in (0, self.eos_id)]
    return self.vocabulary.decode(ids).decode(errors='replace')

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text: bytes) -> np.ndarray:
      return self.vocabulary.encode(text, special=False).astype(np.int32) + ID_OFFSET

    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    ids.set_shape([None])
    return ids

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(ids: np.ndarray) -> bytes:
      return self.decode(ids.tolist()).encode()

    return tf.numpy_function(decode, [ids], tf.string, stateful=False)
