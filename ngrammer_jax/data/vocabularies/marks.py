"""Marks in the text of a conversation.

OPEN and CLOSE enclose the text of a special token in a message. It is ordinary text; only special
tokens of the chat template are special. BEGIN and END enclose text with a loss in training.
"""

import re
from typing import Any, NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies.base import spelling_pattern

# These code points are no characters.
OPEN, CLOSE = '\ufdd0', '\ufdd1'
BEGIN, END = '\ufdd2', '\ufdd3'
MARKS = re.compile(f'[{OPEN}-{END}]')
SPELLED = re.compile(f'{OPEN}([^{OPEN}{CLOSE}]+){CLOSE}')
UNPAIRED = re.compile(f'({SPELLED.pattern})|[{OPEN}{CLOSE}]')


def remove(text: str) -> str:
  """Returns a text without marks."""
  return MARKS.sub('', text)


def add(text: str, special_tokens: tuple[str, ...]) -> str:
  """Returns the text of a message with marks around texts of special tokens."""
  return spelling_pattern(special_tokens).sub(rf'{OPEN}\1{CLOSE}', remove(text))


class MarkedText(str):
  """A text of a message with marks. Comparisons ignore them; slices keep whole pairs of them."""

  def __eq__(self, other: Any) -> bool:
    if not isinstance(other, str):
      return False
    return remove(str(self)) == remove(str(other))

  def __ne__(self, other: Any) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return hash(remove(str(self)))

  def __getitem__(self, key: Any) -> str:
    return drop_unpaired(super().__getitem__(key))


def drop_unpaired(value: Any) -> Any:
  """Returns a text, or texts, without unpaired marks."""
  if isinstance(value, str):
    return MarkedText(UNPAIRED.sub(r'\1', value))
  if isinstance(value, list | tuple):
    return type(value)(map(drop_unpaired, value))
  return value


def transfer(marked: str, shown: str, special_tokens: tuple[str, ...]) -> str:
  """Returns a conversation with marks around texts of special tokens in its messages.

  Args:
    marked: the text of the template for messages with marks. It may differ in other characters, if
      the template counts or compares those of a message.
    shown: its text for the messages.
    special_tokens: the texts of the special tokens.

  Raises:
    BadInput: the special tokens of the two texts differ.
  """
  spelling = spelling_pattern(special_tokens)
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


class Part(NamedTuple):
  """A part of a rendered conversation, without marks.

  Attributes:
    text: its text.
    special: whether the text of a special token is read as the token.
    learned: ranges of characters with a loss, in order.
  """

  text: str
  special: bool
  learned: list[tuple[int, int]]


def parse(rendered: str) -> list[Part]:
  """Returns the parts of a rendered conversation; every 2nd is a special token in a message."""
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
    parts.append(Part(text, i % 2 == 0, learned))
  return parts
