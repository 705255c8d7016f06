"""The training loop: data, devices, state; then calls of steps, validations and checkpoints."""

from collections.abc import Callable, Iterator
import dataclasses
import logging
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

import ngrammer_jax
from ngrammer_jax import config as experiment
from ngrammer_jax import errors, sharding
from ngrammer_jax.checkpoints import reader, workdirs
from ngrammer_jax.checkpoints import writer as checkpoint_writer
from ngrammer_jax.config import kernels
from ngrammer_jax.data import mixture, prefetch, streams
from ngrammer_jax.layers.attention import fused
from ngrammer_jax.models import model_variables, parameter_groups, precision
from ngrammer_jax.optimizers import partition
from ngrammer_jax.system import hosts, signals
from ngrammer_jax.training import capacity, profile, programs, recorder, train_task
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training.records import watchdog


def train(
  config: experiment.Config,
  workdir: pathlib.Path,
  make_task: train_task.MakeTask = train_task.CorpusTask,
  watchdog_minutes: float = watchdog.DEFAULT_MINUTES,
  trace: range | None = None,
) -> bool:
  """Trains until all steps are done; resumes from the newest checkpoint of the run.

  Args:
    config: the experiment.
    workdir: run directory.
    make_task: makes the data and the validation of a config.
    watchdog_minutes: minutes without progress before the stacks of all threads are logged.
    trace: steps to trace with the profiler.

  Returns:
    False if the training was finished before.

  Raises:
    BadInput: the input is invalid, or the loss is not finite.
  """
  start_time = time.monotonic()
  profile.check_steps(trace, config.training.steps)

  with hosts.collective_errors():
    config = workdirs.with_kept_values(workdir, config)
  task, run = prepare(config, workdir, make_task)
  with (
    signals.SignalHandler() as stop,
    workdirs.lock_workdir(workdir, config, task.vocabulary, task.content_hash),
    watchdog.Watchdog(workdir, watchdog_minutes) as watch,
    checkpoint_writer.CheckpointWriter(workdir, config.training.keep_checkpoints) as writer,
  ):

    def check_preemption(_=0):
      watch.beat()
      stop.check()

    # State: the newest intact checkpoint, or a new one.
    trainer = _Trainer(config, workdir, task, run, writer, check_preemption)
    if not trainer.restore():
      return False

    # Training.
    first_step = trainer.first_step
    with (
      recorder.Recorder(config, run, workdir, first_step, start_time, writer.last_saved) as record,
      sharding.use(run.mesh),
      prefetch.run_ahead(_batches(task, config, run.mesh, first_step)) as batches,
      profile.Trace(trace, workdir, lambda: jax.block_until_ready(trainer.state)) as tracing,
    ):
      segments = record.time_data_wait(batches)
      calls = config.training.calls(first_step)
      return trainer.train(zip(calls, segments, strict=True), record, tracing)


def prepare(
  config: experiment.Config, workdir: pathlib.Path, make_task: train_task.MakeTask
) -> tuple[train_task.TrainTask, programs.Programs]:
  """Returns the data and the programs of a run. Everything that can be refused is refused here.

  Raises:
    BadInput: the input is invalid.
  """
  # Data: checked and tokenised before any device is touched.
  for warning in config.warnings() if hosts.is_primary() else ():
    logging.warning('%s', warning)
  with hosts.collective_errors():
    workdirs.check(workdir, config)
    task = make_task(config)
    workdirs.check_text(workdir, config, task.content_hash)
    config.model.check_vocabulary(task.vocabulary.size)

  # Devices and programs.
  has_checkpoint = hosts.broadcast(bool(reader.steps(workdir)))
  with hosts.collective_errors():
    source = reader.frozen_dtypes(workdir) if has_checkpoint else task.source_dtypes
  run = programs.Programs(config, task.vocabulary.size, _make_mesh(config), source, task.loss)
  with hosts.collective_errors():  # hosts may differ in their memory
    capacity.check_training_fits(config, run.abstract)
  return task, run


