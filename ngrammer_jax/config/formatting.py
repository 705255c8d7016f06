"""Values of the config in error messages."""

import dataclasses
import decimal
from typing import Any

MAX_TEXT = 100  # characters of a value in an error message


def format_value(value: Any) -> str:
  """Formats a value for an error message of one line, shortened to about MAX_TEXT characters.

  A block only shows values other than its defaults.
  """
  if dataclasses.is_dataclass(value):
    return _format_block(value)
  if type(value) is int and abs(value) > 10**15:
    return f'{decimal.Decimal(value):.4g}'  # Python prints no int of thousands of digits
  try:
    text = _format_blocks(value) if _has_blocks(value) else repr(value)
  except (ValueError, RecursionError):  # a tuple of such ints, or a deeply nested one
    return 'a value too large to print'
  if len(text) <= MAX_TEXT:
    return text
  return f'{text[: MAX_TEXT // 2]}...{text[-MAX_TEXT // 4 :]}'


def format_entry(value: Any, entry: Any) -> str:
  """Formats a value; for a tuple, also the entry with the error."""
  if isinstance(value, tuple):
    return f'{format_value(value)}: {format_value(entry)}'
  return format_value(entry)


def _has_blocks(value: Any) -> bool:
  return isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value)


def _format_blocks(blocks: tuple[Any, ...]) -> str:
  return f'({", ".join(format_value(block) for block in blocks)})'


def _format_block(block: Any) -> str:
  """Formats the fields of a block with values other than their defaults."""
  texts = []
  for field in dataclasses.fields(block):
    value = getattr(block, field.name)
    if value != field.default:
      texts.append(f'{field.name}={format_value(value)}')
  return f'({", ".join(texts)})' if texts else '(defaults)'
