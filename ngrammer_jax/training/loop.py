"""The training loop: data, devices, state; then calls of steps, validations and checkpoints."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import logging
import pathlib
import time
from typing import Any

import jax

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, sharding
from ngrammer_jax.checkpoints import reader, workdirs
from ngrammer_jax.checkpoints import writer as checkpoint_writer
from ngrammer_jax.data import prefetch
from ngrammer_jax.models import parameter_groups
from ngrammer_jax.system import hosts, progress, signals
from ngrammer_jax.training import (
  call_data,
  preparation,
  profile,
  recorder,
  table_pages,
  train_task,
)
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training.records import model_summary, validation_history, watchdog


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
    make_task: returns the data, the loss and the validation of a config.
    watchdog_minutes: minutes without progress before stack traces are logged.
    trace: steps to trace with the profiler.

  Returns:
    False if the training was already finished.

  Raises:
    BadInput: the input is invalid, or the loss is not finite.
  """
  start_time = time.monotonic()
  profile.check_steps(trace, config.training.steps)

  with hosts.collective_errors():
    config = workdirs.with_kept_values(workdir, config)
  config = table_pages.with_single_steps(config)
  config, task, programs = preparation.prepare(config, workdir, make_task)
  with (
    signals.SignalHandler() as stop,
    workdirs.lock_workdir(workdir, config, task.vocabulary, task.content_hash),
    watchdog.Watchdog(workdir, watchdog_minutes) as watch,
    checkpoint_writer.CheckpointWriter(workdir, config.training.keep_checkpoints) as writer,
  ):

    def check_preemption() -> None:
      watch.beat()
      stop.check_interrupted()

    # State: the newest intact checkpoint, or a new one.
    trainer = _Trainer(config, workdir, task, programs, writer, check_preemption)
    if not trainer.restore():
      return False

    # Training.
    first_step = trainer.first_step
    record = recorder.Recorder(config, programs, workdir, first_step, start_time, writer.last_saved)
    look_up = programs.lookup_reader(trainer.state)
    calls = call_data.read_calls(task, config, programs.mesh, first_step, look_up)
    closing = contextlib.nullcontext()
    if look_up is not None:
      closing = contextlib.closing(look_up)
    with (
      record,
      sharding.use(programs.mesh),
      prefetch.run_ahead(calls) as prefetched_calls,
      closing,  # before the thread that reads ahead is waited for
      profile.Trace(trace, workdir, trainer.wait) as tracing,
    ):
      timed_calls = record.time_data_wait(prefetched_calls)
      return trainer.train(programs.read_ahead(timed_calls, trainer.state), record, tracing)


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
  programs: training_programs.Programs
  writer: checkpoint_writer.CheckpointWriter
  check_preemption: Callable[[], None]
  first_step: int = 0
  state: train_state.TrainState | None = None

  def __post_init__(self):
    self.history = validation_history.ValidationHistory(
      self.workdir, self.task.best_metric, self.task.patience
    )

  def restore(self) -> bool:
    """Restores the newest checkpoint, or creates the state. Returns whether to train further."""
    restored = reader.restore_newest(self.workdir, self.programs.abstract, set_aside=True)
    if restored is not None:
      self.first_step, self.state = restored
      self.task.restore_rows(self.first_step, reader.read_rows(self.workdir, self.first_step))
    else:
      self.state = self.task.initial_state(self.programs.create())
      self.writer.save_frozen(parameter_groups.select(self.state.params, self.programs.frozen))
      if (self.workdir / 'metrics.jsonl').exists():
        logging.info('%s has no checkpoint: starting again from the first step', self.workdir)
    self.state = self.programs.pack(self.state)
    model_summary.log(self.programs.labels, self.programs.decay_mask, self.state)
    self.task.log_summary()
    validation = self.history.value_at(self.first_step)
    if validation is not None:
      if restored is not None:
        hosts.on_primary(self.writer.set_validation, self.first_step, validation)
      is_last = self.first_step >= self.config.training.steps
      if is_last or self.history.stops_at(self.first_step):
        return False
    hosts.on_primary(self.writer.check_space, self.state)
    return True

  def train(
    self,
    calls: Iterator[call_data.CallData],
    record: recorder.Recorder,
    tracing: profile.Trace,
  ) -> bool:
    """Trains until the last step or early stopping; returns whether it trained.

    Args:
      calls: the data of each call.
      record: recorder of the metrics.
      tracing: profiler trace.
    """
    if self._is_validation_missing():
      validation = self._validate(self.first_step, record)
      hosts.on_primary(self.writer.set_validation, self.first_step, validation)
      if self.history.stops_at(self.first_step):
        return False
    for call in calls:
      tracing.on_call(call.first)
      if not self.programs.is_compiled:
        self._compile(call, record)
      steps = call.end - call.first
      self.state, metrics = self.programs.call(self.state, call.segments, steps)
      record.add(call.end, metrics)
      if self._end_call(call.end, record, call.row_states):
        patience = self.task.patience
        logging.info(f'step {call.end:,}  stopped early: no better validation in {patience}')
        break
    return True

  def wait(self) -> None:
    """Waits until the devices have computed the state."""
    jax.block_until_ready(self.state)
    self.programs.wait()

  def _is_validation_missing(self) -> bool:
    """Whether the run was stopped between a step and its validation."""
    t = self.config.training
    is_due = _is_due(self.first_step, t.evaluate_every, t.steps)
    return is_due and self.history.value_at(self.first_step) is None

  def _compile(self, call: call_data.CallData, record: recorder.Recorder) -> None:
    """Compiles the program of a call."""
    self.check_preemption()
    with record.timed('compilation'):
      self.programs.compile(self.state, call.segments)
    if self.programs.remat != self.config.model.remat:  # stored before the first checkpoint
      model = dataclasses.replace(self.config.model, remat=self.programs.remat)
      self.config = dataclasses.replace(self.config, model=model)
      hosts.on_primary(workdirs.write_config, self.workdir, self.config)
    self.check_preemption()

  def _end_call(self, end: int, record: recorder.Recorder, row_states: Any) -> bool:
    """Validates and saves if due. Returns whether to stop early.

    Args:
      end: step after the call.
      record: recorder of the metrics.
      row_states: states of the rows of this process before this step.
    """
    t = self.config.training
    interruption = None
    validation = None
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
        self.programs.wait()
        rows = self.task.merge_row_states(hosts.all_gather(row_states))
        self.writer.save(end, self.programs.unpack(self.state), validation, rows)
        record.mark_saved()
    if interruption:
      raise interruption
    return should_stop

  def _validate(self, step: int, record: recorder.Recorder) -> float:
    """Validates and records the result; returns the metric of the best checkpoint."""
    unit = getattr(self.task, 'validation_unit', train_task.TrainTask.validation_unit)
    bar = progress.Progress('validating', None, unit, leave_bar=False)

    def report(units: int) -> None:
      self.check_preemption()
      bar.advance(units)

    with record.timed('evaluation'), bar:
      self.programs.wait()
      result = self.task.validate(self.programs, self.state, report)
      record.validation(step, result, self.task.format_metrics(result))
    return result[self.task.best_metric]


def _is_due(step: int, every: int, steps: int) -> bool:
  """Whether an event is due at a step: every `every` steps (0: never), and at the last."""
  return step == steps or bool(step and every and step % every == 0)