@dataclasses.dataclass
class _Trainer:
  """The train state of a run, with its validations and checkpoints.

  Attributes:
    first_step: step of the restored state.
    state: the train state.
  """

  config: experiment.Config
  workdir: pathlib.Path
  task: train_task.TrainTask
  run: programs.Programs
  writer: checkpoint_writer.CheckpointWriter
  check_preemption: Callable[..., None]
  first_step: int = 0
  state: train_state.TrainState | None = None

  def __post_init__(self):
    self.history = recorder.ValidationHistory(self.workdir, self.task)

  def restore(self) -> bool:
    """Restores the newest checkpoint, or creates the state. Returns whether to train further."""
    restored = reader.restore_newest(self.workdir, self.run.abstract, set_aside=True)
    self.first_step, self.state = restored or (0, self.task.initial_state(self.run.create()))
    if restored is not None:
      self.task.restore_rows(self.first_step, reader.read_rows(self.workdir, self.first_step))
    if restored is None:
      self.writer.save_frozen(parameter_groups.select(self.state.params, self.run.frozen))
    if restored is None and (self.workdir / 'metrics.jsonl').exists():
      logging.info('%s has no checkpoint: starting again from the first step', self.workdir)
    self.state = self.run.pack(self.state)
    _log_model(self.config, self.run.labels, self.state)
    self.task.log_summary()
    validation = self.history.value_at(self.first_step)
    if validation is not None:
      if restored:
        hosts.on_primary(self.writer.set_validation, self.first_step, validation)
      is_last = self.first_step >= self.config.training.steps
      if is_last or self.history.stops_at(self.first_step):
        return False
    hosts.on_primary(self.writer.check_space, self.state)
    return True

  def train(
    self,
    calls: Iterator[tuple[tuple[int, int], '_Segments']],
    record: recorder.Recorder,
    tracing: profile.Trace,
  ) -> bool:
    """Trains until the last step or early stopping; returns whether it trained.

    Args:
      calls: first and end step of each call, and its data.
      record: recorder of the metrics.
      tracing: profiler trace.
    """
    t, first_step = self.config.training, self.first_step
    if _is_due(first_step, t.evaluate_every, t.steps) and self.history.value_at(first_step) is None:
      # The run was stopped before this validation.
      hosts.on_primary(self.writer.set_validation, first_step, self._validate(first_step, record))
      if self.history.stops_at(first_step):
        return False
    for (start, end), (segments, row_states) in calls:
      tracing.on_call(start)
      if not self.run.is_compiled:
        self.check_preemption()
        with record.timed('compilation'):
          self.run.compile(self.state, segments)
        self.check_preemption()
      self.state, metrics = self.run.call(self.state, segments, end - start)
      record.add(end, metrics)
      if self._end_call(end, record, row_states):
        logging.info(f'step {end:,}  stopped early: no better validation in {self.task.patience}')
        break
    return True

  def _end_call(self, end: int, record: recorder.Recorder, row_states: list[Any] | None) -> bool:
    """Validates and saves what is due. Returns whether to stop early.

    Args:
      end: step after the call.
      record: recorder of the metrics.
      row_states: states of the rows of this process before this step.
    """
    t, interruption, validation = self.config.training, None, None
    try:
      self.check_preemption()
      if _is_due(end, t.evaluate_every, t.steps):
        validation = self._validate(end, record)
    except errors.Interrupted as signal:
      interruption = signal
    should_stop = validation is not None and self.history.stops_at(end)
    if interruption or should_stop or _is_due(end, t.checkpoint_every, t.steps):
      # The checkpoint comes last: its step is already recorded for a run that resumes from it, and
      # no state with a loss that is not finite is saved.
      with record.timed('checkpoints'):
        rows = mixture.merge_row_states(hosts.all_gather(row_states))
        self.writer.save(end, self.run.unpack(self.state), validation, rows)
        record.mark_saved()
    if interruption:
      raise interruption
    return should_stop

  def _validate(self, step: int, record: recorder.Recorder) -> float:
    """Validates and records the result; returns the metric of the best checkpoint."""
    with record.timed('evaluation'):
      result = self.task.validate(self.run, self.state, self.check_preemption)
      record.validation(step, result, self.task.format_metrics(result))
    return result[self.task.best_metric]


def _is_due(step: int, every: int, steps: int) -> bool:
  """Whether an event is due at a step: every `every` steps (0: never), and at the last."""
  return step == steps or bool(step and every and step % every == 0)


def _make_mesh(config) -> jax.sharding.Mesh:
  """Returns the mesh of all devices."""
  m, t = config.mesh, config.training
  mesh = sharding.make_mesh(m.data, m.fsdp, m.model)
  sharding.check_batch('training.batch_size', t.batch_size, mesh, t.microbatches)
  _check_kernel(config, mesh)
  devices = f'{jax.device_count()} {jax.devices()[0].device_kind}'
  sizes = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  logging.info(f'ngrammer_jax {ngrammer_jax.__version__} on {devices}, mesh {sizes}')
  return mesh


def _check_kernel(config, mesh) -> None:
  """Raises BadInput if the kernel of the config cannot attend to the segments of training."""
  m, t = config.model, config.training
  if m.kernel is None:
    return
  shape = t.batch_size // t.microbatches, t.segment_length, m.heads, m.head_features
  with sharding.use(mesh):
    query = jax.ShapeDtypeStruct(shape, precision.compute_dtype(m))
    workload = fused.workload(query, key_heads=m.context_key_heads)
  if reason := kernels.unsupported_reason(m.kernel, frozenset(m.attention_needs()), workload):
    raise errors.BadInput(f'model.kernel={m.kernel!r} {reason}: use None, which selects another')


def _log_model(config, labels, state) -> None:
  """Logs the size of the model."""
  sizes = [f'{model_variables.count_elements(state.params):,} parameters']
  groups = partition.leaves_by_label(labels, state.params)
  if frozen := groups.pop(partition.FROZEN, []):
    kinds = ', '.join(sorted({str(leaf.dtype) for leaf in frozen}))
    sizes.append(f'{model_variables.count_elements(frozen):,} of them frozen, in {kinds}')
  tables = [leaves for label, leaves in groups.items() if label != 'dense']
  if tables:
    sizes.append(f'{model_variables.count_elements(tables):,} of them in n-gram tables')
  if state.codebook:
    count = model_variables.count_elements(state.codebook)
    sizes.append(f'{count:,} values without gradient (codebooks, token classes)')
  logging.info('model: %s', ', '.join(sizes))


class _Segments(NamedTuple):
  """The data of a call.

  Attributes:
    batch: its segments, stacked [steps, B, T], on the devices.
    row_states: states of the rows of this process after the call, see `TrainTask.row_states`.
  """

  batch: streams.Batch
  row_states: list[Any] | None


def _batches(task, config, mesh, first_step) -> Iterator[_Segments]:
  """Yields the data of each call from `first_step` on.

  If a call has fewer steps than the program, its last segment is repeated.
  """
  t = config.training
  for first, end in t.calls(first_step):

    def stack(rows, first=first, end=end):
      segments = [task.segment(step, rows) for step in range(first, end)]
      segments += [segments[-1]] * (t.segments_per_call - len(segments))
      return streams.map_batches(lambda *parts: np.stack(parts), *segments)

    batch = sharding.global_rows(mesh, t.batch_size, stack, axis=1)
    yield _Segments(batch, task.row_states(end))
