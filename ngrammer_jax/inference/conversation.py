"""Conversations with a model that has a chat template.

The template, of Jinja, turns messages into a text. Special tokens that the template spells are
special tokens; what a user writes is ordinary text, also where it spells one.
"""

from collections.abc import Callable, Sequence
import datetime
import functools
import json
import re
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import text

# Around what spells a special token in a message. These code points are no characters.
OPEN, CLOSE = '\ufdd0', '\ufdd1'

Message = dict[str, str]  # `role` and `content`


class _Generation(jinja2.ext.Extension):
  """The tag `generation` of some templates, which marks what a training would learn."""

  tags = {'generation'}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def check_chat_template(vocabulary: vocabularies.Vocabulary) -> None:
  """Raises BadInput if a model has no chat template."""
  if getattr(vocabulary, 'chat_template', None) is None:
    raise errors.BadInput('this model has no chat template: leave out --chat to continue a text')


def encode(vocabulary: vocabularies.TokenizerVocabulary, rendered: str) -> np.ndarray:
  """Returns the ids of a part of a rendered conversation, int32."""
  parts = re.split(f'{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}', rendered)
  ids = []
  for i, part in enumerate(parts):
    if i % 2:  # a message spells a special token here
      ids.append(vocabulary.encode(part.encode()))
    else:
      ids.append(vocabulary.encode_special(_unmark(part)))
  return np.concatenate(ids).astype(np.int32)


def render(vocabulary: vocabularies.TokenizerVocabulary, messages: Sequence[Message]) -> str:
  """Returns the text of a conversation, up to where the model answers, with marks for `encode`.

  Raises:
    BadInput: the template does not accept the messages, or is damaged.
  """
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
  )
  # The filter of Jinja escapes HTML.
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  special = sorted(vocabulary.special_tokens, key=len, reverse=True)
  spelled = re.compile('|'.join(map(re.escape, special)) or '$^')
  marked = [
    message | {'content': spelled.sub(rf'{OPEN}\g<0>{CLOSE}', _unmark(message['content']))}
    for message in messages
  ]
  begin = vocabulary.token(vocabulary.document_start) if vocabulary.has_begin_token else ''
  try:
    return environment.from_string(vocabulary.chat_template).render(
      messages=marked,
      add_generation_prompt=True,
      bos_token=begin,
      eos_token=vocabulary.token(vocabulary.document_end),
      tools=None,
      documents=None,
    )
  except Exception as error:  # a template can raise anything
    raise errors.BadInput(
      f'the chat template of the model cannot show this conversation: {error}'
    ) from error


def encode_prompt(
  vocabulary: vocabularies.Vocabulary, prompt: str, name: str, config: text.CompletionConfig
) -> text.EncodedText:
  """Encodes a prompt as the first message of a conversation; see `text.encode_prompt`."""
  check_chat_template(vocabulary)
  text.to_bytes(prompt, name)
  ids = encode(vocabulary, render(vocabulary, [{'role': 'user', 'content': prompt}]))
  config.check_length(name, len(ids))
  return text.EncodedText(prompt, ids)


class Conversation:
  """A conversation, whose tokens are read once: the KV cache keeps them between its messages.

  A template may show earlier messages differently than before. Then all of them are read again.

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
    self._config = config
    self._start = lambda: engine.start_incremental_decoding(
      variables, config.seed, config.sampling, config.context, vocabulary.document_start
    )
    self._messages: list[Message] = []
    self._forget()

  def _forget(self) -> None:
    """Lets the next message be read with all earlier ones."""
    self._read: Callable[[Sequence[int]], int] | None = None
    self._shown = ''  # the rendered conversation so far
    self._ids: list[int] = []  # its tokens
    self._num_read = 0  # how many of them the KV cache has

  def say(self, message: str, on_text: Callable[[int, str], None] | None = None) -> text.Completion:
    """Returns the answer of the model to a message.

    Args:
      message: what the user says.
      on_text: called with 0 and the new text, for each token.

    Raises:
      BadInput: the conversation does not fit the context, or the template does not accept it. The
        message is then no part of it.
    """
    text.to_bytes(message, 'the message')
    messages = [*self._messages, {'role': 'user', 'content': message}]
    rendered = render(self._vocabulary, messages)
    if not rendered.startswith(self._shown):
      self._forget()
    ids = [*self._ids, *encode(self._vocabulary, rendered[len(self._shown) :]).tolist()]
    new_ids = ids[self._num_read :]
    config = self._config
    config.check_length('the conversation', len(ids))
    read = self._read or self._start()
    self._forget()  # until the answer is complete
    answer = text.IncrementalDetokenizer(self._vocabulary, ids, config.tokens, config.stop)
    while not answer.is_done:
      token = read(new_ids)
      new_ids = [token]
      new_text = answer.add(token)
      if on_text is not None:
        on_text(0, new_text)
    self._messages = [*messages, {'role': 'assistant', 'content': answer.text}]
    # The tokens of a stop string were read, but are no part of the answer.
    is_whole = answer.tokens[-1:] != new_ids or not answer.has_ended
    if is_whole:
      self._read = read
      self._shown = rendered + answer.text
      self._ids = [*ids, *answer.tokens]
      self._num_read = len(self._ids) - (not answer.has_ended)  # else the last token is not read
    return text.Completion(message, answer.text, answer.tokens, answer.has_ended, config.seed)


def _unmark(content: str) -> str:
  return content.replace(OPEN, '').replace(CLOSE, '')


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)
