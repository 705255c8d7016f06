"""Tokenization of texts, and incremental detokenization of generated tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabulary as vocabularies

# Incomplete UTF-8 decodes to this character, as do bytes that are not UTF-8.
REPLACEMENT = '\N{REPLACEMENT CHARACTER}'


class EncodedText(NamedTuple):
  """A text and its token ids, int32."""

  text: str
  ids: np.ndarray


def encode(vocabulary: vocabularies.Vocabulary, text: str, name: str) -> EncodedText:
  """Encodes a text. Raises BadInput, with its name, if the vocabulary lacks a character."""
  if not isinstance(text, str):
    raise TypeError(f'{name} is not a str: {text!r}')
  try:
    return EncodedText(text, vocabulary.encode(text.encode()).astype(np.int32))
  except UnicodeEncodeError as error:
    raise errors.BadInput(f'{name} is not valid Unicode: {error.reason}') from error
  except errors.BadInput as error:
    raise errors.BadInput(f'{name}: {error}') from error


class IncrementalDetokenizer:
  """Converts the tokens after a prompt to text, token by token; emitted text never changes.

  Attributes:
    text: the text so far.
    tokens: the tokens so far, without the end of the document.
    document_ended: whether the end-of-document token was added.
    is_done: whether the document ended or the token limit is reached.
  """

  def __init__(self, vocabulary: vocabularies.Vocabulary, prompt: Iterable[int], max_tokens: int):
    self._vocabulary, self._max_tokens = vocabulary, max_tokens
    self._prompt = [int(i) for i in prompt]
    self._prompt_length = len(self._decode([]))
    self.text, self.tokens, self.document_ended, self.is_done = '', [], False, False

  def add(self, token: int) -> str:
    """Adds a token and returns the new text, which may be empty."""
    self.document_ended = token == self._vocabulary.document_end
    if not self.document_ended:
      self.tokens.append(token)
    self.is_done = self.document_ended or len(self.tokens) >= self._max_tokens
    text = self._decode(self.tokens)[self._prompt_length :]
    # Hold back an incomplete character, unless no more bytes can follow.
    text = text if self.is_done else text.rstrip(REPLACEMENT)
    new_text, self.text = text[len(self.text) :], text
    return new_text

  def _decode(self, tokens: list[int]) -> str:
    return self._vocabulary.decode([*self._prompt, *tokens]).decode('utf-8', 'replace')
