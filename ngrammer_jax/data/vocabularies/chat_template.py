"""Chat templates: a conversation as text and as token ids.

The template, of Jinja, turns messages into a text. The special tokens that it writes are special
tokens. A message is ordinary text, also where it spells one. So the template is filled twice if a
message spells a special token: with the messages, as the text, and with messages that have marks
around these tokens, which tell them from the tokens of the template.
"""

from collections.abc import Callable, Sequence
import datetime
import functools
import json
import re
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies.base import Vocabulary, spelling_pattern
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary

# Marks in a rendered conversation. These code points are no characters.
OPEN, CLOSE = '\ufdd0', '\ufdd1'  # around the spelling of a special token in a message
BEGIN, END = '\ufdd2', '\ufdd3'  # around the text that a training learns
MARKS = re.compile('[\ufdd0-\ufdd3]')
SPELLED = re.compile(f'{OPEN}([^{OPEN}{CLOSE}]+){CLOSE}')
UNPAIRED = re.compile(f'({SPELLED.pattern})|[{OPEN}{CLOSE}]')
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
  """The tag `generation` of some templates, which marks the text that a training learns."""

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
      for mark in (BEGIN, END)
    )
    return [begin, *body, end]


class _MarkedText(str):
  """A text of a message with marks. Comparisons ignore them, and slices have whole pairs."""

  def __eq__(self, other: Any) -> bool:
    if not isinstance(other, str):
      return False
    return remove_marks(str(self)) == remove_marks(str(other))

  def __ne__(self, other: Any) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return hash(remove_marks(str(self)))

  def __getitem__(self, key: Any) -> str:
    return _drop_unpaired(super().__getitem__(key))


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """Where templates are filled. The methods of a text with marks keep whole pairs of them."""

  def call(self, context, function, *args, **kwargs):
    result = super().call(context, function, *args, **kwargs)
    text = getattr(function, '__self__', None)
    if not isinstance(text, str):
      return result
    if isinstance(result, bool):  # such as `startswith`
      unmarked_method = getattr(remove_marks(text), function.__name__)
      return super().call(context, unmarked_method, *args, **kwargs)
    return _drop_unpaired(result)


def _drop_unpaired(value: Any) -> Any:
  """Returns a text, or texts, without the marks that have lost the other one."""
  if isinstance(value, str):
    return _MarkedText(UNPAIRED.sub(r'\1', value))
  if isinstance(value, list | tuple):
    return type(value)(map(_drop_unpaired, value))
  return value


def check_exists(vocabulary: Vocabulary) -> None:
  """Raises BadInput if a model has no chat template."""
  if getattr(vocabulary, 'chat_template', None) is None:
    raise errors.BadInput(
      'this model has no chat template, which shows it messages: continue a text, without --chat'
    )


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
    for_training: whether the text of the tag `generation` is between BEGIN and END, and the date is
      TRAINING_DATE.

  Raises:
    BadInput: the template does not accept the messages, or is damaged.
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
  messages = _map_texts(list(messages), remove_marks)
  shown = _fill(template, messages, variables)
  marked_messages = _map_texts(messages, functools.partial(mark_spellings, vocabulary))
  if marked_messages == messages:
    return shown
  marked = _fill(template, _map_texts(marked_messages, _MarkedText), variables)
  return _copy_marks(marked, shown, spelling_pattern(vocabulary.special_tokens))


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
  """Returns the text of a template. Raises BadInput if it does not accept the messages."""
  try:
    return template.render(messages=messages, **variables)
  except Exception as error:  # a template can raise anything
    raise errors.BadInput(
      f'the chat template of the model cannot show this conversation: {error}'
    ) from error


