"""Time of a training step with the tables of n-grams in host memory, beside tables on the device.

  python benchmarks/host_tables.py --config=configs/ngram_memories.py:quickstart_engram
  python benchmarks/host_tables.py --large

The config needs `ngram_memories`. --large is one block of width 1,024 with an
Engram of 2 orders, 8 heads and 2^20 rows of 32 values, and 16 x 1,024 tokens. Tokens are drawn with
the frequencies 1 / rank. Both trainings take turns; a ratio divides the medians of their steps.
"""

import argparse
from collections.abc import Iterator
import contextlib
import dataclasses
import json
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

from ngrammer_jax import command_line, sharding
from ngrammer_jax import config as experiment
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.data import prefetch
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training import table_pages

PLACES = ('device', 'host')
VOCABULARY = 32_000


class Call(NamedTuple):
  """The data of one step."""

  segments: table_pages.Segments


def large_config() -> experiment.Config:
  """Returns the config of --large."""
  memory = NGramMemoryConfig.from_preset('engram')
  memory = dataclasses.replace(
    memory, key='tokens', layers=(0,), rows=(2**20,), width=32, optimizer='row_adagrad'
  )
  model = model_config.ModelConfig(
    layers=1, width=1024, heads=16, feed_forward_width=4096, ngram_memories=(memory,)
  )
  training = experiment.TrainingConfig(batch_size=16, segment_length=1024)
  return experiment.Config(model=model, training=training)


def placed(config: experiment.Config, place: str) -> experiment.Config:
  """Returns the config with all tables in one place, and one step a call."""
  memories = []
  for memory in config.model.ngram_memories:
    optimizer = memory.optimizer
    if optimizer not in ('adagrad', 'row_adagrad', 'lazy_adam'):
      optimizer = 'adagrad'
    memories.append(dataclasses.replace(memory, table_memory=place, optimizer=optimizer))
  model = dataclasses.replace(config.model, ngram_memories=tuple(memories))
  training = dataclasses.replace(config.training, segments_per_call=1)
  return dataclasses.replace(config, model=model, training=training)


class Training:
  """A training of which one step at a time is timed."""

  def __init__(self, config: experiment.Config, vocabulary_size: int):
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    self._programs = training_programs.Programs(config, vocabulary_size, mesh)
    self._state = self._programs.pack(self._programs.create())
    self._stack = contextlib.ExitStack()
    calls = _calls(config, vocabulary_size, mesh, self._programs.lookup_reader(self._state))
    calls = self._stack.enter_context(prefetch.run_ahead(calls))
    self._calls = self._programs.read_ahead(calls, self._state)

  def run(self, steps: int) -> float:
    """Returns the seconds of a step, the mean of some."""
    start_time = time.monotonic()
    with sharding.use(self._programs.mesh):
      for _ in range(steps):
        call = next(self._calls)
        if not self._programs.is_compiled:
          self._programs.compile(self._state, call.segments)
          start_time = time.monotonic()
        self._state, metrics = self._programs.call(self._state, call.segments, 1)
      jax.block_until_ready((self._state, metrics))
      self._programs.wait()
    return (time.monotonic() - start_time) / steps

  def close(self) -> None:
    """Ends the threads that read ahead."""
    self._stack.close()


def _calls(
  config: experiment.Config,
  vocabulary_size: int,
  mesh: jax.sharding.Mesh,
  look_up: table_pages.LookupReader | None,
) -> Iterator[Call]:
  """Yields random segments without an end."""
  t = config.training
  weights = 1 / np.arange(1, vocabulary_size + 1)
  weights /= weights.sum()
  shape = t.batch_size, t.segment_length
  random = np.random.default_rng(0)
  step = 0
  while True:
    tokens = random.choice(vocabulary_size, shape, p=weights).astype(np.int32)
    batch = token_batch.Batch(tokens, tokens, np.zeros(shape, bool), np.ones(shape, np.float32))

    def stack(rows: slice, batch: token_batch.Batch = batch) -> token_batch.Batch:
      return token_batch.map_batches(lambda array: array[None, rows], batch)

    segments = sharding.global_rows(mesh, t.batch_size, stack, axis=1)
    if look_up is not None:
      segments = table_pages.PagedSegments(segments, look_up(step, {0: batch}))
    yield Call(segments)
    step += 1


def measure(
  config: experiment.Config, vocabulary_size: int, rounds: int, steps: int
) -> dict[str, float]:
  """Returns the median milliseconds of a step in each place, and their ratio.

  Args:
    config: the experiment.
    vocabulary_size: V.
    rounds: both trainings take turns so often; the first turn is not counted.
    steps: steps of a turn.
  """
  trainings = {place: Training(placed(config, place), vocabulary_size) for place in PLACES}
  seconds: dict[str, list[float]] = {place: [] for place in PLACES}
  for number in range(rounds + 1):
    for place, training in trainings.items():
      measured = training.run(steps)
      if number:
        seconds[place].append(measured)
  for training in trainings.values():
    training.close()
  pairs = zip(seconds['host'], seconds['device'], strict=True)
  result = {f'{place}_ms': 1000 * float(np.median(seconds[place])) for place in PLACES}
  return result | {'ratio': float(np.median([host / device for host, device in pairs]))}


def main(argv: list[str]) -> int:
  """Prints the result as a line of JSON."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--large', action='store_true', help='the config of the description')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--steps', type=int, default=5, help='steps of a turn')
  parser.add_argument('--vocabulary_size', type=int, default=VOCABULARY)
  if '--large' in argv:
    args = parser.parse_args(argv)
    config = large_config()
  else:
    args, config = command_line.parse(parser, argv)
  result = measure(config, args.vocabulary_size, args.rounds, args.steps)
  device = jax.devices()[0].device_kind
  print(json.dumps({'case': 'host_tables', 'device': device, **result}))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
