"""Records metrics, progress and goodput of a run; stops it if the loss is not finite.

Extra metrics of a loss (see `losses.Loss`) are recorded at steps where they are finite, without
further checks.
"""

from collections.abc import Callable, Iterator
import contextlib
import logging
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.optimizers import schedule
from ngrammer_jax.system import progress
from ngrammer_jax.training import flops, losses, metrics
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training.records import goodput, writers


class Recorder:
  """Records the metrics of each call, one call late so that the device never waits.

  The values logged at a step are means over the call that ends with it, so they do not depend on
  interruptions. A context manager around the loop.

  Args:
    last_saved: formats the newest checkpoint on disk, for errors.
  """

  def __init__(
    self,
    config: experiment.Config,
    programs: training_programs.Programs,
    workdir: pathlib.Path,
    first_step: int,
    start_time: float,
    last_saved: Callable[[], str],
  ):
    steps = config.training.steps
    self._config = config
    self._programs = programs
    self._last_saved = last_saved
    self._learning_rate_fraction = schedule.make(config.optimizer, steps)
    self._goodput = goodput.Goodput(workdir, start_time)
    self._writer = writers.MetricsWriter(workdir, first_step, config)
    self._peak_flops = _peak_flops()
    self._rate = math.nan  # tokens per second
    self._rates_measured = 0
    self._bar = progress.Progress('training', steps, 'steps', initial=first_step, log_lines=False)
    self._pending: tuple[int, metrics.Metrics] | None = None
    self._measured_step = first_step
    self._pause_seconds: dict[str, float] = {}  # of the last pause of each phase
    self._warned: set[str] = set()  # names of non-finite extra metrics

  def __enter__(self) -> 'Recorder':
    self._bar.__enter__()
    self._goodput.switch(goodput.TRAINING)
    self._goodput.lap()
    return self

  def __exit__(self, *exception) -> None:
    self._bar.__exit__(*exception)
    self._goodput.close()
    self._writer.close()

  def add(self, end: int, metrics: metrics.Metrics) -> None:
    """Adds the metrics of the call that ends with a step, and logs those of the call before."""
    self._log_pending((end, metrics))

  def time_data_wait(self, batches: Iterator[Any]) -> Iterator[Any]:
    """Yields the batches, and counts the time of waiting for them."""
    return self._goodput.timed_items(batches, goodput.DATA)

  @contextlib.contextmanager
  def timed(self, phase: str) -> Iterator[None]:
    """Logs all pending metrics, then times a phase other than training.

    Raises:
      BadInput: a loss or gradient was not finite.
    """
    self._log_pending(None)
    self._writer.sync()
    start_time = time.monotonic()
    with self._goodput.timed(phase):
      yield
    self._pause_seconds[phase] = time.monotonic() - start_time

  def mark_saved(self) -> None:
    """Records that a checkpoint was started."""
    self._goodput.mark_saved()
    self._goodput.write(force=True)

  def validation(self, step: int, result: dict[str, Any], message: str) -> None:
    """Records the result of a validation, and logs a message about it."""
    numbers = {}
    for name, value in result.items():
      if isinstance(value, (int, float)):
        numbers[f'validation/{name}'] = value
    self._writer.scalars(step, numbers)
    self._writer.sync()
    logging.info('step %s  validation%s', f'{step:,}', message)

  def _log_pending(self, new: tuple[int, metrics.Metrics] | None) -> None:
    """Logs the pending call, and replaces it by a new one."""
    pending = self._pending
    self._pending = new
    if pending is not None:
      self._log(*pending)

  def _log(self, end: int, metrics: metrics.Metrics) -> None:
    """Checks the metrics of the call that ends with a step, and logs them if due."""
    metrics = jax.device_get(metrics)
    metrics = {'loss': metrics.pop('loss'), **metrics}  # the loss comes first
    t = self._config.training
    if self._config.model.span is not None:
      metrics['flops_per_token'] = self._forward_flops(metrics)
    self._check_finite(end, metrics)
    rate = ''
    if math.isfinite(self._rate):
      rate = f', {self._rate:,.0f} tokens/s'
    self._bar.advance(len(metrics['loss']), f'loss {metrics["loss"].mean():.4f}{rate}')
    if end % t.log_every and end != t.steps:
      return
    values = self._finite_means(end, metrics)
    fraction = self._learning_rate_fraction(end - 1)
    values['learning_rate'] = float(self._config.optimizer.learning_rate * fraction)
    self._measure_rate(end)
    values['tokens_per_second'] = self._rate  # measured now, or before if the device was ahead
    if self._peak_flops is not None:  # a step costs three forward passes
      forward_flops = float(np.mean(self._forward_flops(metrics)))
      values['mfu'] = self._rate * 3 * forward_flops / self._peak_flops
    values['goodput'] = self._goodput.share()
    self._goodput.write()
    self._writer.scalars(end, values)
    self._bar.log(writers.format_line(end, t.steps, values, self._seconds_left(end)))

  def _measure_rate(self, end: int) -> None:
    """Measures the tokens per second since the last measurement, if a step has finished."""
    finished = self._finished_step(end)
    if finished <= self._measured_step:
      return
    tokens = (finished - self._measured_step) * self._config.training.tokens_per_step
    self._rate = tokens / max(self._goodput.lap(), 1e-9)
    self._measured_step = finished
    self._rates_measured += 1

  def _finished_step(self, end: int) -> int:
    """Returns the last step finished by the device, possibly after `end`."""
    if self._pending is not None and self._pending[1]['loss'].is_ready():
      return self._pending[0]
    return max(end, self._measured_step)

  def _seconds_left(self, end: int) -> float | None:
    """Returns the seconds of the steps after `end` and their pauses; None: unknown yet.

    A pause for an evaluation or a checkpoint is estimated by the last one, initially 0.
    """
    if self._rates_measured < 2:  # the first rate includes the start of the device
      return None
    t = self._config.training
    seconds = (t.steps - end) * t.tokens_per_step / self._rate
    # The pauses at `end` itself are yet to come.
    for phase, every in (('evaluation', t.evaluate_every), ('checkpoints', t.checkpoint_every)):
      seconds += t.count_due(end, every) * self._pause_seconds.get(phase, 0)
    return seconds

  def _forward_flops(self, metrics: metrics.Metrics) -> np.ndarray:
    """Returns the FLOPs of a token's forward pass, at each step of a call if spans are learned."""
    if self._config.model.span is None:
      return self._programs.flops.forward()
    layers = range(self._config.model.layers)
    spans = [metrics[f'span/average/layer_{layer}'] for layer in layers]
    return self._programs.flops.forward(np.stack(spans, axis=-1))

  def _finite_means(self, end: int, metrics: metrics.Metrics) -> dict[str, float]:
    """Returns the mean of each metric over a call, without non-finite ones.

    After `_check_finite` only extra metrics of the loss can be non-finite. JSON cannot represent
    them.
    """
    means = {}
    for name, column in metrics.items():
      mean = float(column.mean())
      if math.isfinite(mean):
        means[name] = mean
      elif name not in self._warned:
        self._warned.add(name)
        message = 'step %s  %s is %s: not recorded at steps where it is not finite'
        logging.warning(message, f'{end:,}', name, mean)
    return means

  def _check_finite(self, end: int, metrics: metrics.Metrics) -> None:
    """Raises BadInput for the first step of a call with a non-finite loss or gradient.

    Extra metrics of the loss are not checked, since training does not use them.
    """
    first = end - len(metrics['loss'])
    checked = {}
    for name, column in metrics.items():
      if not name.startswith(losses.VALUE_PREFIX):
        checked[name] = column
    for index, step in enumerate(range(first + 1, end + 1)):
      values = {name: float(column[index]) for name, column in checked.items()}
      wrong = [f'{name} is {value}' for name, value in values.items() if not math.isfinite(value)]
      if wrong:
        raise errors.BadInput(
          f'training diverged at step {step}, between steps {first} and {end}: {"; ".join(wrong)}. '
          f'Last good checkpoint: {self._last_saved()}. Lower optimizer.learning_rate, raise '
          f'optimizer.warmup_steps, or lower optimizer.clip_norm, with another --workdir'
        )


def _peak_flops() -> float | None:
  """Returns the peak FLOP/s of all devices together; None if unknown."""
  of_device = flops.peak_flops(jax.devices()[0].device_kind)
  if of_device is None:
    return None
  return of_device * jax.device_count()
