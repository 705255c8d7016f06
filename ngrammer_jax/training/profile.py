"""A profiler trace of some steps, for TensorBoard.

<workdir>/tensorboard/plugins/profile   shown by `pip install tensorboard-plugin-profile`
"""

from collections.abc import Callable
import logging
import pathlib
from typing import Any

import jax

from ngrammer_jax import errors


def check_steps(steps: range | None, total: int) -> None:
  """Raises BadInput if the steps to trace begin after the last step of a run."""
  if steps and steps.start >= total:
    raise errors.BadInput(
      f'--trace={steps.start}:{steps.stop} is beyond the run: its steps are 0 to {total - 1} '
      f'(training.steps={total})'
    )


class Trace:
  """Traces whole calls of the training step. A context manager around the loop.

  Args:
    steps: steps to trace; None disables the trace. Steps before a resume are not traced.
    workdir: run directory.
    synchronize: waits for the computations in flight; devices run behind the loop.
  """

  def __init__(self, steps: range | None, workdir: pathlib.Path, synchronize: Callable[[], Any]):
    self._steps = steps or range(0)
    self._synchronize = synchronize
    self._folder = workdir / 'tensorboard'
    self._is_tracing = False
    self._has_traced = False

  def __enter__(self) -> 'Trace':
    return self

  def on_call(self, step: int) -> None:
    """Starts or stops the trace before the call that begins with a step."""
    if self._is_tracing and step >= self._steps.stop:
      self._stop()
    elif not self._is_tracing and step in self._steps:
      logging.info('step %s  tracing, into %s/plugins/profile', f'{step:,}', self._folder)
      self._synchronize()
      jax.profiler.start_trace(str(self._folder))
      self._is_tracing = True
      self._has_traced = True

  def _stop(self) -> None:
    self._synchronize()
    jax.profiler.stop_trace()
    self._is_tracing = False

  def __exit__(self, kind, *exception) -> None:
    if self._is_tracing and kind is None:
      self._stop()
    elif self._is_tracing:
      jax.profiler.stop_trace()
    elif self._steps and not self._has_traced:
      logging.warning(
        '--trace=%s:%s: no trace, because no call began in these steps',
        self._steps.start,
        self._steps.stop,
      )
