"""Conversations in files: lists of messages, with their roles and texts."""

from collections.abc import Sequence
import json
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.formats import text_fields
from ngrammer_jax.data.formats.interface import DocumentText, ReadOptions

REMEDY = 'set data.text_field to the name of the one with the messages'
EXAMPLE = '{"role": "user", "content": "..."}'


def parse(value: Any, location: str, options: ReadOptions) -> DocumentText:
  """Returns the messages of a field, as JSON; see `parse_messages`.

  A missing value is an empty document.

  Args:
    value: the value of the field.
    location: the file and its line or row.
    options: options with the name of the field.

  Raises:
    BadInput: no list of messages, or a message without role or text.
  """
  if value is None:
    return DocumentText(b'', is_null=True)
  field = options.fields[0]
  if not isinstance(value, list):
    remedy = options.remedy
    if isinstance(value, str) and options.can_be_chat:
      remedy += ', or leave out data.chat to train on texts'
    raise errors.BadInput(
      f'{location}: "{field}" is {text_fields.describe(value)}, not a list of messages such as '
      f'{EXAMPLE}: {remedy}'
    )
  if not value:
    raise errors.BadInput(
      f'{location}: "{field}" is an empty list, without a message: leave it out'
    )
  return text_fields.encode(json.dumps(parse_messages(value, location), ensure_ascii=False))


def parse_messages(messages: Sequence[Any], location: str) -> list[dict[str, Any]]:
  """Returns the messages of a conversation.

  A content of several text parts becomes one text. Null keys of a message are dropped, as chat
  templates expect. Keys besides `role` and `content` are kept for the template.

  Raises:
    BadInput: a message without role or text. The error has the location.
  """
  parsed = []
  for number, message in enumerate(messages, 1):
    parsed.append(_parse_message(message, f'{location}, message {number}'))
  return parsed


def _parse_message(message: Any, location: str) -> dict[str, Any]:
  """Returns a message with text content."""
  if not isinstance(message, dict):
    raise errors.BadInput(
      f'{location} is {text_fields.describe(message)}, not an object such as {EXAMPLE}'
    )
  parsed = {name: value for name, value in message.items() if value is not None}
  if 'role' not in parsed and {'from', 'value'} <= parsed.keys():
    raise errors.BadInput(
      f'{location} has "from" and "value", not "role" and "content": rename them, and write the '
      f'roles of the chat template, such as user and assistant for human and gpt'
    )
  role = parsed.get('role')
  if not isinstance(role, str):
    raise errors.BadInput(f'{location} has no role: expected an object such as {EXAMPLE}')
  content = parsed.get('content')
  if content is None and 'tool_calls' in parsed:
    return parsed
  if 'content' not in message:
    raise errors.BadInput(f'{location} has no content: expected an object such as {EXAMPLE}')
  return parsed | {'content': _parse_content(content, location)}


def _parse_content(content: Any, location: str) -> str:
  """Returns the text of a content, a text or a list of text parts."""
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise errors.BadInput(
      f'{location}: "content" is {text_fields.describe(content)}, not text: expected an object '
      f'such as {EXAMPLE}'
    )
  texts = []
  for part in content:
    text = part.get('text') if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get('type') != 'text':
      kind = part.get('type') if isinstance(part, dict) else text_fields.describe(part)
      raise errors.BadInput(
        f'{location}: a part of its content is of the type {kind!r}, not text: only text is read, '
        f'so leave the conversation out'
      )
    texts.append(text)
  return ''.join(texts)
