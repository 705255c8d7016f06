"""Metrics, progress and goodput of a run; a loss that is not finite ends it."""

from collections.abc import Iterator
import contextlib
import logging
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, hosts, progress
from ngrammer_jax.data import streams
from ngrammer_jax.training import goodput, optimizers, throughput, writers
from ngrammer_jax.training import step as train_step


class Recorder:
  """Records the metrics of each call, one call late so that the device never waits.

  The values logged at a step are means over the call that ends with it, so that they depend on the
  step alone, wherever a run was interrupted. A context manager around the loop.
  """

  def __init__(
    self,
    config: experiment.Config,
    vocabulary_size: int,
    workdir: pathlib.Path,
    first_step: int,
    start_time: float | None = None,
  ):
    self._goodput = goodput.Goodput(workdir, time.monotonic() if start_time is None else start_time)
    t = self._training = config.training
    self._optimizer, self._first_step = config.optimizer, first_step
    self._fraction = optimizers.schedule(config.optimizer, t.steps)
    self._tokens = t.batch_size * t.segment_length
    self._writer = writers.MetricsWriter(workdir, first_step)
    self._model, self._vocabulary_size = config.model, vocabulary_size
    self._meter = throughput.Meter()
    self._bar = progress.Progress('training', t.steps, 'steps', initial=first_step, log_lines=False)
    self._pending: tuple[int, train_step.Metrics] | None = None
    self._measured_step, self._last_good = first_step, first_step

  def __enter__(self) -> 'Recorder':
    self._bar.__enter__()
    self._meter.resume()
    self._goodput.switch(goodput.TRAINING)
    return self

  def __exit__(self, *exception) -> None:
    self._bar.__exit__(*exception)
    self._goodput.close()
    self._writer.close()

  def add(self, done: int, metrics: train_step.Metrics) -> None:
    """Adds the metrics of the call that ends with step `done`, and logs those of the one before."""
    pending, self._pending = self._pending, (done, metrics)
    if pending is not None:
      self._log(*pending)

  def time_data_wait(self, batches: Iterator[streams.Segment]) -> Iterator[streams.Segment]:
    """Yields the batches, and counts the time until each of them comes."""
    return self._goodput.timed_items(batches, 'data')

  @contextlib.contextmanager
  def timed(self, phase: str) -> Iterator[None]:
    """Logs everything so far, then times a phase that is not training.

    Raises:
      BadInput: a loss or gradient was not finite.
    """
    pending, self._pending = self._pending, None
    if pending is not None:
      self._log(*pending)
    self._writer.sync()
    self._meter.pause()
    with self._goodput.timed(phase):
      yield
    self._meter.resume()

  def mark_saved(self, step: int) -> None:
    """Records that there is a checkpoint of a step."""
    self._last_good = step
    self._goodput.mark_saved()
    self._goodput.write(force=True)

  def validation(self, step: int, result: dict[str, Any], message: str) -> None:
    """Records the result of a validation, and logs a message about it."""
    numbers = {k: v for k, v in result.items() if isinstance(v, (int, float))}
    self._writer.scalars(step, {f'validation/{k}': v for k, v in numbers.items()})
    self._writer.sync()
    logging.info('step %s  validation%s', f'{step:,}', message)

  def _log(self, done: int, metrics: train_step.Metrics) -> None:
    metrics = jax.device_get(metrics)
    metrics = {'loss': metrics.pop('loss'), **metrics}  # first, for the reader
    metrics |= self._costs(metrics)
    calls = len(metrics['loss'])
    for offset in range(calls):
      values = {name: float(column[offset]) for name, column in metrics.items()}
      wrong = [f'{name} is {value}' for name, value in values.items() if not math.isfinite(value)]
      if wrong:
        raise errors.BadInput(
          self._not_finite(done - calls + offset + 1, done - calls, done, wrong)
        )
    rate = f', {self._meter.rate:,.0f} tokens/s' if math.isfinite(self._meter.rate) else ''
    self._bar.advance(calls, f'loss {metrics["loss"].mean():.4f}{rate}')
    if done % self._training.log_every and done != self._training.steps:
      return
    values = {name: float(column.mean()) for name, column in metrics.items()}
    values['learning_rate'] = float(self._optimizer.learning_rate * self._fraction(done - 1))
    values |= self._meter.measure((self._finished(done) - self._measured_step) * self._tokens)
    self._measured_step = self._finished(done)
    values['goodput'] = self._goodput.share()
    self._goodput.write()
    self._writer.scalars(done, values)
    left = (self._training.steps - done) * self._tokens / self._meter.rate
    self._bar.log(writers.format_line(done, self._training.steps, values, left))

  def _costs(self, metrics: train_step.Metrics) -> dict[str, Any]:
    """The FLOPs of a predicted token at each step of a call; the meter gets those of training."""
    sizes = self._model, self._vocabulary_size, self._training.segment_length
    if self._model.span is None:
      self._meter.flops = throughput.train_flops(*sizes)
      return {}
    layers = [metrics[f'span/average/layer_{i}'] for i in range(self._model.layers)]
    by_step = list(zip(*layers, strict=True))
    self._meter.flops = np.mean([throughput.train_flops(*sizes, spans) for spans in by_step])
    return {'flops_per_token': np.array([throughput.forward_flops(*sizes, s) for s in by_step])}

  def _finished(self, done: int) -> int:
    """The last step that the device has finished; the call after `done` may be ready too."""
    if self._pending is not None and self._pending[1]['loss'].is_ready():
      return self._pending[0]
    return max(done, self._measured_step)

  def _not_finite(self, step: int, first: int, last: int, wrong: list[str]) -> str:
    kept = f'step {self._last_good}' if self._last_good else 'none yet'
    return (
      f'training diverged at step {step}, between steps {first} and {last}: {"; ".join(wrong)}. '
      f'Last good checkpoint: {kept}. Lower optimizer.learning_rate, raise '
      f'optimizer.warmup_steps, or lower optimizer.clip_norm, with another --workdir'
    )


class ValidationHistory:
  """The validations that a run has recorded, the same for all processes.

  Args:
    workdir: run directory.
    best_metric: see `train_task.TrainTask`.
    patience: the same.
  """

  def __init__(self, workdir: pathlib.Path, best_metric: str, patience: int | None):
    self._workdir, self._name, self._patience = workdir, f'validation/{best_metric}', patience

  def value_at(self, step: int) -> float | None:
    """Returns the metric at a step, None if it is not recorded."""
    return hosts.broadcast(writers.read_value(self._workdir, step, self._name))

  def stops_at(self, step: int) -> bool:
    """Whether the last `patience` validations up to a step were no better than those before."""
    return hosts.broadcast(self._is_over(step))

  def _is_over(self, step):
    lines = (record for _, record in writers.read_lines(self._workdir))
    values = [r[self._name] for r in lines if self._name in r and r['step'] <= step]
    if self._patience is None or len(values) <= self._patience:
      return False
    return min(values[-self._patience :]) >= min(values[: -self._patience])
