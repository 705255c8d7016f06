"""Conversations with a model that has a chat template."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import logging
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.formats import conversations
from ngrammer_jax.data.vocabularies import chat_template, marks
from ngrammer_jax.data.vocabularies.chat_template import Message
from ngrammer_jax.inference import encoding, text
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference.detokenizer import IncrementalDetokenizer

Prompt = encoding.TextOrIds | Sequence[Message]  # messages, and the text of one, are for chat
GREETING: Message = {'role': chat_template.USER, 'content': 'Hello'}


def is_messages(prompt: Any) -> bool:
  """Whether a prompt is a list of messages, not a text, token ids or a list of prompts."""
  if isinstance(prompt, str) or not isinstance(prompt, Sequence):
    return False
  return len(prompt) > 0 and isinstance(prompt[0], dict)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
  """Returns several prompts as a list, and a single one as a list of one."""
  if is_messages(prompts):
    return [prompts]
  return encoding.as_list(prompts)


def encode_prompt(
  vocabulary: vocabularies.Vocabulary,
  prompt: str | Sequence[Message],
  name: str,
  config: text.CompletionConfig,
  system: str | None = None,
) -> encoding.EncodedText:
  """Encodes a prompt: the message of a user, or the messages of a conversation.

  Args:
    vocabulary: the vocabulary of the model.
    prompt: the message or messages.
    name: name of the prompt, for error messages.
    config: options of the answer.
    system: a system message before it.

  Raises:
    BadInput: another type, a prompt that is too long, or one rejected by the template.
  """
  chat_template.check_exists(vocabulary)
  messages = _read_prompt(prompt, name)
  if system is not None:
    if messages[0]['role'] == chat_template.SYSTEM:
      raise errors.BadInput(
        f'{name} begins with a system message, and another one is set (--system): leave out one'
      )
    messages = [_system_message(system), *messages]
  with errors.named(name):
    check_system(vocabulary, system)
    chat_template.check_roles(vocabulary, messages)
    ids = chat_template.encode(vocabulary, chat_template.render(vocabulary, messages))
  config.check_length(name, len(ids))
  return encoding.EncodedText(prompt, ids)


def end_at_turn(
  config: text.CompletionConfig, vocabulary: vocabularies.TokenizerVocabulary
) -> text.CompletionConfig:
  """Returns options of answers that also end with the turn of the model."""
  return dataclasses.replace(config, end_tokens=chat_template.end_of_turn(vocabulary))


def _read_prompt(prompt: Any, name: str) -> list[Message]:
  """Returns the messages of a prompt. Raises BadInput unless it is a conversation to answer."""
  if not is_messages(prompt):
    encoding.to_bytes(prompt, name)
    return [{'role': chat_template.USER, 'content': prompt}]
  messages = conversations.parse_messages(prompt, name)
  try:
    content = json.dumps(messages, ensure_ascii=False)
  except (TypeError, ValueError) as error:
    raise errors.BadInput(f'{name}: a message is no JSON: {error}') from error
  encoding.to_bytes(content, name)
  if messages[-1]['role'] == chat_template.ASSISTANT:
    raise errors.BadInput(
      f'{name} ends with a message of the role {chat_template.ASSISTANT!r}: expected one that the '
      f'model answers'
    )
  return messages


def check_system(vocabulary: vocabularies.TokenizerVocabulary, system: str | None) -> None:
  """Raises BadInput if a template does not support a system message; None: no message."""
  if system is None:
    return
  messages = [_system_message(system), GREETING]
  try:
    chat_template.check_roles(vocabulary, messages)
  except errors.BadInput as error:
    raise errors.BadInput(f'{error}; leave out the system message (--system)') from error


def _system_message(content: str) -> Message:
  """Returns a system message. Raises BadInput if it is no text."""
  encoding.to_bytes(content, 'the system message')
  return {'role': chat_template.SYSTEM, 'content': content}


@dataclasses.dataclass(frozen=True)
class _Cache:
  """The tokens in the KV cache.

  Attributes:
    read: reads further tokens, see `Engine.start_incremental_decoding`.
    shown: the rendered conversation.
    ids: its tokens.
    num_read: number of tokens read so far.
  """

  read: Callable[[Sequence[int]], int]
  shown: str = ''
  ids: tuple[int, ...] = ()
  num_read: int = 0


class Conversation:
  """A conversation with a KV cache: each token is read once.

  If a template changes the text of earlier messages, all messages are read again, and the log says
  so once.

  Args:
    engine, variables: the engine and its variables.
    vocabulary: the vocabulary of the model, with a chat template.
    config: options of the answers.
  """

  def __init__(
    self,
    engine: inference.Engine,
    variables: inference.Variables,
    vocabulary: vocabularies.TokenizerVocabulary,
    config: text.CompletionConfig,
  ):
    self._vocabulary = vocabulary
    self._config = end_at_turn(config, vocabulary)
    self._start_decoding = functools.partial(
      engine.start_incremental_decoding,
      variables,
      config.seed,
      config.sampling,
      config.context,
      vocabulary.document_start,
    )
    self._system: list[Message] = []
    self._turns: list[Message] = []
    self._cache: _Cache | None = None  # None: the next message is read with all earlier ones
    self._has_logged = False

  @property
  def messages(self) -> list[Message]:
    """The conversation so far, with the system message."""
    return [*self._system, *self._turns]

  def set_system(self, system: str | None) -> None:
    """Sets the system message, before all other messages; None: the template decides.

    Raises BadInput if the template does not support a system message.
    """
    check_system(self._vocabulary, system)
    self._system = []
    if system is not None:
      self._system = [_system_message(system)]
    self._cache = None

  def reset(self) -> None:
    """Forgets all messages but the system message."""
    self._turns = []
    self._cache = None

  def say(
    self,
    message: str,
    on_text: Callable[[int, str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
  ) -> text.Completion:
    """Returns the answer of the model to a message.

    Args:
      message: the message of the user.
      on_text: called with 0 and the new text, for each token.
      should_stop: called after each token; True ends the answer; the conversation keeps its text so
        far.

    Raises:
      BadInput: the conversation does not fit the context, or the template rejects it. The message
        is then not added.
    """
    encoding.to_bytes(message, 'the message')
    turns = [*self._turns, {'role': chat_template.USER, 'content': message}]
    cache = self._show([*self._system, *turns])
    config = self._config
    config.check_length('the conversation', len(cache.ids))
    answer = IncrementalDetokenizer(
      self._vocabulary, cache.ids, config.tokens, config.stop, config.end_tokens
    )
    self._cache = None  # until the answer is complete
    new_ids = cache.ids[cache.num_read :]
    is_stopped = False
    while not answer.is_done and not is_stopped:
      token = cache.read(new_ids)
      new_ids = (token,)
      new_text = answer.add(token)
      if on_text is not None:
        on_text(0, new_text)
      is_stopped = should_stop is not None and should_stop()
    self._turns = [*turns, {'role': chat_template.ASSISTANT, 'content': answer.text}]
    # The tokens of a stop string were read, but are no part of the answer.
    has_stop_string = answer.has_ended and answer.tokens[-1:] == [token]
    if answer.has_all_text and not has_stop_string:
      shown = cache.shown + marks.add(answer.text, self._vocabulary.special_tokens)
      self._cache = _extend(cache, answer, shown)
    return text.Completion(message, answer.text, answer.tokens, answer.has_ended, config.seed)

  def _show(self, messages: Sequence[Message]) -> _Cache:
    """Returns the cache with the unread tokens of a conversation."""
    rendered = chat_template.render(self._vocabulary, messages)
    cache = self._cache
    if cache is not None and not rendered.startswith(cache.shown):
      cache = None
      if not self._has_logged:
        logging.info(
          'the chat template now shows earlier messages differently: all are read again, here and '
          'at each later message where it does so'
        )
        self._has_logged = True
    if cache is None:
      cache = _Cache(self._start_decoding())
    new_ids = chat_template.encode(self._vocabulary, rendered[len(cache.shown) :])
    return dataclasses.replace(cache, shown=rendered, ids=(*cache.ids, *new_ids.tolist()))


def _extend(cache: _Cache, answer: IncrementalDetokenizer, shown: str) -> _Cache:
  """Returns a cache with an answer; all its tokens but the last one were read."""
  ids = (*cache.ids, *answer.tokens)
  num_read = len(ids)
  if not answer.has_ended:  # else the last one was an end token, not part of the answer
    num_read -= 1
  return _Cache(cache.read, shown, ids, num_read)
