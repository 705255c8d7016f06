"""Interface of all vocabularies: text to token ids and back."""

import abc
from collections.abc import Iterable, Sequence
import functools
import hashlib
import json
import pathlib
import re
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.system import files

SPACE_MARK = '\u2581'  # the space inside the pieces of SentencePiece


@functools.lru_cache(maxsize=8)
def spelling_pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
  """Returns a pattern with one group for the longest of several token texts."""
  longest_first = sorted(tokens, key=len, reverse=True)
  alternatives = '|'.join(map(re.escape, longest_first))
  if not alternatives:
    alternatives = '(?!)'  # matches nothing
  return re.compile(f'({alternatives})')


class Vocabulary(abc.ABC):
  """A vocabulary.

  Attributes:
    kind: the value of `data.vocabulary`.
    file: name of a second file for `content` beside vocabulary.json; None: no second file.
    fields: the other arguments of the class, stored in vocabulary.json.
    encoding: encoding of the input text; latin-1: each byte is a character; bytes: any bytes.
    size: number of ids.
    document_start: id between documents and before the very first token.
    document_end: id at the end of a document; None if the document start also occurs inside
      documents.
    adds_start: whether scored or continued texts begin with the document start.
    line_end: id of the line end; None if it is not a separate word.
    unknown: id of text that is not in the vocabulary; None if there is no such id.
    num_characters: number of character ids, the lowest ids; None if tokens are not characters.
    special_tokens: the texts of the special tokens.
    definition: equal if and only if all ids have the same meaning.
  """

  kind: str
  file: str | None = None
  content: bytes
  fields: dict[str, Any]
  encoding: str = 'utf-8'
  size: int
  document_start: int
  document_end: int | None
  adds_start: bool = True
  line_end: int | None = None
  unknown: int | None = None
  num_characters: int | None = None
  special_tokens: Sequence[str] = ()
  definition: tuple[Any, ...]

  @property
  def end_tokens(self) -> tuple[int, ...]:
    """Ids at which a generated text ends."""
    return () if self.document_end is None else (self.document_end,)

  def separator(self, begins: bool = False) -> list[int]:
    """Returns the ids between two documents: the document start, or end and start with `begins`.

    Raises:
      BadInput: `begins` without separate begin and end tokens.
    """
    if begins and self.document_end in (None, self.document_start):
      raise errors.BadInput(
        'data.begin_of_text=True needs a vocabulary with a begin token and another end token: the '
        'folder of a published model that has them, as data.vocabulary_path'
      )
    if begins:
      return [self.document_end, self.document_start]
    return [self.document_start]

  def add_start(self, ids: np.ndarray) -> np.ndarray:
    """Returns the ids of a text, after the document start if the model reads one.

    An empty text always has a document start, because a model must read something. A text that
    already begins with this special token gets no second one.
    """
    if not len(ids):
      return np.insert(ids, 0, self.document_start)
    if self.adds_start and not self.begins_with_start(ids):
      return np.insert(ids, 0, self.document_start)
    return ids

  def begins_with_start(self, ids: np.ndarray) -> bool:
    """Whether a text begins with the document start as a special token.

    Without special tokens, the document start can be a word of a text, such as a newline.
    """
    return bool(self.special_tokens) and len(ids) > 0 and ids[0] == self.document_start

  @abc.abstractmethod
  def encode(self, text: bytes, special: bool = False) -> np.ndarray:
    """Returns the ids of a text.

    Args:
      text: the text.
      special: whether the text of a special token is read as the token. False: as ordinary text.
    """

  @abc.abstractmethod
  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    """Returns the text of ids.

    Args:
      ids: the ids.
      special: whether special tokens are included in the text.
    """

  def _files(self) -> dict[str, bytes]:
    """Returns the content of each file for `save`."""
    text = json.dumps({'kind': self.kind, **self.fields}, ensure_ascii=False)
    contents = {'vocabulary.json': text.encode()}
    if self.file is not None:
      contents[self.file] = self.content
    return contents

  @property
  def digest(self) -> str:
    """Hash of the files written by `save`."""
    return hashlib.sha256(b''.join(self._files().values())).hexdigest()

  def save(self, folder: pathlib.Path) -> None:
    """Writes the files for `vocabularies.load`."""
    for name, content in self._files().items():
      files.write(folder / name, content)

  def encode_all(self, texts: Sequence[bytes], special: bool = False) -> list[np.ndarray]:
    """Returns the ids of each text, with a thread for each core if the vocabulary supports it.

    Args:
      texts: the texts, valid in the encoding of the vocabulary.
      special: see `encode`.
    """
    return [self.encode(text, special) for text in texts]

  def token_texts(self) -> tuple[list[str], list[str]]:
    """Returns the text of every token id, and the token in the notation of the vocabulary.

    The text of a piece of a UTF-8 character contains U+FFFD. A space before a word belongs to the
    text. The text of a special token is its name.
    """
    tokens = [self.decode([i]) for i in range(self.size)]
    return [t.decode(errors='replace') for t in tokens], [f'<0x{t.hex().upper()}>' for t in tokens]
