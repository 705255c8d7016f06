"""The pieces of a SentencePiece model as tokens, pretrained or learned from a corpus."""

from collections.abc import Iterable, Sequence
import functools
import io
import itertools
import re

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import base

DEFAULT_SIZE = 4096
MAX_TRAINING_BYTES = 50_000_000  # maximum text size to learn a vocabulary from


class SentencePieceVocabulary(base.Vocabulary):
  """A SentencePiece model.

  Inside SentencePiece the character U+2581 stands for the space. A learned vocabulary encodes
  U+2581 itself as bytes, so it is lossless; a pretrained one keeps SentencePiece's behaviour.

  Args:
    model: the serialised model.
    learned: whether the model is from `learn_sentencepiece`; False for a pretrained one.

  Raises:
    RuntimeError: the model is invalid.
  """

  kind = 'sentencepiece'
  file = 'vocabulary.model'

  def __init__(self, model: bytes, learned: bool = False):
    import sentencepiece  # a slow import that other vocabularies do not need

    if not model:
      raise RuntimeError('an empty SentencePiece model')
    self.content = model
    self.fields = {'learned': learned}
    self.definition = (self.kind, model)
    self._learned = learned
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self.size = self._processor.vocab_size()
    special = (self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id(), 0)
    self.document_start = next(i for i in special if i >= 0)
    self.unknown = self._processor.unk_id()
    is_ambiguous = self.document_start == self.unknown
    self.document_end = None if is_ambiguous else self.document_start

  @functools.cached_property
  def _special_ids(self) -> dict[str, int]:
    """Ids of the control tokens, which no text contains, by token text."""
    ids = filter(self._processor.is_control, range(self.size))
    return {self._processor.id_to_piece(i): i for i in ids}

  @property
  def special_tokens(self) -> Sequence[str]:
    """The texts of the control tokens."""
    return tuple(self._special_ids)

  def encode(self, text: bytes, special: bool = False) -> np.ndarray:
    if special and self._special_ids:
      return self._encode_special(text.decode())
    if not self._learned:
      return np.array(self._processor.encode(text.decode()), np.int64)
    first, *others = text.decode().split(base.SPACE_MARK)
    ids = self._processor.encode(first)
    for part in others:
      ids += [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in base.SPACE_MARK.encode()]
      ids += self._processor.encode(part)
    return np.array(ids, np.int64)

  def _encode_special(self, text: str) -> np.ndarray:
    """Returns the ids of a text with control tokens read as tokens."""
    spelling = base.spelling_pattern(self.special_tokens)
    ids = []
    for i, part in enumerate(spelling.split(text)):
      if i % 2:
        ids.append([self._special_ids[part]])
      else:
        ids.append(self.encode(part.encode()))
    return np.concatenate(ids).astype(np.int64)

  def encode_all(self, texts: Sequence[bytes], special: bool = False) -> list[np.ndarray]:
    has_space_mark = any(base.SPACE_MARK.encode() in text for text in texts)
    if special or (self._learned and has_space_mark):
      return [self.encode(text, special) for text in texts]
    return self._processor.encode(list(texts), return_type='numpy')

  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    if not special:
      return self._processor.decode([int(i) for i in ids]).encode()
    text = ''
    names = {i: name for name, i in self._special_ids.items()}
    for is_special, group in itertools.groupby(ids, lambda i: int(i) in names):
      group = [int(i) for i in group]
      if is_special:
        text += ''.join(names[i] for i in group)
      else:
        text += self._processor.decode(group)
    return text.encode()

  def token_texts(self) -> tuple[list[str], list[str]]:
    pieces = [self._processor.id_to_piece(i) for i in range(self.size)]
    texts = [piece.replace(base.SPACE_MARK, ' ') for piece in pieces]
    for i in filter(self._processor.is_byte, range(self.size)):
      texts[i] = bytes([int(pieces[i][1:-1], 16)]).decode(errors='replace')  # <0x41>
    return texts, pieces


def learn_sentencepiece(texts: Iterable[bytes], size: int | None) -> SentencePieceVocabulary:
  """Learns a lossless byte-pair SentencePiece vocabulary.

  The text is not normalised, white space is kept, a newline is a separate piece, and rare
  characters are encoded as bytes. The result depends on the text alone.

  Args:
    texts: UTF-8 texts; their lines are the training sentences.
    size: number of pieces. None: DEFAULT_SIZE.

  Raises:
    BadInput: a size too small or too large for this text.
  """
  import sentencepiece

  if size is None:
    size = DEFAULT_SIZE
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=(line for t in texts for line in t.decode().split('\n') if line),
      model_writer=model,
      model_type='bpe',
      vocab_size=size,
      normalization_rule_name='identity',
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      allow_whitespace_only_pieces=True,
      byte_fallback=True,
      user_defined_symbols=['\n'],
      character_coverage=0.9999,
      max_sentence_length=1 << 20,
      unk_id=0,
      bos_id=1,
      eos_id=-1,
      pad_id=-1,
      minloglevel=2,
    )
  except RuntimeError as error:
    reason = re.sub(r' Increase vocab_size.*', '', ' '.join(str(error).split('] ')[-1].split()))
    raise errors.BadInput(
      f'data.vocabulary_size={size} does not fit this text: {reason}'
    ) from error
  return SentencePieceVocabulary(model.getvalue(), learned=True)
