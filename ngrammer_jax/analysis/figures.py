"""Figures, rendered without a display."""

from collections.abc import Collection, Iterable, Iterator
import contextlib
import io
import os
import pathlib
from typing import Any

from ngrammer_jax import errors, files


@contextlib.contextmanager
def saved_figure(path: pathlib.Path, panels: int = 1, width: float = 6.4) -> Iterator[Any]:
  """Yields the axes of a figure and saves the figure on exit; after an error it writes nothing.

  Args:
    path: image file; its suffix selects the format.
    panels: number of axes, side by side. For more than one, an array of axes is yielded.
    width: width in inches.

  Raises:
    BadInput: Matplotlib is not installed, or the file cannot be written.
  """
  files.check_reachable(path)
  try:
    import matplotlib
  except ImportError as error:
    raise errors.BadInput('figures need matplotlib: pip install matplotlib') from error
  matplotlib.use('agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, panels, figsize=(width, 3.6), layout='constrained')
  try:
    _check_writable(path, figure.canvas.get_supported_filetypes())
    yield axes
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format=path.suffix[1:])
    files.make_folder(path.parent)
    files.write(path, image.getvalue())
  except OSError as error:
    raise errors.BadInput(f'--figure={path} cannot be written: {error}') from error
  finally:
    pyplot.close(figure)


def token_labels(texts: Iterable[str]) -> list[str]:
  """Returns the texts of tokens with visible spaces, line breaks and tabs, as labels."""
  visible_characters = str.maketrans({' ': '_', '\n': '↵', '\t': '→', '$': r'\$'})
  return [text.translate(visible_characters) or '¶' for text in texts]


def _check_writable(path: pathlib.Path, formats: Collection[str]) -> None:
  """Raises BadInput for a path that cannot be written, before the analysis runs."""
  if path.is_dir():
    raise errors.BadInput(f'--figure={path} is a folder: name a file, such as {path}/figure.png')
  if path.suffix[1:] not in formats:
    raise errors.BadInput(f'--figure={path} has no suffix of an image: use .png, .svg or .pdf')
  if files.is_remote(path):
    return
  folder = next(parent for parent in path.absolute().parents if parent.exists())
  if not folder.is_dir() or not os.access(folder, os.W_OK):
    raise errors.BadInput(f'--figure={path} cannot be written: check the path and its permissions')
