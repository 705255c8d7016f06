"""Lazy import of TensorFlow and seqio, without accelerators."""

from collections.abc import Iterator
import contextlib
import importlib
import os
import sys
from typing import Any

from ngrammer_jax import errors


def load() -> tuple[Any, Any]:
  """Imports and returns the modules tensorflow and seqio.

  Accelerators are hidden from TensorFlow: it would reserve all GPU memory, which JAX needs.

  Raises:
    BadInput: one of the modules is not installed.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  try:
    with _suppress_stderr():
      tensorflow = importlib.import_module('tensorflow')
      for kind in ('GPU', 'TPU'):
        tensorflow.config.set_visible_devices([], kind)
      return tensorflow, importlib.import_module('seqio')
  except ImportError as error:
    raise errors.BadInput(
      f'SuperGLUE and C4 of TFDS need seqio and TensorFlow ({error}): pip install '
      f"'ngrammer_jax[tasks]', on Python 3.11 to 3.13 and not Windows"
    ) from error


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
  """Suppresses warnings about missing GPUs, which TensorFlow writes to stderr from C++."""
  sys.stderr.flush()
  saved_stderr = os.dup(2)
  with open(os.devnull, 'w', encoding='utf-8') as devnull:
    os.dup2(devnull.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(saved_stderr, 2)
    os.close(saved_stderr)
