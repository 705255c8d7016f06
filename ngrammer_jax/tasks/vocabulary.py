"""A vocabulary of ours, as seqio knows one."""

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.tasks import tensorflow

tf, seqio = tensorflow.load()

SHIFT = 1


class TaskVocabulary(seqio.Vocabulary):
  """A vocabulary of ours, as seqio knows it: its document start ends a text.

  Ids are one more than ours (`SHIFT`): seqio takes 0 for padding, which is a token here.

  Raises BadInput for one that has no such token, or cannot write any text.
  """

  def __init__(self, vocabulary: vocabularies.Vocabulary):
    super().__init__()
    if vocabulary.document_end is None or isinstance(
      vocabulary, (vocabularies.CharacterVocabulary, vocabularies.WordVocabulary)
    ):
      kind = type(vocabulary).__name__.removesuffix('Vocabulary').lower()
      raise errors.BadInput(
        f'a vocabulary of {kind} cannot write every text and its end: fine-tuning needs a run with '
        f'data.vocabulary="sentencepiece" or "bytes"'
      )
    self.ours = vocabulary

  @property
  def bos_id(self):
    return self.ours.document_start + SHIFT

  @property
  def eos_id(self):
    return self.ours.document_end + SHIFT

  @property
  def unk_id(self):
    return SHIFT

  @property
  def _base_vocab_size(self):
    return self.ours.size + SHIFT

  def _encode(self, s):
    return (self.ours.encode(s.encode()).astype(int) + SHIFT).tolist()

  def _decode(self, ids):
    ids = [i - SHIFT for i in ids if i not in (0, self.eos_id)]
    return self.ours.decode(ids).decode(errors='replace')

  def _encode_tf(self, s):
    encode = lambda text: self.ours.encode(text).astype(np.int32) + SHIFT
    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    ids.set_shape([None])
    return ids

  def _decode_tf(self, ids):
    decode = lambda ids: self.decode(ids.tolist()).encode()
    return tf.numpy_function(decode, [ids], tf.string, stateful=False)
