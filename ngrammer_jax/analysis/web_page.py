"""Parts of web pages: self-contained documents, tables, heat maps and shaded text.

A page loads nothing and runs no script; it is legible on a phone and on a desk, light and dark.
"""

from collections.abc import Collection, Sequence
import html
import pathlib
import re

# The policy lets a browser load nothing, whatever a text on the page contains.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1>
{intro}</header>
<main>
{body}
</main>
</body>
</html>
"""

STYLE = pathlib.Path(__file__).with_suffix('.css').read_text(encoding='utf-8')


def document(title: str, intro: str, body: str) -> str:
  """Returns a page. The title is a text; intro and body are HTML."""
  return PAGE.format(title=html.escape(title), style=STYLE, intro=intro, body=body)


def section(name: str, title: str, note: str, content: str) -> str:
  """Returns a section with an id; content is HTML."""
  return (
    f'<section id="{name}"><h2>{html.escape(title)}</h2>\n'
    f'<p class="note">{html.escape(note)}</p>\n{content}</section>\n'
  )


def cards(contents: Sequence[tuple[str, Sequence[str]]]) -> str:
  """Returns cards side by side, below each other where the page is narrow.

  Args:
    contents: the title of each card in HTML, and its parts, which are side by side in a wide card.
  """
  html_cards = ''.join(
    f'<div class="card">{title}<div class="parts">'
    + ''.join(f'<div>{part}</div>\n' for part in parts)
    + '</div></div>\n'
    for title, parts in contents
  )
  return f'<div class="cards">{html_cards}</div>\n'


def fold(summary: str, content: str) -> str:
  """Returns HTML that is shown on a click."""
  return f'<details><summary>{html.escape(summary)}</summary>\n{content}</details>\n'


def table(
  rows: Sequence[Sequence[str]], best: Collection[tuple[int, int]] = (), of_words: bool = False
) -> str:
  """Returns a table of texts, which scrolls where the page is narrow.

  Args:
    rows: cells, the header first; the first of each row is its name.
    best: rows and columns of cells to mark.
    of_words: whether cells are words, which break into lines, rather than numbers.
  """
  parts = []
  for r, (name, *cells) in enumerate(rows):
    tag = 'td' if r else 'th'
    columns = ''.join(
      f'<{tag}{" class=best" if (r, c) in best else ""}>{html.escape(cell)}</{tag}>'
      for c, cell in enumerate(cells, 1)
    )
    breakable = re.sub(r'([./_])', r'\1<wbr>', html.escape(name))
    parts.append(f'<tr><th>{breakable}</th>{columns}</tr>\n')
  return _table('words' if of_words else 'numbers', parts)


def _table(kind: str, rows: Sequence[str]) -> str:
  """Returns a table of a CSS class; rows are HTML, the header first."""
  return (
    f'<div class="scroll"><table class="{kind}"><thead>{rows[0]}</thead>\n'
    f'<tbody>{"".join(rows[1:])}</tbody></table></div>\n'
  )


def heat_map(values: Sequence[Sequence[float]], names: tuple[str, str], pattern: str) -> str:
  """Returns a table of numbers, the darker the higher.

  Args:
    values: rows of numbers, at least 0.
    names: what a row is and what a column is, such as layer and head.
    pattern: format of a number.
  """
  highest = max(map(max, values)) or 1
  head = ''.join(f'<th>{n}</th>' for n in range(len(values[0])))
  parts = [f'<tr><th>{names[1]}</th>{head}</tr>']
  for index, row in enumerate(values):
    cells = ''.join(
      f'<td style="--share:{value / highest:.3f}">{value:{pattern}}</td>' for value in row
    )
    parts.append(f'<tr><th>{names[0]} {index}</th>{cells}</tr>\n')
  return _table('heat', parts)


def shaded_text(
  texts: Sequence[str], values: Sequence[float], limits: tuple[float, float], pattern: str = '.3f'
) -> str:
  """Returns tokens, the darker the higher their values between two limits; ¶: a document start."""
  low, high = limits
  spans = []
  for text, value in zip(texts, values, strict=True):
    visible = html.escape(text).replace('\n', '↵\n') or '¶'
    share = (value - low) / (high - low) if high > low else 0
    spans.append(f'<span style="--share:{share:.3f}" title="{value:{pattern}}">{visible}</span>')
  return f'<p class="text">{"".join(spans)}</p>\n'


def shading_legend(name: str, limits: tuple[float, float], pattern: str = '.2f') -> str:
  """Returns the legend of shaded text."""
  low, high = limits
  return (
    f'<p class="note">{html.escape(name)} {low:{pattern}} <span class="scale"></span> '
    f'{high:{pattern}}; ¶ is the start of a document, ↵ a line break.</p>\n'
  )
