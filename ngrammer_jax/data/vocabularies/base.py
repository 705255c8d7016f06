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
  """Returns a pattern, with one group, of the spellings of tokens: of several the longest."""
  longest_first = sorted(tokens, key=len, reverse=True)
  alternatives = '|'.join(map(re.escape, longest_first))
  if not alternatives:
    alternatives = '(?!)'  # matches nothing
  return re.compile(f'({alternatives})')


class Vocabulary(abc.ABC):
  """A vocabulary.

  Attributes:
    kind: the value of `data.vocabulary`.
    file: name of a further file beside vocabulary.json, with `content`; None: there is none.
    fields: the other arguments of the class, which vocabulary.json has.
    encoding: encoding of the text that it reads; latin-1: each byte is a character; bytes: text is
      any bytes.
    size: number of ids.
    document_start: id between documents and before the very first token.
    document_end: id that ends a document; None if the document start also occurs inside documents.
    adds_start: whether a text that is scored or continued begins with the document start.
    line_end: id of the end of a line; None if that is not a separate word.
    unknown: id of text that is not in the vocabulary; None if there is no such id.
    num_characters: number of ids that are a character each, the lowest ids; None if the tokens are
      not characters.
    special_tokens: the spellings of the special tokens.
    definition: what determines the text of each id; equal if and only if all ids mean the same.
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
    """Returns the ids between two documents: the document start, or end and start if it `begins`.

    Raises:
      BadInput: it begins, but the vocabulary has no begin token and another end token.
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
    """Returns the ids of a text after the document start, if the model reads one first.

    An empty text always has it: a model has to read something. A text that begins with the
    spelling of this token, read as a special token, is not given another one.
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
      special: whether the spelling of a special token in it is that token. False: it is ordinary
        text.
    """

  @abc.abstractmethod
  def decode(self, ids: Iterable[int], special: bool = False) -> bytes:
    """Returns the text of ids.

    Args:
      ids: the ids.
      special: whether a special token is shown as it is spelled. False: it is no text.
    """

  def _files(self) -> dict[str, bytes]:
    """Returns the content of each file that `save` writes."""
    text = json.dumps({'kind': self.kind, **self.fields}, ensure_ascii=False)
    contents = {'vocabulary.json': text.encode()}
    if self.file is not None:
      contents[self.file] = self.content
    return contents

  @property
  def digest(self) -> str:
    """Hash of the files that `save` writes."""
    return hashlib.sha256(b''.join(self._files().values())).hexdigest()

  def save(self, folder: pathlib.Path) -> None:
    """Writes the files that `vocabularies.load` reads."""
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
    """Returns the text of every token id, and the token as the vocabulary writes it.

    The text of a token that is a piece of a UTF-8 character contains U+FFFD. A space before a word
    belongs to the text. A special token is a text of its own.
    """
    tokens = [self.decode([i]) for i in range(self.size)]
    return [t.decode(errors='replace') for t in tokens], [f'<0x{t.hex().upper()}>' for t in tokens]
