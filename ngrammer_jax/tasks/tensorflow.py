"""TensorFlow and seqio, loaded when a task is used and never on an accelerator."""

from collections.abc import Iterator
import contextlib
import importlib
import os
import sys
from typing import Any

from ngrammer_jax import errors


def load() -> tuple[Any, Any]:
  """The modules tensorflow and seqio.

  TensorFlow would take all memory of a GPU that JAX is about to use: it sees none.

  Raises:
    BadInput: one of them is not installed.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  try:
    with _silent():
      tensorflow = importlib.import_module('tensorflow')
      for kind in ('GPU', 'TPU'):
        tensorflow.config.set_visible_devices([], kind)
      return tensorflow, importlib.import_module('seqio')
  except ImportError as error:
    raise errors.BadInput(
      f'tasks need seqio and TensorFlow ({error}): pip install "seqio>=0.0.20" '
      f'"tensorflow-datasets>=4.9.9" importlib_resources, on Python 3.11 to 3.13 and not Windows'
    ) from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
  """Keeps what TensorFlow says of missing GPUs, from C++, out of the log."""
  sys.stderr.flush()
  kept = os.dup(2)
  with open(os.devnull, 'w', encoding='utf-8') as nothing:
    os.dup2(nothing.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
