"""Figures, drawn without a screen."""

from collections.abc import Iterator
import contextlib
import io
import pathlib
from typing import Any

from ngrammer_jax import errors, files


@contextlib.contextmanager
def saved(path: pathlib.Path, panels: int = 1, width: float = 6.4) -> Iterator[Any]:
  """Axes to draw in, one for each panel side by side; what was drawn is saved at the end.

  Raises:
    BadInput: Matplotlib is not installed, or the file cannot be written.
  """
  files.reach(path)
  try:
    import matplotlib
  except ImportError as error:
    raise errors.BadInput('figures need matplotlib: pip install matplotlib') from error
  matplotlib.use('agg')
  from matplotlib import pyplot

  canvas, axes = pyplot.subplots(1, panels, figsize=(width, 3.6), layout='constrained')

  def save():
    try:
      files.make(path.parent)
      if not files.stored(path):
        canvas.savefig(path, dpi=150)
        return
      drawn = io.BytesIO()
      canvas.savefig(drawn, dpi=150, format=path.suffix[1:])
      files.write(path, drawn.getvalue())
    except (OSError, ValueError) as error:
      raise errors.BadInput(f'--figure={path} cannot be written: {error}') from error

  try:
    save()  # while nothing is wasted yet
    yield axes
    save()
  finally:
    pyplot.close(canvas)
