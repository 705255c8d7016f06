"""Parts of web pages: self-contained documents, tables, heat maps and shaded text.

A page loads nothing and runs no script; it is legible on a phone and on a desk, light and dark.
"""

from collections.abc import Collection, Sequence
import html
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

STYLE = (
  """
:root { color-scheme: light dark; --ink: #1c2530; --faint: #667180; --line: #dfe4ea;
  --page: #f5f6f8; --card: #fff; --high: 255, 150, 40; --mark: #e3f4e8; --c0: #2463c8;
  --c1: #d0660a; --c2: #178553; --c3: #8746c4; --c4: #c93447; --c5: #0b8396; --c6: #866637;
  --c7: #be3f8b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --faint: #98a3b1; --line: #333b46;
  --page: #12161c; --card: #1b2129; --high: 190, 85, 0; --mark: #1d4430; --c0: #71a7ff;
  --c1: #ffa655; --c2: #58cd97; --c3: #c596ff; --c4: #ff8490; --c5: #57cbdb; --c6: #d0ad77;
  --c7: #f391cb; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
header, main { max-width: 84rem; margin: 0 auto; padding: 0 clamp(.75rem, 2.5vw, 2rem); }
header { padding-top: 1.75rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 0; }
h3 { font-size: .95rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h4 { font-size: .85rem; margin: 1rem 0 .25rem; color: var(--faint); font-weight: 600;
  overflow-wrap: anywhere; }
p { margin: .25rem 0 .75rem; max-width: 50rem; }
a { color: var(--c0); }
.note { color: var(--faint); font-size: .9rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin-top: 1rem; }
section { margin: 2rem 0 2.5rem; scroll-margin-top: 1rem; }
.cards { display: grid; gap: 1rem; margin-top: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .9rem clamp(.7rem, 2vw, 1.1rem); min-width: 0; }
header .cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 16rem), 1fr)); }
.card .note:last-child { margin-bottom: 0; }
.card.fit { max-width: 100%; width: fit-content; }
.parts { display: grid; gap: .5rem 2.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
.parts > div { min-width: 0; }
.parts h4:first-child { margin-top: 0; }
.headline { font-size: 1.7rem; font-weight: 600; line-height: 1.1; letter-spacing: -.01em; }
.headline small { display: block; line-height: 1.6; font-size: .85rem; font-weight: 400;
  color: var(--faint); letter-spacing: 0; }
.run::before, .legend span::before { content: ""; display: inline-block; width: .7em; height: .7em;
  border-radius: 50%; margin-right: .4em; background: var(--color); }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
thead th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
th:first-child { text-align: left; font-weight: 500; position: sticky; left: 0;
  background: var(--card); white-space: normal; overflow-wrap: anywhere; max-width: 46vw;
  min-width: 8.5rem; }
.heat th:first-child { min-width: 0; white-space: nowrap; }
tr:last-child > td, tbody tr:last-child > th { border-bottom: 0; }
.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }
.words thead th { text-align: left; }
td.best { background: var(--mark); font-weight: 600; }
.heat td { text-align: center; background: rgba(var(--high), var(--share)); }
.heat thead th { text-align: center; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; margin: .25rem 0; }
.text span { background: rgba(var(--high), var(--share)); }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; padding-left: .8rem;
  border-left: 3px solid var(--line); }
.scale { display: inline-block; width: 8em; height: .9em; vertical-align: middle;
  border: 1px solid var(--line);
  background: linear-gradient(to right, rgba(var(--high), 0), rgba(var(--high), 1)); }
details { margin-top: .6rem; }
summary { cursor: pointer; color: var(--faint); font-size: .9rem; }
pre { overflow: auto; max-height: 28rem; font-size: .8rem; line-height: 1.4; margin: .5rem 0 0; }
.chart { margin: 0; font-size: .78rem; color: var(--faint); }
.plot { position: relative; height: 15rem; margin: .6rem .6rem 1.5rem 2.9rem;
  border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.plot svg { width: 100%; height: 100%; overflow: visible; display: block; }
.plot span { position: absolute; white-space: nowrap; }
.plot .x { top: 100%; transform: translate(-50%, .2rem); }
.plot .y { right: 100%; transform: translate(-.35rem, -50%); }
.x-label { text-align: center; }
.plot path { fill: none; stroke: var(--color); stroke-linecap: round; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.plot .line { stroke-width: 1.6; }
.plot .dots path { stroke-width: 7; }
.plot .dots.hidden path { stroke-opacity: 0; stroke-width: 12; }
.plot .dots path:hover { stroke-opacity: 1; stroke-width: 11; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin-top: .4rem; color: var(--ink);
  overflow-wrap: anywhere; }
.ink { --color: var(--ink); }
"""
  + '\n'.join(f'.c{i} {{ --color: var(--c{i}); }}' for i in range(8))
  + '\n'
)


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
  made = ''.join(
    f'<div class="card">{title}<div class="parts">'
    + ''.join(f'<div>{part}</div>\n' for part in parts)
    + '</div></div>\n'
    for title, parts in contents
  )
  return f'<div class="cards">{made}</div>\n'


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
  kind = ' class="words"' if of_words else ''
  return (
    f'<div class="scroll"><table{kind}><thead>{parts[0]}</thead>\n'
    f'<tbody>{"".join(parts[1:])}</tbody></table></div>\n'
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
  parts = []
  for index, row in enumerate(values):
    cells = ''.join(
      f'<td style="--share:{value / highest:.3f}">{value:{pattern}}</td>' for value in row
    )
    parts.append(f'<tr><th>{names[0]} {index}</th>{cells}</tr>\n')
  return (
    f'<div class="scroll"><table class="heat"><thead><tr><th>{names[1]}</th>{head}</tr></thead>\n'
    f'<tbody>{"".join(parts)}</tbody></table></div>\n'
  )


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


def scale(name: str, limits: tuple[float, float], pattern: str = '.2f') -> str:
  """Returns the legend of shaded text."""
  low, high = limits
  return (
    f'<p class="note">{html.escape(name)} {low:{pattern}} <span class="scale"></span> '
    f'{high:{pattern}}; ¶ is the start of a document, ↵ a line break.</p>\n'
  )
