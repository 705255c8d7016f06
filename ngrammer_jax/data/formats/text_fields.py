"""The text fields of a record, and errors about other contents."""

from collections.abc import Collection
import re
from typing import Any

from ngrammer_jax.data.formats.interface import DocumentText, ReadOptions

MISSING = object()  # in place of a missing field
# Fields of published corpora that hold conversations; `data.chat` reads the first one by default.
CHAT_FIELDS = ('messages', 'conversations')
HALVES = re.compile('[\ud800-\udfff]')  # a whole pair of surrogates is one character in Python


def find(value: Any, name: str) -> Any:
  """Returns a field of a JSON value, or MISSING; a dot separates nested fields."""
  if not isinstance(value, dict):
    return MISSING
  outer, dot, inner = name.partition('.')
  if dot and name not in value:
    return find(value.get(outer), inner)
  return value.get(name, MISSING)


def encode(text: str) -> DocumentText:
  """Returns a text as UTF-8, with U+FFFD in place of each half of a UTF-16 character."""
  try:
    return DocumentText(text.encode())
  except UnicodeEncodeError:
    replaced, count = HALVES.subn('\ufffd', text)
    return DocumentText(replaced.encode(), count)


def describe(value: Any) -> str:
  """Returns the description of a JSON value, for error messages."""
  if value is None:
    return 'null'
  if isinstance(value, str):
    return 'text'
  if isinstance(value, bool):
    return 'true or false'
  if isinstance(value, (int, float)):
    return 'a number'
  if isinstance(value, dict):
    return 'an object'
  if value and all(isinstance(entry, dict) for entry in value):
    return 'a list of messages' if 'role' in value[0] else 'a list of objects'
  return 'a list'


def remedy_for_missing(options: ReadOptions, names: Collection[str]) -> str:
  """Returns the remedy for a file with these fields and without the text field."""
  conversations = [name for name in CHAT_FIELDS if name in names]
  if not conversations or not options.can_be_chat:
    return options.remedy
  if options.is_chat:
    return f'set data.text_field={conversations[0]}'
  if conversations[0] == CHAT_FIELDS[0]:
    return f'set data.chat=True, which reads the conversations in "{conversations[0]}"'
  return (
    f'set data.chat=True and data.text_field={conversations[0]}, which read the conversations there'
  )


def remedy_for_messages(options: ReadOptions, field: str) -> str:
  """Returns the remedy for messages in the text field."""
  if not options.can_be_chat:
    return options.remedy
  if field == 'text':  # the default of data.text_field (not with data.chat)
    return f'rename the field to "{CHAT_FIELDS[0]}" and set data.chat=True'
  return 'set data.chat=True, which reads conversations'
