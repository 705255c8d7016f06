"""Chat templates: a conversation as text and as token ids.

A Jinja template turns messages into a text. Special tokens of the template are special; text of
messages is ordinary, even if equal to a special token. If a message contains such text, the
template is filled twice: with the messages for the text, and with marks around these tokens. The
marks show which special tokens come from messages.
"""

from collections.abc import Callable, Sequence
import datetime
import functools
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import marks
from ngrammer_jax.data.vocabularies.base import Vocabulary
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary

# What a template writes as the date in a training, which must not depend on the day: the date that
# Llama 3 writes where it cannot know another one.
TRAINING_DATE = datetime.datetime(2024, 7, 26)

# `role` and `content`, text, and what else a template may read, such as `tool_calls`.
Message = dict[str, Any]

SYSTEM, USER, ASSISTANT = 'system', 'user', 'assistant'

# A conversation that shows how a template ends an answer.
QUESTION: Message = {'role': 'user', 'content': 'Which animal?'}
ANSWER: Message = {'role': 'assistant', 'content': 'Aardvark'}


class _Generation(jinja2.ext.Extension):
  """The tag `generation` of some templates, around the text with a loss in training."""

  tags = {'generation'}

  def __init__(self, environment: jinja2.Environment):
    super().__init__(environment)
    environment.extend(has_generation_tag=False)

  def parse(self, parser):
    self.environment.has_generation_tag = True
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


class _MarkedGeneration(_Generation):
  """The same tag, with BEGIN and END around its text."""

  def parse(self, parser):
    line = parser.stream.current.lineno
    body = super().parse(parser)
    begin, end = (
      jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]).set_lineno(line)
      for mark in (marks.BEGIN, marks.END)
    )
    return [begin, *body, end]


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """The environment of templates. Methods of marked texts keep pairs of marks complete."""

  def call(self, context, function, *args, **kwargs):
    result = super().call(context, function, *args, **kwargs)
    text = getattr(function, '__self__', None)
    if not isinstance(text, str):
      return result
    if isinstance(result, bool):  # such as `startswith`
      unmarked_method = getattr(marks.remove(text), function.__name__)
      return super().call(context, unmarked_method, *args, **kwargs)
    return marks.drop_unpaired(result)


def check_exists(vocabulary: Vocabulary) -> None:
  """Raises BadInput if a model has no chat template."""
  if getattr(vocabulary, 'chat_template', None) is None:
    raise errors.BadInput('this model has no chat template: continue a text, without --chat')


def has_generation_tag(vocabulary: TokenizerVocabulary) -> bool:
  """Whether a chat template has the tag `generation`. Raises BadInput if it is damaged."""
  template = _compile(vocabulary.chat_template, for_training=True)
  return template.environment.has_generation_tag


def render(
  vocabulary: TokenizerVocabulary,
  messages: Sequence[Message],
  add_generation_prompt: bool = True,
  for_training: bool = False,
) -> str:
  """Returns the text of a conversation, with marks for `encode`.

  Args:
    vocabulary: a vocabulary with a chat template.
    messages: the conversation.
    add_generation_prompt: whether the text ends with the beginning of an answer.
    for_training: whether to put BEGIN and END around the tag `generation`, and use TRAINING_DATE.

  Raises:
    BadInput: a template that rejects the messages, or is damaged.
  """
  template = _compile(vocabulary.chat_template, for_training)
  begin = ''
  if vocabulary.has_begin_token:
    begin = vocabulary.token(vocabulary.document_start)
  variables = {
    'add_generation_prompt': add_generation_prompt,
    'bos_token': begin,
    'eos_token': vocabulary.token(vocabulary.document_end),
    'tools': None,
    'documents': None,
  }
  messages = _map_texts(list(messages), marks.remove)
  shown = _fill(template, messages, variables)
  marked_messages = _map_texts(
    messages, functools.partial(marks.add, special_tokens=vocabulary.special_tokens)
  )
  if marked_messages == messages:
    return shown
  marked = _fill(template, _map_texts(marked_messages, marks.MarkedText), variables)
  return marks.transfer(marked, shown, vocabulary.special_tokens)


