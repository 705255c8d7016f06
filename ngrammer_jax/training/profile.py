"""A trace of some steps, for TensorBoard: what ran on the devices, and how long.

<workdir>/tensorboard/plugins/profile   seen with `pip install tensorboard-plugin-profile`
"""

from collections.abc import Callable
import logging
import pathlib
from typing import Any, NamedTuple

import jax


class Steps(NamedTuple):
  """The first step to trace, and that before which it ends."""

  first: int
  last: int


class Trace:
  """Traces the calls with some steps, as a whole. A context manager around the loop.

  Args:
    steps: to trace, None: none. Those of before a resume are not.
    workdir: of the run.
    settle: waits for what is computed: devices are behind the loop.
  """

  def __init__(self, steps: Steps | None, workdir: pathlib.Path, settle: Callable[[], Any]):
    self._steps, self._folder, self._settle = steps, workdir / 'tensorboard', settle
    self._going = self._done = False

  def __enter__(self) -> 'Trace':
    return self

  def reach(self, step: int) -> None:
    """The next call begins with this step."""
    if self._steps is None or self._done:
      return
    if self._going and step >= self._steps.last:
      self._stop()
    elif not self._going and self._steps.first <= step < self._steps.last:
      logging.info('step %s  tracing, into %s/plugins/profile', f'{step:,}', self._folder)
      self._settle()
      jax.profiler.start_trace(str(self._folder))
      self._going = True

  def _stop(self) -> None:
    self._settle()
    jax.profiler.stop_trace()
    self._going, self._done = False, True

  def __exit__(self, kind, *exception) -> None:
    if self._going and kind is None:
      self._stop()
    elif self._going:
      jax.profiler.stop_trace()
    elif self._steps is not None and not self._done:
      logging.warning('--trace=%s:%s: no trace, for none of these steps began a call', *self._steps)
