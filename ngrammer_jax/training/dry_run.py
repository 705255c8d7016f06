"""What a training would need: the start of a run up to its first step, and the time of a step.

Steps are timed on a state that is thrown away, with random tokens. Nothing is written but the cache
of the tokens.
"""

import pathlib
import time

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import memory_limits, sharding
from ngrammer_jax.checkpoints import reader, workdirs
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.models import model_variables
from ngrammer_jax.system import progress, text_tables
from ngrammer_jax.training import preparation, table_pages, train_task
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training import state as train_state

MAX_TIMED_STEPS = 5


def dry_run(
  config: experiment.Config,
  workdir: pathlib.Path,
  make_task: train_task.MakeTask = train_task.CorpusTask,
) -> str:
  """Prepares a training, and returns a table of its parameters, memory and expected time.

  Args:
    config: the experiment.
    workdir: run directory, which need not exist; the time is that of the steps that are left.
    make_task: makes the data of a config.

  Raises:
    BadInput: as in `loop.train`.
  """
  config = table_pages.with_single_steps(workdirs.with_kept_values(workdir, config))
  task, programs = preparation.prepare(config, workdir, make_task)
  task.log_summary()
  t = config.training
  first_step = max(reader.steps(workdir), default=0)
  state = programs.pack(programs.create())
  look_up = programs.lookup_reader(state)
  state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  segments = _random_segments(config, task.vocabulary.size, programs.mesh, look_up)
  start_time = time.monotonic()
  programs.compile(state, segments)
  compilation = time.monotonic() - start_time
  memory = memory_limits.device_memory(programs.mesh)
  peak = memory_limits.format_bytes(memory.devices * programs.peak_bytes())
  limit = ''
  if memory.size is not None:
    limit = f', {memory.name} has {memory_limits.format_bytes(memory.size)}'
  seconds = _time_step(programs, state, segments, min(t.segments_per_call, MAX_TIMED_STEPS))
  steps_left = t.steps - first_step
  tokens = t.tokens_per_step
  time_left = progress.format_duration(steps_left * seconds)
  rows = {
    'parameters': f'{model_variables.count_elements(programs.abstract.params):,}',
    'train state': f'{memory_limits.format_bytes(state_bytes)} (parameters, optimizer, memory)',
    'peak memory': f'{peak} in a step{limit}',
    'compilation': progress.format_duration(compilation),
    'step': f'{seconds:.3g} s, {tokens / seconds:,.0f} tokens/s',
    'steps': f'{steps_left:,} of {t.steps:,} left, {tokens:,} tokens each',
    'expected time': f'{time_left}, without validation and saving',
  }
  return '\n'.join(text_tables.align_columns(list(rows.items()), '<'))


def _random_segments(
  config: experiment.Config,
  vocabulary_size: int,
  mesh: jax.sharding.Mesh,
  look_up: table_pages.LookupReader | None,
) -> table_pages.Segments:
  """Returns the segments of one call, [steps, B, T], on the devices."""
  t = config.training
  parts = {}

  def stack(rows: slice) -> token_batch.Batch:
    shape = (t.segments_per_call, rows.stop - rows.start, t.segment_length)
    tokens = np.random.default_rng(rows.start).integers(0, vocabulary_size, shape, np.int32)
    no_starts = np.zeros(shape, bool)
    segments = token_batch.Batch(tokens, tokens, no_starts, np.ones(shape, np.float32))
    parts[rows.start] = token_batch.map_batches(lambda array: array[0], segments)
    return segments

  segments = sharding.global_rows(mesh, t.batch_size, stack, axis=1)
  if look_up is None:
    return segments
  return table_pages.PagedSegments(segments, look_up(0, parts))


def _time_step(
  programs: training_programs.Programs,
  state: train_state.TrainState,
  segments: table_pages.Segments,
  steps: int,
) -> float:
  """Returns the seconds of a step. A first call, which is not timed, warms up."""
  state, _ = jax.block_until_ready(programs.call(state, segments, 1))
  start_time = time.monotonic()
  jax.block_until_ready(programs.call(state, segments, steps))
  return (time.monotonic() - start_time) / steps