@functools.lru_cache(maxsize=8)
def _compile(template: str, for_training: bool) -> jinja2.Template:
  """Returns a compiled chat template. Raises BadInput if it is damaged."""
  generation = _MarkedGeneration if for_training else _Generation
  environment = _Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
  )
  # The filter of Jinja escapes HTML.
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = TRAINING_DATE.strftime if for_training else _format_now
  try:
    return environment.from_string(template)
  except jinja2.TemplateSyntaxError as error:
    raise errors.BadInput(
      f'the chat template of the model is no valid Jinja: {error.message}; mend it in its files'
    ) from error


def _fill(template: jinja2.Template, messages: Sequence[Message], variables: dict[str, Any]) -> str:
  """Returns the text of a template. Raises BadInput if it rejects the messages."""
  try:
    return template.render(messages=messages, **variables)
  except Exception as error:  # a template can raise anything
    raise errors.BadInput(
      f'the chat template of the model cannot show this conversation: {error}'
    ) from error


def check_roles(vocabulary: TokenizerVocabulary, messages: Sequence[Message]) -> None:
  """Checks that a template includes all messages of a system, tool or other role.

  Messages of user and assistant may be missing: some templates include only the last ones.

  Raises:
    BadInput: the template drops or rejects a message.
  """
  shown = render(vocabulary, messages)
  for i, message in enumerate(messages):
    role = message['role']
    if role in (USER, ASSISTANT):
      continue
    changed = message | {'content': f'{message.get("content", "")}.'}
    if render(vocabulary, [*messages[:i], changed, *messages[i + 1 :]]) == shown:
      raise errors.BadInput(
        f'the chat template of the model leaves out the role {role!r}: put its text into a message '
        f'of the role {USER!r}'
      )


def encode(vocabulary: TokenizerVocabulary, rendered: str) -> np.ndarray:
  """Returns the ids of a part of a rendered conversation, int32."""
  ids = []
  for part in marks.parse(rendered):
    ids.append(vocabulary.encode(part.text.encode(), special=part.special))
  return np.concatenate(ids).astype(np.int32)


def end_of_turn(vocabulary: Vocabulary) -> tuple[int, ...]:
  """Returns the id of the token after an answer in the template; () without one.

  It is the first added token of the tokenizer after the answer, special or not. Some templates
  write it only before another message.
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


def encode_with_mask(
  vocabulary: TokenizerVocabulary, rendered: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns the ids of each rendered conversation, and their loss mask.

  Tokens with a character between BEGIN and END have a loss.
  """
  conversations = [marks.parse(text) for text in rendered]
  encoded = {}
  for special in (True, False):
    texts = [part.text for parts in conversations for part in parts if part.special is special]
    encoded[special] = iter(vocabulary.encode_with_ranges(texts, special))
  results = []
  for parts in conversations:
    ids = []
    is_learned = []
    for part in parts:
      part_ids, ranges_Nx2 = next(encoded[part.special])
      ids.append(part_ids)
      is_learned.append(_overlap(ranges_Nx2, part.learned))
    results.append((np.concatenate(ids), np.concatenate(is_learned)))
  return results


def _overlap(ranges_Nx2: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
  """Returns whether each range of characters overlaps one of some ordered spans, [N]."""
  starts = np.array([start for start, _ in spans], np.int64)
  ends = np.array([end for _, end in spans] + [np.iinfo(np.int64).max], np.int64)
  starts = np.append(starts, np.iinfo(np.int64).max)
  first_span_N = np.searchsorted(ends, ranges_Nx2[:, 0], 'right')  # that ends after a range begins
  return starts[first_span_N] < ranges_Nx2[:, 1]


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
  """Returns a JSON value with all texts mapped, except field names."""
  if isinstance(value, str):
    return change(value)
  if isinstance(value, list):
    return [_map_texts(entry, change) for entry in value]
  if isinstance(value, dict):
    return {name: _map_texts(entry, change) for name, entry in value.items()}
  return value


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _format_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)
