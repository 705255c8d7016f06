"""Figures, rendered without a display."""

from collections.abc import Iterator
import contextlib
import io
import pathlib
from typing import Any

from ngrammer_jax import errors, files


@contextlib.contextmanager
def saved_figure(path: pathlib.Path, panels: int = 1, width: float = 6.4) -> Iterator[Any]:
  """Yields the axes of a figure and saves the figure on exit.

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

  def save():
    try:
      files.make_folder(path.parent)
      if not files.is_remote(path):
        figure.savefig(path, dpi=150)
        return
      image = io.BytesIO()
      figure.savefig(image, dpi=150, format=path.suffix[1:])
      files.write(path, image.getvalue())
    except (OSError, ValueError) as error:
      raise errors.BadInput(f'--figure={path} cannot be written: {error}') from error

  try:
    save()  # reports an unwritable path before the analysis runs
    yield axes
    save()
  finally:
    pyplot.close(figure)
