"""The characters of a corpus as tokens."""

from collections.abc import Iterable

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import base


class CharacterVocabulary(base.Vocabulary):
  """The characters of a corpus, sorted by code point.

  Args:
    characters: the characters, sorted.
    encoding: encoding of the text, utf-8 or latin-1.
    separated: whether the corpus has several documents. If so, the document start is an additional
      id. Otherwise it is the newline or space, for the vocabulary sizes of the literature.

  """

  kind = 'characters'

  def __init__(self, characters: str, encoding: str, separated: bool):
    if not isinstance(separated, bool):  # of a damaged file
      raise TypeError(f'separated={separated!r} must be true or false')
    self.fields = {'characters': characters, 'encoding': encoding, 'separated': separated}
    self.encoding = encoding
    codes = np.array([ord(c) for c in characters], '<u4')
    # If each character is a byte, texts are not converted to code points.
    self._are_bytes = encoding == 'latin-1' or codes.max(initial=0) < 128
    self._codes = codes.astype(np.uint8) if self._are_bytes else codes
    # Ids by code point. The last entry stands for all higher code points.
    self._ids = np.full(codes.max(initial=0) + 2, -1, np.int32)
    self._ids[codes] = np.arange(len(characters))
    self.num_characters = len(characters)
    if separated:
      self.size = len(characters) + 1
      self.document_start = len(characters)
      self.document_end = self.document_start
    else:
      self.size = len(characters)
      self.document_start = _find_separator(characters)
      self.document_end = None
    self.definition = ('characters', characters, separated)

  def encode(self, text: bytes, special: bool = False) -> np.ndarray:
    """Returns the ids of a text. Raises BadInput for a character outside the vocabulary."""
    codes = code_points(text, self.encoding)
    ids = self._ids.take(codes, mode='clip')
    if ids.min(initial=0) < 0:
      unknown = codes[np.argmax(ids < 0)]
      raise errors.BadInput(
        f'{chr(unknown)!r} is not among the {self.num_characters} known characters'
      )
    return ids

  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    if not isinstance(ids, np.ndarray):
      ids = list(ids)
    ids = np.asarray(ids, np.int32)
    text = self._codes[ids[ids < self.num_characters]].tobytes()
    if self._are_bytes:
      return text
    return text.decode('utf-32-le').encode(self.encoding)


def _find_separator(characters: str) -> int:
  """Returns the id of the newline, of the space without one, or 0 without both."""
  for separator in '\n ':
    if separator in characters:
      return characters.index(separator)
  return 0


def code_points(text: bytes, encoding: str) -> np.ndarray:
  """Returns the code points of a text, unsigned integers."""
  if encoding == 'latin-1' or text.isascii():  # a byte for each character
    return np.frombuffer(text, np.uint8)
  return np.frombuffer(text.decode(encoding).encode('utf-32-le'), '<u4')


def learn_characters(texts: Iterable[bytes], encoding: str, separated: bool) -> CharacterVocabulary:
  """Returns the vocabulary of all characters in the texts."""
  codes: set[int] = set()
  for text in texts:
    codes.update(np.flatnonzero(np.bincount(code_points(text, encoding))).tolist())
  return CharacterVocabulary(''.join(map(chr, sorted(codes))), encoding, separated)
