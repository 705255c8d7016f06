"""A profiler trace of some steps, for TensorBoard.

<workdir>/tensorboard/plugins/profile   shown by `pip install tensorboard-plugin-profile`
"""

from collections.abc import Callable
import logging
import pathlib
from typing import Any, NamedTuple

import jax

from ngrammer_jax import errors


class StepRange(NamedTuple):
  """The first step to trace, and the step before which the trace ends."""

  first: int
  last: int


def check(steps: StepRange | None, total: int) -> None:
  """Raises BadInput if the steps to trace begin after the last step of a run."""
  if steps is not None and steps.first >= total:
    raise errors.BadInput(
      f'--trace={steps.first}:{steps.last} is beyond the run: its steps are 0 to {total - 1} '
      f'(training.steps={total})'
    )


class Trace:
  """Traces whole calls of the training step. A context manager around the loop.

  Args:
    steps: steps to trace; None disables the trace. Steps before a resume are not traced.
    workdir: run directory.
    synchronize: waits for the computations in flight; devices run behind the loop.
  """

  def __init__(
    self, steps: StepRange | None, workdir: pathlib.Path, synchronize: Callable[[], Any]
  ):
    self._steps, self._folder, self._synchronize = steps, workdir / 'tensorboard', synchronize
    self._is_tracing = self._is_done = False

  def __enter__(self) -> 'Trace':
    return self

  def on_call(self, step: int) -> None:
    """Starts or stops the trace before the call that begins with a step."""
    if self._steps is None or self._is_done:
      return
    if self._is_tracing and step >= self._steps.last:
      self._stop()
    elif not self._is_tracing and self._steps.first <= step < self._steps.last:
      logging.info('step %s  tracing, into %s/plugins/profile', f'{step:,}', self._folder)
      self._synchronize()
      jax.profiler.start_trace(str(self._folder))
      self._is_tracing = True

  def _stop(self) -> None:
    self._synchronize()
    jax.profiler.stop_trace()
    self._is_tracing, self._is_done = False, True

  def __exit__(self, kind, *exception) -> None:
    if self._is_tracing and kind is None:
      self._stop()
    elif self._is_tracing:
      jax.profiler.stop_trace()
    elif self._steps is not None and not self._is_done:
      logging.warning('--trace=%s:%s: no trace, because no call began in these steps', *self._steps)
