"""Chat templates: a conversation as text and as token ids.

The template, of Jinja, turns messages into a text. The special tokens that it writes are special
tokens. A message is ordinary text, also where it spells one.
"""

from collections.abc import Sequence
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
from ngrammer_jax.data.vocabularies.base import Vocabulary
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary

# Marks in a rendered conversation. These code points are no characters.
OPEN, CLOSE = '\ufdd0', '\ufdd1'  # around the spelling of a special token in a message
BEGIN, END = '\ufdd2', '\ufdd3'  # around the text that a training learns
MARKS = re.compile('[\ufdd0-\ufdd3]')
SPELLED = re.compile(f'{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}')
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

  def parse(self, parser):
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


def check_exists(vocabulary: Vocabulary) -> None:
  """Raises BadInput if a model has no chat template."""
  if getattr(vocabulary, 'chat_template', None) is None:
    raise errors.BadInput(
      'this model has no chat template, which shows it messages: continue a text, without --chat'
    )


def has_generation_tag(vocabulary: TokenizerVocabulary) -> bool:
  """Whether a chat template has the tag `generation`."""
  return re.search(r'{%[-+]?\s*generation\s*[-+]?%}', vocabulary.chat_template) is not None


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
  begin = ''
  if vocabulary.has_begin_token:
    begin = vocabulary.token(vocabulary.document_start)
  try:
    template = _compile(vocabulary.chat_template, for_training)
  except jinja2.TemplateSyntaxError as error:
    raise errors.BadInput(
      f'the chat template of the model is no valid Jinja: {error.message}; mend it in its files'
    ) from error
  try:
    return template.render(
      messages=_mark_texts(list(messages), tuple(vocabulary.special_tokens)),
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


@functools.lru_cache(maxsize=8)
def _compile(template: str, for_training: bool) -> jinja2.Template:
  """Returns a compiled chat template."""
  generation = _MarkedGeneration if for_training else _Generation
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
  )
  # The filter of Jinja escapes HTML.
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = TRAINING_DATE.strftime if for_training else _format_now
  return environment.from_string(template)


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
  parts = [_parse_marks(text) for text in rendered]
  encoded: dict[bool, list[tuple[np.ndarray, np.ndarray]]] = {}
  for special in (True, False):
    texts = [part.text for of_text in parts for part in of_text if part.special is special]
    encoded[special] = vocabulary.encode_with_ranges(texts, special)
  results = []
  next_encoded = {special: iter(of_parts) for special, of_parts in encoded.items()}
  for of_text in parts:
    ids = []
    is_learned = []
    for part in of_text:
      part_ids, ranges_Nx2 = next(next_encoded[part.special])
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
    for piece in re.split(f'([{BEGIN}{END}])', marked.replace(OPEN, '').replace(CLOSE, '')):
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


def _mark_texts(value: Any, special_tokens: tuple[str, ...]) -> Any:
  """Returns a JSON value with marks around the spellings of special tokens in its texts."""
  if isinstance(value, str):
    return _spelling(special_tokens).sub(rf'{OPEN}\g<0>{CLOSE}', MARKS.sub('', value))
  if isinstance(value, list):
    return [_mark_texts(entry, special_tokens) for entry in value]
  if isinstance(value, dict):
    return {name: _mark_texts(entry, special_tokens) for name, entry in value.items()}
  return value


@functools.lru_cache(maxsize=8)
def _spelling(special_tokens: tuple[str, ...]) -> re.Pattern[str]:
  """Returns a pattern of the spellings of special tokens."""
  longest_first = sorted(special_tokens, key=len, reverse=True)
  return re.compile('|'.join(map(re.escape, longest_first)) or '$^')


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _format_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)
