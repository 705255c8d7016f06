"""A dry run: the start of a run up to its first step, its memory, and the time of a step.

Steps are timed on a temporary state with random tokens. The corpus is only read if it determines
the size of the vocabulary. Only the token cache is written.
"""

from collections.abc import Mapping
import itertools
import logging
import math
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import memory_limits, sharding
from ngrammer_jax.checkpoints import reader, workdirs
from ngrammer_jax.data import prefetch, vocabularies
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.data.tokens import learned_vocabulary
from ngrammer_jax.system import progress, text_tables
from ngrammer_jax.training import (
  call_data,
  init_from,
  model_size,
  preparation,
  table_pages,
  train_task,
)
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training import state as train_state

MAX_TIMED_STEPS = 5


class UnreadVocabulary(NamedTuple):
  """The number of token ids of an unread vocabulary."""

  size: int


class UnreadTask(train_task.TrainTask):
  """A task without data, for a config with a known vocabulary size.

  Args:
    config: the experiment.
    workdir: run directory.
    vocabulary_size: V.
    start: the run in `init_from`; None: no run.
  """

  best_metric = 'nll_nats_per_token'
  patience = None

  def __init__(
    self,
    config: experiment.Config,
    workdir: pathlib.Path,
    vocabulary_size: int,
    start: init_from.Start | None = None,
  ):
    self._config = config
    self._start = start
    self.vocabulary = UnreadVocabulary(vocabulary_size)
    self.content_hash = ''
    if reader.steps(workdir):  # not compared
      self.content_hash = workdirs.read_content_hash(workdir) or ''

  @property
  def source_dtypes(self) -> Mapping[str, Any]:
    """Dtypes of the parameters of the other run by name."""
    if self._start is None:
      return {}
    return self._start.source_dtypes()

  def log_summary(self) -> None:
    """Logs that no text is read."""
    t = self._config.training
    logging.info(
      f'data: {self._config.data.corpus} is not read, vocabulary {self.vocabulary.size:,}; '
      f'{t.steps:,} steps of {t.tokens_per_step:,} random tokens'
    )


def vocabulary_size(config: experiment.Config, workdir: pathlib.Path) -> int | None:
  """Returns the number of token ids of a training, without reading its corpus.

  The size comes from the run in the workdir, if it has started, or from the data section. None: the
  size depends on the text.

  Raises:
    BadInput: a vocabulary cannot be read.
  """
  if reader.steps(workdir):
    return vocabularies.load(workdir).size
  return learned_vocabulary.size_without_text(config.data)


def dry_run(
  config: experiment.Config,
  workdir: pathlib.Path,
  make_task: train_task.MakeTask = train_task.CorpusTask,
) -> str:
  """Prepares a training, and returns a table of its parameters, memory and expected time.

  Args:
    config: the experiment.
    workdir: run directory, which need not exist; the time is for the remaining steps.
    make_task: returns the data of a config.

  Raises:
    BadInput: as in `loop.train`.
  """
  config = table_pages.with_single_steps(workdirs.with_kept_values(workdir, config))
  config, task, programs = preparation.prepare(config, workdir, make_task)
  task.log_summary()
  t = config.training
  first_step = max(reader.steps(workdir), default=0)
  state = programs.pack(programs.create())
  state_bytes = sum(map(_bytes_on_a_device, jax.tree.leaves(state)))
  calls = _RandomCalls(config, task.vocabulary.size, programs, state)
  start_time = time.monotonic()
  programs.compile(state, calls.first.segments)
  compilation = time.monotonic() - start_time
  seconds = calls.time_step(state)
  steps_left = t.steps - first_step
  tokens = t.tokens_per_step
  time_left = progress.format_duration(steps_left * seconds)
  size = model_size.count(config.model, task.vocabulary.size)
  rows = {
    'parameters': size.format(),
    'FLOPs of a token': model_size.format_flops(programs.flops, config.model),
    'train state': f'{memory_limits.format_bytes(state_bytes)} on a device (parameters, optimizer, '
    'memory)',
    'peak memory': _describe_peak(programs),
    'compilation': progress.format_duration(compilation),
    'step': f'{seconds:.3g} s, {tokens / seconds:,.0f} tokens/s',
    'steps': f'{steps_left:,} of {t.steps:,} left, {tokens:,} tokens each',
    'expected time': f'{time_left}, without validation and saving',
  }
  return '\n'.join(text_tables.align_columns(list(rows.items()), '<'))


def _bytes_on_a_device(leaf: Any) -> int:
  """Returns the bytes of an array on one device; in host memory, of this process."""
  if isinstance(leaf, jax.Array):
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return leaf.nbytes


def _describe_peak(programs: training_programs.Programs) -> str:
  """Formats the memory of a step on one device, and on all simulated devices."""
  memory = memory_limits.device_memory(programs.mesh)
  peak = programs.peak_bytes()
  text = f'{memory_limits.format_bytes(peak)} in a step'
  if memory.devices > 1:
    all_devices = memory_limits.format_bytes(memory.devices * peak)
    text += f' on a device, {all_devices} on all {memory.devices} simulated devices'
  if memory.size is not None:
    text += f', {memory.name} has {memory_limits.format_bytes(memory.size)}'
  return text


class _RandomCalls:
  """Calls of the training step with random tokens.

  Rows of tables in host memory are found, read and written as in training.

  Attributes:
    first: the data of the first call.
  """

  def __init__(
    self,
    config: experiment.Config,
    vocabulary_size: int,
    programs: training_programs.Programs,
    state: train_state.TrainState,
  ):
    self._training = config.training
    self._vocabulary_size = vocabulary_size
    self._programs = programs
    self._look_up = programs.lookup_reader(state)
    self._steps = min(self._training.segments_per_call, MAX_TIMED_STEPS)  # of a timed call
    self.first = self._make(0)

  def time_step(self, state: train_state.TrainState) -> float:
    """Returns the seconds of a step. A first call, which is not timed, warms up."""
    count = MAX_TIMED_STEPS // self._steps
    others = (self._make(number) for number in range(1, count + 1))
    with prefetch.run_ahead(others) as prefetched:
      calls = self._programs.read_ahead(itertools.chain([self.first], prefetched), state)
      state, _ = self._programs.call(state, next(calls).segments, 1)
      self._wait(state)
      start_time = time.monotonic()
      for call in calls:
        state, _ = self._programs.call(state, call.segments, self._steps)
      self._wait(state)
    return (time.monotonic() - start_time) / (count * self._steps)

  def _wait(self, state: train_state.TrainState) -> None:
    """Waits until a state has all updates."""
    jax.block_until_ready(state)
    self._programs.wait()

  def _make(self, number: int) -> call_data.CallData:
    """Returns the data of a call."""
    t = self._training
    parts = {}

    def stack(rows: slice) -> token_batch.Batch:
      shape = (t.segments_per_call, rows.stop - rows.start, t.segment_length)
      random = np.random.default_rng((number, rows.start))
      tokens = random.integers(0, self._vocabulary_size, shape, np.int32)
      no_starts = np.zeros(shape, bool)
      segments = token_batch.Batch(tokens, tokens, no_starts, np.ones(shape, np.float32))
      parts[rows.start] = token_batch.map_batches(lambda array: array[0], segments)
      return segments

    segments = sharding.global_rows(self._programs.mesh, t.batch_size, stack, axis=1)
    if self._look_up is not None:
      segments = table_pages.PagedSegments(segments, self._look_up(number, parts))
    return call_data.CallData(number, number + 1, segments, None)
