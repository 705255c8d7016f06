"""Training, as one straight story."""

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
  record,
  train_task,
  watchdog,
  workdirs,
)
from ngrammer_jax.training import state as train_state


def train(
  config: experiment.Config,
  workdir: pathlib.Path,
  make: Callable[[experiment.Config], train_task.TrainTask] = train_task.CorpusTask,
  watchdog_minutes: float = watchdog.DEFAULT_MINUTES,
  trace: profile.StepRange | None = None,
) -> bool:
  """Trains until all steps are done; goes on where an earlier run of the same command stopped.

  Args:
    config: the experiment.
    workdir: where everything of the run is kept.
    make: what is trained on, of the config.
    watchdog_minutes: without progress after which the log gets the stacks of all threads.
    trace: steps to take a trace of.

  Returns:
    Whether there was anything left to train.

  Raises:
    BadInput: the input cannot work, or the loss is no longer finite.
  """
  t, began = config.training, time.monotonic()

  # Data: found, checked and tokenised before any device is touched.
  with hosts.collective_errors():
    workdirs.check(workdir, config)
    given = make(config)
    V = given.vocabulary.size
    workdirs.check_text(workdir, config, given.content_hash)

  # Devices.
  mesh = _mesh(config)

  # Model and state.
  run = programs.Programs(config, V, mesh)
  with (
    preemption.SignalHandler() as stop,
    workdirs.lock_workdir(workdir, config, given),
    watchdog.Watchdog(workdir, watchdog_minutes) as watch,
    checkpoint_writer.CheckpointWriter(workdir, t.keep_checkpoints) as saved,
  ):

    def alive(_=0):
      watch.beat()
      stop.check()

    found = checkpoints.restore_newest(workdir, run.abstract(), set_aside=True)
    first_step, state = found or (0, given.initial_state(run.create()))
    if found is None and (workdir / 'metrics.jsonl').exists():
      logging.info('%s has no checkpoint: starting again from the first step', workdir)
    _describe(config, state)
    given.log_summary()
    validation = hosts.broadcast(record.validation_of(workdir, first_step, given.best_metric))
    if found and validation is not None:
      saved.set_validation(first_step, validation)
    over = lambda at: hosts.broadcast(record.over(workdir, at, given.best_metric, given.patience))
    if validation is not None and (first_step >= t.steps or over(first_step)):
      return False
    hosts.on_primary(saved.check_space, state)

    # Training.
    calls = list(t.calls(first_step))
    with (
      record.Record(config, V, workdir, first_step, began) as tell,
      sharding.use(mesh),
      prefetch.Prefetcher(_batches(given, config, mesh, calls)) as batches,
      profile.Trace(trace, workdir, lambda: jax.block_until_ready(state)) as tracing,
    ):

      def validate(step):
        with tell.paused('evaluation'):
          result = given.validate(run, state, alive)
          tell.validation(step, result, given.format_metrics(result))
        return result[given.best_metric]

      if _due(first_step, t.evaluate_every, t.steps) and validation is None:
        saved.set_validation(first_step, validate(first_step))  # the run was stopped before that
        if over(first_step):
          return False
      for (start, done), segments in zip(calls, tell.waited_for(batches), strict=True):
        tracing.on_call(start)
        if not run.ready:
          alive()
          with tell.paused('compilation'):
            run.compile(state, segments)
          alive()
        state, metrics = run.call(state, segments, done - start)
        tell.add(done, metrics)
        # A checkpoint is the last of what happens at a step: whoever resumes there finds the
        # rest on record. And after the metrics: no state is saved that was not finite.
        interrupted, validation = None, None
        try:
          alive()
          if _due(done, t.evaluate_every, t.steps):
            validation = validate(done)
        except errors.Interrupted as signal:
          interrupted = signal
        ended = validation is not None and over(done)
        if interrupted or ended or _due(done, t.checkpoint_every, t.steps):
          with tell.paused('checkpoints'):
            saved.save(done, state, validation)
            tell.saved(done)
        if interrupted:
          raise interrupted
        if ended:
          logging.info('step %s  no progress in %s evaluations: done', f'{done:,}', given.patience)
          break
  return True


def _due(step: int, every: int, steps: int) -> bool:
  """Whether it is time for what happens every so many steps (0: never) and after the last."""
  return step == steps or bool(step and every and step % every == 0)


def _mesh(config) -> jax.sharding.Mesh:
  """All devices, as the config wants them."""
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
  """Raises BadInput where the kernel that is asked for cannot do the segments of training."""
  m, t = config.model, config.training
  shape = t.batch_size // t.parts, t.segment_length, m.heads, m.width // m.heads
  with sharding.use(mesh):
    why = flash.why_not(m.kernel, shape, precision.compute_dtype(m)) if m.kernel else None
  if why is not None:
    raise errors.BadInput(f'model.kernel={m.kernel!r} {why}: model.kernel=None takes what there is')


def _describe(config, state) -> None:
  """Says what is about to be trained."""
  tables = [
    leaf
    for label, leaf in zip(
      jax.tree.leaves(optimizers.labels(state.params)), jax.tree.leaves(state.params), strict=True
    )
    if label == 'ngram_table'
  ]
  parts = [f'{train_state.count_elements(state.params):,} parameters']
  if config.model.ngram is not None:
    parts.append(f'{train_state.count_elements(tables):,} of them in n-gram tables')
    parts.append(f'{train_state.count_elements(state.codebook):,} codebook values')
  logging.info('model: %s', ', '.join(parts))


def _batches(given, config, mesh, calls) -> Iterator[streams.Segment]:
  """For each call its segments, stacked [steps, B, T], on the devices.

  The last is repeated where a call has fewer steps than its program.
  """
  t = config.training
  for first, end in calls:

    def rows(wanted, first=first, end=end):
      segments = [given.segment(step, wanted) for step in range(first, end)]
      segments += [segments[-1]] * (t.segments_per_call - len(segments))
      return streams.map_segments(lambda *parts: np.stack(parts), *segments)

    yield sharding.global_rows(mesh, t.batch_size, rows, axis=1)
