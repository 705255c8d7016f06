"""Figures, rendered without a display: as image files, and as SVG for a web page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import html
import io
import pathlib
import re
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.system import result_files

PANEL_SIZE = 4.1, 2.8  # of a panel of a web page, in inches
SHADES = 'Blues'  # color map of values from 0 to 1
ON_LIGHT = '#101010'  # text on light shades, which a page does not turn with its own colors
ON_DARK = '#fefefe'  # text on dark shades
DARK_SHADE = 0.6  # values from which on a shade is dark
MAX_COLUMNS = 64  # characters in a line of shaded text
FONT_SIZE = 1 / 0.602  # at which a character of DejaVu Sans Mono is 1 wide
LINE_HEIGHT = 2.6  # of shaded text, in characters


@contextlib.contextmanager
def drawn_figure(
  contents: dict[pathlib.Path, str | bytes], path: pathlib.Path, panels: int = 1, width: float = 6.4
) -> Iterator[Any]:
  """Yields the axes of a figure, and adds its image to the contents on exit.

  Args:
    contents: contents of the files of a result, for `result_files.write_results`.
    path: writable image file; its suffix selects the format.
    panels: number of axes, side by side. For more than one, an array of axes is yielded. Axes
      without data are not drawn.
    width: width in inches.

  Raises:
    BadInput: the file cannot be written.
  """
  import matplotlib
  from matplotlib import figure as figures

  result_files.check_output_file('--figure', path, 'figure.png')
  figure = figures.Figure(figsize=(width, 3.6), layout='constrained')
  if path.suffix[1:] not in figure.canvas.get_supported_filetypes():
    raise errors.BadInput(f'--figure={path} has no suffix of an image: use .png, .svg or .pdf')
  yield figure.subplots(1, panels)
  _drop_empty_panels(figure)
  image = io.BytesIO()
  image_format = path.suffix[1:]
  no_date = {'svg': {'Date': None}, 'pdf': {'CreationDate': None}}.get(image_format)
  with matplotlib.rc_context({'svg.hashsalt': ''}):  # the same figure is the same bytes
    figure.savefig(image, dpi=150, format=image_format, metadata=no_date)
  contents[path] = image.getvalue()


def inline_svgs(name: str, plot: Callable[[Any], None], panels: int) -> list[str]:
  """Returns each panel with data as an SVG element of a web page.

  Its text has the font and the color of the page. White is `--card`, and color n of matplotlib is
  `--c<n>`, for light and dark pages. The same data give the same bytes.

  Args:
    name: name of the figure. Ids of the elements derive from it, so it must be unique on a page.
    plot: draws on an axes, or on several ones.
    panels: number of axes, each a separate figure.
  """
  import matplotlib
  from matplotlib import figure as figures

  options = {
    'font.family': 'sans-serif',
    'font.sans-serif': ['DejaVu Sans'],
    'svg.fonttype': 'none',
  }
  with matplotlib.rc_context(options):
    axes = []
    for _ in range(panels):
      axes.append(figures.Figure(figsize=PANEL_SIZE, layout='constrained').subplots())
    if panels > 1:
      plot(axes)
    else:
      plot(axes[0])
    return [_inline_svg(f'{name} {n}', panel) for n, panel in enumerate(axes) if panel.has_data()]


def _inline_svg(name: str, axes: Any) -> str:
  """Returns a panel as an SVG element."""
  import matplotlib
  from matplotlib import colors

  file = io.StringIO()
  with matplotlib.rc_context({'svg.hashsalt': name}):
    no_date = dict.fromkeys(('Creator', 'Date', 'Format', 'Type'))
    axes.figure.savefig(file, format='svg', metadata=no_date)
  variables = {color: f'var(--c{n})' for n, color in enumerate(colors.TABLEAU_COLORS.values())}
  variables |= {'#000000': 'currentColor', '#ffffff': 'var(--card)', '#cccccc': 'var(--line)'}
  svg = file.getvalue()
  svg = svg[svg.index('<svg') :]
  svg = re.sub('<defs>\\s*<style.*?</defs>', '', svg, count=1, flags=re.DOTALL)  # of the whole page
  svg = re.sub('<g id="[^"]*">', '<g>', svg)  # numbers that other figures have too

  def use_variable(match: re.Match[str]) -> str:
    return match[1] + variables.get(match[2], match[2])

  svg = re.sub('((?:fill|stroke): )(#[0-9a-f]{6})', use_variable, svg)
  axis_labels = [label for label in (axes.get_ylabel(), axes.get_xlabel()) if label]
  label = ' by '.join(axis_labels).replace('\n', ' ')
  return svg.replace('<svg', f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def set_title(axes: Any, title: str) -> None:
  """Sets the title of a figure above all of its panels."""
  np.ravel(axes)[0].figure.suptitle(title, fontsize=9)


def color(index: int) -> tuple[float, ...]:
  """Returns the color of a head, one of twenty."""
  from matplotlib import colormaps

  return colormaps['tab20'](index % 20)


def run_labels(workdirs: Sequence[pathlib.Path], labels: Sequence[str] | None) -> list[str]:
  """Returns the names of runs for legends: `labels`, or the shortest distinct ends of their paths.

  Raises:
    BadInput: there is not one label for each run.
  """
  if labels:
    if len(labels) != len(workdirs):
      raise errors.BadInput(
        f'--label is given {len(labels)} times, but --workdir {len(workdirs)} times: set one for '
        f'each, in the same order, or none'
      )
    return list(labels)
  paths = [str(workdir).rstrip('/').split('/') for workdir in workdirs]
  for n in range(1, max(map(len, paths))):
    ends = ['/'.join(path[-n:]) for path in paths]
    if len(set(ends)) == len(paths):
      return ends
  return [str(workdir) for workdir in workdirs]


def token_labels(texts: Iterable[str], space: str = '_') -> list[str]:
  """Returns the texts of tokens with visible line breaks and tabs, as labels.

  Args:
    texts: the texts; an empty text is a document start.
    space: character in place of a space.
  """
  visible_characters = str.maketrans({' ': space, '\n': '↵', '\t': '→', '$': r'\$'})
  return [text.translate(visible_characters) or '¶' for text in texts]


def draw_shaded_texts(
  axes: Any, titles: Sequence[str], texts: Sequence[str], values_PxS: np.ndarray
) -> Any:
  """Draws the same tokens once for each row of values, the darker the higher their value.

  Characters are outlines of width 1 in the coordinates of the panel, so they fill it.

  Args:
    axes: the panel.
    titles: titles of the rows of values.
    texts: texts of the tokens.
    values_PxS: their values, from 0 to 1.

  Returns:
    A mappable of the shades, for a color bar.
  """
  from matplotlib import cm, colors, patches

  shades = cm.ScalarMappable(colors.Normalize(0, 1), SHADES)
  labels = token_labels(texts, space=' ')
  positions = _lay_out(labels)
  y = 0.0
  for title, values_S in zip(titles, values_PxS, strict=True):
    _draw_characters(axes, 0, y, title, ON_LIGHT)
    for label, (line, column), value in zip(labels, positions, values_S, strict=True):
      middle = y + (line + 1) * LINE_HEIGHT
      corner = column, middle - LINE_HEIGHT / 2
      shade = shades.to_rgba(value)
      rectangle = patches.Rectangle(corner, len(label), 0.9 * LINE_HEIGHT, color=shade, linewidth=0)
      axes.add_patch(rectangle)
      color = ON_LIGHT
      if value > DARK_SHADE:
        color = ON_DARK
      _draw_characters(axes, column, middle, label, color)
    y += (positions[-1][0] + 2.5) * LINE_HEIGHT
  axes.set(xlim=(0, MAX_COLUMNS), ylim=(y - LINE_HEIGHT, -LINE_HEIGHT), aspect='equal')
  axes.set_axis_off()
  return shades


def _draw_characters(axes: Any, x: float, y: float, text: str, color: str) -> None:
  """Draws a text with characters of width 1."""
  from matplotlib import font_manager, patches, textpath, transforms

  if not text.strip():
    return  # matplotlib has no outline of spaces alone
  font = font_manager.FontProperties(family='DejaVu Sans Mono')
  outline = textpath.TextPath((0, 0), text, size=FONT_SIZE, prop=font)
  to_place = transforms.Affine2D().scale(1, -1).translate(x, y + FONT_SIZE / 3)
  axes.add_patch(patches.PathPatch(to_place.transform_path(outline), color=color, linewidth=0))


def _lay_out(labels: Sequence[str]) -> list[tuple[int, int]]:
  """Returns the line and the first column of each label, in lines of MAX_COLUMNS characters."""
  places = []
  line = 0
  column = 0
  for label in labels:
    if column and column + len(label) > MAX_COLUMNS:
      line += 1
      column = 0
    places.append((line, column))
    column += len(label)
  return places


def _drop_empty_panels(figure: Any) -> None:
  """Removes the panels without data; a single remaining panel fills the figure."""
  filled = [panel for panel in figure.axes if panel.has_data()]
  if filled:
    for panel in set(figure.axes) - set(filled):
      panel.remove()
  if len(filled) == 1:
    filled[0].set_subplotspec(filled[0].get_gridspec()[:])
