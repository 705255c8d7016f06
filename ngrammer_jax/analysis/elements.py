"""Elements of a result for terminals and web pages: tables, shaded texts."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ngrammer_jax.system import text_tables

MAX_ROWS = 13  # of a table that is not folded
MAX_SHOWN_TOKENS = 300  # tokens of a shaded text on the page of a report


class Element(NamedTuple):
  """An element of a page: one of a table, shaded tokens, a sample, and preformatted text.

  Attributes:
    title: its heading, visible even when folded.
    rows: cells of a table, the header first; the first cell of a row is its name.
    has_words: whether cells are words (with line breaks) instead of numbers.
    best: rows and columns of marked cells.
    tokens: text, value, and share of the shading of each token.
    limits: the values of tokens without and with full shading.
    sample: a prompt and its continuation.
    text: preformatted text.
    is_folded: whether a page shows it only on a click.
  """

  title: str = ''
  rows: Sequence[Sequence[str]] = ()
  has_words: bool = False
  best: Collection[tuple[int, int]] = ()
  tokens: Sequence[tuple[str, str, float]] = ()
  limits: tuple[str, str] = ('', '')
  sample: tuple[str, str] | None = None
  text: str = ''
  is_folded: bool = False


def foldable_table(title: str, rows: Sequence[Sequence[str]]) -> Element:
  """Returns a table, folded if long."""
  return Element(title, rows, is_folded=len(rows) > MAX_ROWS)


def shaded_text(
  title: str, texts: Sequence[str], values: Sequence[float], pattern: str, **options: Any
) -> Element:
  """Returns tokens, the darker the higher their values; ¶: a document start."""
  low = min(values)
  high = max(values)
  tokens = []
  for text, value in zip(texts, values, strict=True):
    visible = text.replace('\n', '↵\n') or '¶'
    share = (value - low) / (high - low or 1)
    tokens.append((visible, format(value, pattern), share))
  limits = format(low, pattern), format(high, pattern)
  return Element(title, tokens=tokens, limits=limits, **options)


def format_tables(elements: Sequence[Element]) -> str:
  """Formats the tables among the elements of a result for a terminal, with their titles."""
  lines = []
  for element in elements:
    if element.rows:
      alignment = '<><' if element.has_words else '<>'
      lines.append(element.title)
      lines += text_tables.align_columns(element.rows, alignment)
  return '\n'.join(lines)
