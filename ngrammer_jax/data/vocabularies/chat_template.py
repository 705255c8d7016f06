"""Chat templates: a conversation as text and as token ids.

The template, of Jinja, turns messages into a text. The special tokens that it writes are special
tokens. A message is ordinary text, also where it spells one.
"""

from collections.abc import Sequence
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
from ngrammer_jax.data.vocabularies.base import Vocabulary
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary

# Around the spelling of a special token in a message. These code points are no characters.
OPEN, CLOSE = '\ufdd0', '\ufdd1'

Message = dict[str, str]  # `role` and `content`

SYSTEM, USER, ASSISTANT = 'system', 'user', 'assistant'

# A conversation that shows how a template ends an answer.
QUESTION: Message = {'role': 'user', 'content': 'Which animal?'}
ANSWER: Message = {'role': 'assistant', 'content': 'Aardvark'}


class _Generation(jinja2.ext.Extension):
  """The tag `generation` of some templates, which marks the text that a training would learn."""

  tags = {'generation'}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def check_exists(vocabulary: Vocabulary) -> None:
  """Raises BadInput if a model has no chat template."""
  if getattr(vocabulary, 'chat_template', None) is None:
    raise errors.BadInput('this model has no chat template: leave out --chat to continue a text')


def render(
  vocabulary: TokenizerVocabulary, messages: Sequence[Message], add_generation_prompt: bool = True
) -> str:
  """Returns the text of a conversation, with marks for `encode`.

  Args:
    vocabulary: a vocabulary with a chat template.
    messages: the conversation.
    add_generation_prompt: whether the text ends with the beginning of an answer.

  Raises:
    BadInput: the template does not accept the messages, or is damaged.
  """
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
  )
  # The filter of Jinja escapes HTML.
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = _format_now
  marked = []
  for message in messages:
    marked.append(message | {'content': _mark(vocabulary, message['content'])})
  begin = ''
  if vocabulary.has_begin_token:
    begin = vocabulary.token(vocabulary.document_start)
  try:
    return environment.from_string(vocabulary.chat_template).render(
      messages=marked,
      add_generation_prompt=add_generation_prompt,
      bos_token=begin,
      eos_token=vocabulary.token(vocabulary.document_end),
      tools=None,
      documents=None,
    )
  except Exception as error:  # a template can raise anything
    raise errors.BadInput(
      f'the chat template of the model cannot show this conversation: {error}'
    ) from error


def check_roles(vocabulary: TokenizerVocabulary, messages: Sequence[Message]) -> None:
  """Checks that a template shows all messages of a system, a tool or another role.

  Those of a user or an assistant may be left out: some templates show the last ones.

  Raises:
    BadInput: it leaves out one of them, or does not accept it.
  """
  shown = render(vocabulary, messages)
  for i, message in enumerate(messages):
    role = message['role']
    if role in (USER, ASSISTANT):
      continue
    changed = message | {'content': f'{message["content"]}.'}
    if render(vocabulary, [*messages[:i], changed, *messages[i + 1 :]]) == shown:
      raise errors.BadInput(
        f'the chat template of the model leaves out the role {role!r}: put its text into a message '
        f'of the role {USER!r}'
      )


def encode(vocabulary: TokenizerVocabulary, rendered: str) -> np.ndarray:
  """Returns the ids of a part of a rendered conversation, int32."""
  parts = re.split(f'{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}', rendered)
  ids = []
  for i, part in enumerate(parts):
    is_of_template = i % 2 == 0  # else a message spells a special token here
    ids.append(vocabulary.encode(_remove_marks(part).encode(), special=is_of_template))
  return np.concatenate(ids).astype(np.int32)


def end_of_turn(vocabulary: Vocabulary) -> tuple[int, ...]:
  """Returns the id of the token with which the template ends an answer; () if there is none.

  It is the first token after the answer that is found before all others in a text (the added tokens
  of the tokenizer), special or not. Some templates write it only before another message.
  """
  if getattr(vocabulary, 'chat_template', None) is None:
    return ()
  for messages in ([QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION]):
    try:
      rendered = render(vocabulary, messages, add_generation_prompt=False)
    except errors.BadInput:
      continue
    _, answer, ending = rendered.rpartition(ANSWER['content'])
    if not answer:
      continue
    for i in encode(vocabulary, ending).tolist():
      is_blank = not vocabulary.decode([i], special=True).strip()
      if i in vocabulary.added_ids and not is_blank:
        return (i,)
  return ()


def _mark(vocabulary: TokenizerVocabulary, content: str) -> str:
  """Returns the text of a message with marks around the spellings of special tokens."""
  longest_first = sorted(vocabulary.special_tokens, key=len, reverse=True)
  spelled = re.compile('|'.join(map(re.escape, longest_first)) or '$^')
  return spelled.sub(rf'{OPEN}\g<0>{CLOSE}', _remove_marks(content))


def _remove_marks(content: str) -> str:
  return content.replace(OPEN, '').replace(CLOSE, '')


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _format_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)
