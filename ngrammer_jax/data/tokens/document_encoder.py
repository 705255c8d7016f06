"""Encoders of texts and conversations, with loss masks."""

from collections.abc import Sequence
import json
import os
from typing import NamedTuple, Protocol

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.files import text_files
from ngrammer_jax.data.vocabularies import chat_template, marks
from ngrammer_jax.data.vocabularies.base import Vocabulary
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary

NO_CHARACTER = '\ufdd4'  # a code point with which no text of a message begins


class EncodedDocument(NamedTuple):
  """The tokens of a document.

  Attributes:
    ids: their ids.
    num_bytes: size of their text.
    counts: whether each token has a loss, bool. None: all have.
  """

  ids: np.ndarray
  num_bytes: int
  counts: np.ndarray | None = None


class DocumentEncoder(Protocol):
  """Turns documents into tokens: `TextEncoder` or `ConversationEncoder`.

  Attributes:
    vocabulary: the vocabulary of the tokens.
    has_counts: whether some tokens may have no loss.
    is_text: whether documents are texts; texts may be encoded in chunks.
  """

  vocabulary: Vocabulary
  has_counts: bool
  is_text: bool

  def prepare(self, document: bytes) -> bytes:
    """Returns an input of `encode_all`. Raises BadInput for an invalid document."""

  def encode_all(self, prepared: Sequence[bytes]) -> list[EncodedDocument]:
    """Returns the tokens of documents."""


def make(vocabulary: Vocabulary, is_chat: bool, loss_on: str) -> DocumentEncoder:
  """Returns the encoder of a corpus.

  Args:
    vocabulary: the vocabulary.
    is_chat: whether the documents are conversations, see `formats.conversations.parse`.
    loss_on: see `data.loss_on`.

  Raises:
    BadInput: a vocabulary without chat template.
  """
  if not is_chat:
    return TextEncoder(vocabulary)
  if getattr(vocabulary, 'chat_template', None) is None:
    raise errors.BadInput(
      'data.chat=True needs a vocabulary with a chat template: name the folder or the GGUF file of '
      'a model for chats as data.vocabulary_path, such as a folder with chat_template.jinja or '
      'tokenizer_config.json beside its tokenizer.json'
    )
  return ConversationEncoder(vocabulary, loss_on)


class TextEncoder:
  """Encodes texts; see `DocumentEncoder`. Long ones are encoded in pieces."""

  has_counts = False
  is_text = True

  def __init__(self, vocabulary: Vocabulary):
    self.vocabulary = vocabulary

  def prepare(self, document: bytes) -> bytes:
    """See `DocumentEncoder`."""
    return document

  def encode_all(self, prepared: Sequence[bytes]) -> list[EncodedDocument]:
    """See `DocumentEncoder`."""
    if max(map(len, prepared), default=0) <= text_files.LONG:
      ids_of_texts = self.vocabulary.encode_all(prepared, special=False)
    else:
      ids_of_texts = []
      for text in prepared:
        pieces = list(text_files.split_long(text))
        ids_of_texts.append(np.concatenate(self.vocabulary.encode_all(pieces, special=False)))
    return [
      EncodedDocument(ids, len(text)) for ids, text in zip(ids_of_texts, prepared, strict=True)
    ]


class ConversationEncoder:
  """Writes conversations with the chat template, and encodes them; see `DocumentEncoder`.

  A document start at the beginning of the text is dropped, because documents are separated by one.

  Args:
    vocabulary: a vocabulary with a chat template.
    loss_on: `all`, or `assistant`: the tokens in the template's tag `generation`; without this tag,
      the text added by each assistant message after the generation prompt.
  """

  is_text = False

  def __init__(self, vocabulary: TokenizerVocabulary, loss_on: str):
    self.vocabulary = vocabulary
    self.has_counts = loss_on == 'assistant'
    self._has_tag = chat_template.has_generation_tag(vocabulary)
    self._checked_roles: set[tuple[str, ...]] = set()  # of whole conversations

  def prepare(self, document: bytes) -> bytes:
    """Returns a conversation as text, with marks for `chat_template.encode_with_mask`.

    Args:
      document: its messages as JSON.

    Raises:
      BadInput: the template rejects the messages, drops one, or does not let the text of the
        assistant be located.
    """
    messages = json.loads(document)
    rendered = self._render(messages)
    roles = tuple(message['role'] for message in messages)
    if roles not in self._checked_roles:
      chat_template.check_roles(self.vocabulary, messages)
      self._checked_roles.add(roles)
    if self.has_counts and not self._has_tag:
      rendered = self._mark_answers(messages, rendered)
    return rendered.encode()

  def encode_all(self, prepared: Sequence[bytes]) -> list[EncodedDocument]:
    """See `DocumentEncoder`."""
    rendered = [text.decode() for text in prepared]
    encoded = []
    if self.has_counts:
      pairs = chat_template.encode_with_mask(self.vocabulary, rendered)
    else:
      pairs = [(chat_template.encode(self.vocabulary, text), None) for text in rendered]
    for text, (ids, counts) in zip(rendered, pairs, strict=True):
      num_bytes = len(marks.remove(text).encode())
      if len(ids) and ids[0] == self.vocabulary.document_start:
        ids = ids[1:]
        counts = None if counts is None else counts[1:]
      encoded.append(EncodedDocument(ids, num_bytes, counts))
    return encoded

  def _render(
    self, messages: Sequence[chat_template.Message], add_generation_prompt: bool = False
  ) -> str:
    return chat_template.render(self.vocabulary, messages, add_generation_prompt, for_training=True)

  def _mark_answers(self, messages: Sequence[chat_template.Message], rendered: str) -> str:
    """Returns a rendered conversation with marks around the text of the assistant."""
    marked = []
    position = 0
    for number, message in enumerate(messages):
      if message['role'] != chat_template.ASSISTANT:
        continue
      after = self._render(messages[: number + 1])
      if number == 0:
        before = self._text_before_first(messages, after)
      else:
        before = self._render(messages[:number], add_generation_prompt=True)
      if not (after.startswith(before) and rendered.startswith(after)):
        raise errors.BadInput(
          f'message {number + 1}: data.loss_on=assistant cannot find the text of the assistant, '
          f'because the chat template writes a message otherwise when another one follows: use a '
          f'template with {{% generation %}} around that text, or data.loss_on=all'
        )
      marked += [rendered[position : len(before)], marks.BEGIN]
      marked += [rendered[len(before) : len(after)], marks.END]
      position = len(after)
    marked.append(rendered[position:])
    return ''.join(marked)

  def _text_before_first(self, messages: Sequence[chat_template.Message], rendered: str) -> str:
    """Returns the text before the content of the first message, rendered alone.

    It has no generation prompt, because many templates reject an empty conversation.
    """
    other = self._render([messages[0] | {'content': NO_CHARACTER}])
    return os.path.commonprefix([rendered, other])
