"""The training loop: data, devices, state; then calls of steps, validations and checkpoints."""

from collections.abc import Callable, Iterator
import logging
import pathlib
import time

import jax
import numpy as np

import ngrammer_jax
from ngrammer_jax import config as experiment
from ngrammer_jax import errors, hosts, sharding
from ngrammer_jax.data import prefetch, streams
from ngrammer_jax.layers import flash
from ngrammer_jax.models import precision
from ngrammer_jax.training import (
  checkpoint_writer,
  checkpoints,
  optimizers,
  preemption,
  profile,
  programs,
  recorder,
  train_task,
  watchdog,
  workdirs,
)
from ngrammer_jax.training import state as train_state


def train(
  config: experiment.Config,
  workdir: pathlib.Path,
  make_task: Callable[[experiment.Config], train_task.TrainTask] = train_task.CorpusTask,
  watchdog_minutes: float = watchdog.DEFAULT_MINUTES,
  trace: profile.StepRange | None = None,
) -> bool:
  """Trains until all steps are done; resumes from the newest checkpoint of the run.

  Args:
    config: the experiment.
    workdir: run directory.
    make_task: makes the data and the validation of a config.
    watchdog_minutes: minutes without progress before the stacks of all threads are logged.
    trace: steps to trace with the profiler.

  Returns:
    Whether there was anything left to train.

  Raises:
    BadInput: the input cannot work, or the loss is no longer finite.
  """
  t, start_time = config.training, time.monotonic()

  # Data: checked and tokenised before any device is touched.
  with hosts.collective_errors():
    workdirs.check(workdir, config)
    task = make_task(config)
    workdirs.check_text(workdir, config, task.content_hash)

  # Devices and programs.
  mesh = _make_mesh(config)
  run = programs.Programs(config, task.vocabulary.size, mesh)
  with (
    preemption.SignalHandler() as signals,
    workdirs.lock_workdir(workdir, config, task),
    watchdog.Watchdog(workdir, watchdog_minutes) as watch,
    checkpoint_writer.CheckpointWriter(workdir, t.keep_checkpoints) as writer,
  ):

    def check_preemption(_=0):
      watch.beat()
      signals.check()

    # State: the newest intact checkpoint, or a new one.
    restored = checkpoints.restore_newest(workdir, run.abstract, set_aside=True)
    first_step, state = restored or (0, task.initial_state(run.create()))
    _log_summary(config, workdir, run.labels, state, is_new=restored is None)
    task.log_summary()
    history = recorder.ValidationHistory(workdir, task.best_metric, task.patience)
    validation = history.value_at(first_step)
    if restored and validation is not None:
      hosts.on_primary(writer.set_validation, first_step, validation)
    if validation is not None and (first_step >= t.steps or history.stops_at(first_step)):
      return False
    hosts.on_primary(writer.check_space, state)

    # Training.
    calls = list(t.calls(first_step))
    with (
      recorder.Recorder(config, run, workdir, first_step, start_time) as record,
      sharding.use(mesh),
      prefetch.Prefetcher(_batches(task, config, mesh, calls)) as batches,
      profile.Trace(trace, workdir, lambda: jax.block_until_ready(state)) as tracing,
    ):

      def validate(step):
        with record.timed('evaluation'):
          result = task.validate(run, state, check_preemption)
          record.validation(step, result, task.format_metrics(result))
        return result[task.best_metric]

      if _is_due(first_step, t.evaluate_every, t.steps) and validation is None:
        validation = validate(first_step)  # the run was stopped before it
        hosts.on_primary(writer.set_validation, first_step, validation)
        if history.stops_at(first_step):
          return False
      for (start, end), segments in zip(calls, record.time_data_wait(batches), strict=True):
        tracing.on_call(start)
        if not run.ready:
          check_preemption()
          with record.timed('compilation'):
            run.compile(state, segments)
          check_preemption()
        state, metrics = run.call(state, segments, end - start)
        record.add(end, metrics)
        # The checkpoint comes last: whoever resumes from it finds the rest of its step recorded.
        # It comes after the metrics too: no state is saved whose loss was not finite.
        interruption = validation = None
        try:
          check_preemption()
          if _is_due(end, t.evaluate_every, t.steps):
            validation = validate(end)
        except errors.Interrupted as signal:
          interruption = signal
        stops = validation is not None and history.stops_at(end)
        if interruption or stops or _is_due(end, t.checkpoint_every, t.steps):
          with record.timed('checkpoints'):
            writer.save(end, state, validation)
            record.mark_saved(end)
        if interruption:
          raise interruption
        if stops:
          logging.info(
            'step %s  stopped early: no better validation in %s', f'{end:,}', task.patience
          )
          break
  return True


def _is_due(step: int, every: int, steps: int) -> bool:
  """Whether an event every so many steps (0: never), and after the last, is due at a step."""
  return step == steps or bool(step and every and step % every == 0)


def _make_mesh(config) -> jax.sharding.Mesh:
  """Returns the mesh of all devices."""
  m, t = config.mesh, config.training
  mesh = sharding.make_mesh(m.data, m.fsdp, m.model)
  sharding.check_batch('training.batch_size', t.batch_size, mesh, t.parts)
  _check_kernel(config, mesh)
  logging.info(
    'ngrammer_jax %s on %d %s, mesh %s',
    ngrammer_jax.__version__,
    jax.device_count(),
    jax.devices()[0].device_kind,
    ' x '.join(f'{k} {v}' for k, v in mesh.shape.items()),
  )
  return mesh


def _check_kernel(config, mesh) -> None:
  """Raises BadInput if the kernel of the config cannot attend to the segments of training."""
  m, t = config.model, config.training
  shape = t.batch_size // t.parts, t.segment_length, m.heads, m.width // m.heads
  with sharding.use(mesh):
    reason = flash.why_not(m.kernel, shape, precision.compute_dtype(m)) if m.kernel else None
  if reason is not None:
    raise errors.BadInput(
      f'model.kernel={m.kernel!r} {reason}: model.kernel=None selects automatically'
    )


def _log_summary(config, workdir, labels, state, is_new) -> None:
  """Logs the size of the model."""
  if is_new and (workdir / 'metrics.jsonl').exists():
    logging.info('%s has no checkpoint: starting again from the first step', workdir)
  parts = [f'{train_state.count_elements(state.params):,} parameters']
  if config.model.ngram is not None:
    tables = optimizers.leaves_by_label(labels, state.params)['ngram_table']
    parts.append(f'{train_state.count_elements(tables):,} of them in n-gram tables')
    parts.append(f'{train_state.count_elements(state.codebook):,} codebook values')
  logging.info('model: %s', ', '.join(parts))


def _batches(task, config, mesh, calls) -> Iterator[streams.Segment]:
  """Yields the segments of each call, stacked [steps, B, T], on the devices.

  The last is repeated if a call has fewer steps than its program.
  """
  t = config.training
  for first, end in calls:

    def stack(rows, first=first, end=end):
      segments = [task.segment(step, rows) for step in range(first, end)]
      segments += [segments[-1]] * (t.segments_per_call - len(segments))
      return streams.map_segments(lambda *parts: np.stack(parts), *segments)

    yield sharding.global_rows(mesh, t.batch_size, stack, axis=1)