def _copy_marks(marked: str, shown: str, spelling: re.Pattern[str]) -> str:
  """Returns a conversation with marks around the special tokens that its messages spell.

  Args:
    marked: the text of the template for messages with marks. It may differ in other characters, if
      the template counts or compares those of a message.
    shown: its text for the messages.
    spelling: pattern of the special tokens.

  Raises:
    BadInput: the texts have other special tokens.
  """
  tokens = []
  is_in_message = []
  for i, part in enumerate(re.split(f'{OPEN}{spelling.pattern}{CLOSE}', marked)):
    if i % 2:
      part_tokens = [part]
    else:
      part_tokens = spelling.findall(part.replace(OPEN, '').replace(CLOSE, ''))
    tokens += part_tokens
    is_in_message += [i % 2 == 1] * len(part_tokens)
  parts = spelling.split(shown)
  if parts[1::2] != tokens:
    names = ', '.join(dict.fromkeys([*parts[1::2], *tokens]))
    raise errors.BadInput(
      f'the chat template of the model writes other special tokens where a message spells one of '
      f'them: change the spelling of {names} in the messages'
    )
  for i, token in enumerate(tokens):
    if is_in_message[i]:
      parts[2 * i + 1] = f'{OPEN}{token}{CLOSE}'
  return ''.join(parts)


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
    changed = message | {'content': f'{message.get("content", "")}.'}
    if render(vocabulary, [*messages[:i], changed, *messages[i + 1 :]]) == shown:
      raise errors.BadInput(
        f'the chat template of the model leaves out the role {role!r}: put its text into a message '
        f'of the role {USER!r}'
      )


def remove_marks(text: str) -> str:
  """Returns a text without marks."""
  return MARKS.sub('', text)


def mark_spellings(vocabulary: TokenizerVocabulary, text: str) -> str:
  """Returns the text of a message as it is in a rendered conversation.

  Marks are around the special tokens that it spells.
  """
  spelling = spelling_pattern(vocabulary.special_tokens)
  return spelling.sub(rf'{OPEN}\1{CLOSE}', remove_marks(text))


def encode(vocabulary: TokenizerVocabulary, rendered: str) -> np.ndarray:
  """Returns the ids of a part of a rendered conversation, int32."""
  ids = []
  for part in _parse_marks(rendered):
    ids.append(vocabulary.encode(part.text.encode(), special=part.special))
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


def encode_with_mask(
  vocabulary: TokenizerVocabulary, rendered: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns the ids of each rendered conversation, and which of them a training learns.

  These are the tokens with a character between BEGIN and END.
  """
  conversations = [_parse_marks(text) for text in rendered]
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


class _Part(NamedTuple):
  """A part of a rendered conversation, without marks.

  Attributes:
    text: its text.
    special: whether the spelling of a special token is that token.
    learned: ranges of its characters that a training learns, in their order.
  """

  text: str
  special: bool
  learned: list[tuple[int, int]]


def _parse_marks(rendered: str) -> list[_Part]:
  """Returns the parts of a rendered conversation; a message spells a special token in every 2nd."""
  parts = []
  is_learned = False
  for i, marked in enumerate(SPELLED.split(rendered)):
    text = ''
    learned = []
    for piece in re.split(f'([{BEGIN}{END}])', marked):
      if piece in (BEGIN, END):
        is_learned = piece == BEGIN
        continue
      if is_learned and piece:
        learned.append((len(text), len(text) + len(piece)))
      text += piece
    parts.append(_Part(text, i % 2 == 0, learned))
  return parts


def _overlap(ranges_Nx2: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
  """Returns whether each range of characters has one of some spans, which are in order, [N]."""
  starts = np.array([start for start, _ in spans], np.int64)
  ends = np.array([end for _, end in spans] + [np.iinfo(np.int64).max], np.int64)
  starts = np.append(starts, np.iinfo(np.int64).max)
  first_span_N = np.searchsorted(ends, ranges_Nx2[:, 0], 'right')  # that ends after a range begins
  return starts[first_span_N] < ranges_Nx2[:, 1]


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
  """Returns a JSON value with all its texts changed, but not the names of its fields."""
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
