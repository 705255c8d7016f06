"""Figures, rendered without a display."""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import io
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.system import files


@contextlib.contextmanager
def saved_figure(path: pathlib.Path, panels: int = 1, width: float = 6.4) -> Iterator[Any]:
  """Yields the axes of a figure and saves the figure on exit; after an error it writes nothing.

  Args:
    path: image file; its suffix selects the format.
    panels: number of axes, side by side. For more than one, an array of axes is yielded. Those
      without data are not drawn.
    width: width in inches.

  Raises:
    BadInput: the file cannot be written.
  """
  import matplotlib
  from matplotlib import pyplot

  files.check_output_file('--figure', path, 'figure.png')
  matplotlib.use('agg')

  figure, axes = pyplot.subplots(1, panels, figsize=(width, 3.6), layout='constrained')
  try:
    if path.suffix[1:] not in figure.canvas.get_supported_filetypes():
      raise errors.BadInput(f'--figure={path} has no suffix of an image: use .png, .svg or .pdf')
    yield axes
    _drop_empty_panels(figure)
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format=path.suffix[1:])
    files.make_folder(path.parent)
    files.write(path, image.getvalue())
  except OSError as error:
    raise errors.BadInput(f'--figure={path} cannot be written: {error}') from error
  finally:
    pyplot.close(figure)


def set_title(axes: Any, title: str) -> None:
  """Sets the title of a figure above all of its panels."""
  np.ravel(axes)[0].figure.suptitle(title, fontsize=9)


def color(index: int) -> tuple[float, ...]:
  """Returns the color of a head, one of twenty."""
  from matplotlib import colormaps

  return colormaps['tab20'](index % 20)


def run_labels(workdirs: Sequence[pathlib.Path], labels: Sequence[str] | None) -> list[str]:
  """Returns the names of runs for legends: those given, else the shortest ends of their paths.

  Raises:
    BadInput: there is not one label for each run.
  """
  if labels:
    if len(labels) != len(workdirs):
      raise errors.BadInput(
        f'--label is there {len(labels)} times, but --workdir {len(workdirs)} times: set one for '
        f'each, in the same order, or none'
      )
    return list(labels)
  paths = [str(workdir).rstrip('/').split('/') for workdir in workdirs]
  for n in range(1, max(map(len, paths))):
    ends = ['/'.join(path[-n:]) for path in paths]
    if len(set(ends)) == len(paths):
      return ends
  return [str(workdir) for workdir in workdirs]


def token_labels(texts: Iterable[str]) -> list[str]:
  """Returns the texts of tokens with visible spaces, line breaks and tabs, as labels."""
  visible_characters = str.maketrans({' ': '_', '\n': '↵', '\t': '→', '$': r'\$'})
  return [text.translate(visible_characters) or '¶' for text in texts]


def _drop_empty_panels(figure):
  """Removes the panels without data; if one is left, it fills the figure."""
  filled = [panel for panel in figure.axes if panel.has_data()]
  if filled:
    for panel in set(figure.axes) - set(filled):
      panel.remove()
  if len(filled) == 1:
    filled[0].set_subplotspec(filled[0].get_gridspec()[:])
