"""Tokens per second of generation with the KV cache, and without it.

  python benchmarks/decoding.py --workdir=runs/quickstart --contexts 128 1024 4096 --rows 1 8

Without the cache, every token takes a forward pass over the padded context. Both are compiled
first, and start from a prompt of one token.
"""

import argparse
import itertools
import pathlib
import time

import jax
import numpy as np

import ngrammer_jax
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import sampling
from ngrammer_jax.models import language_model


def measure_cached(
  run, context: int, rows: int, steps: int, options: sampling.SamplingConfig
) -> float:
  """Returns the seconds per token of all rows with the KV cache."""
  engine = inference.Engine(run.model, run.mesh)
  variables = run.restored.collections
  prompts = [np.array([run.vocabulary.document_start])] * rows
  stream = engine.generate(variables, prompts, range(rows), options, context, rows=rows)
  next(stream)
  start = time.monotonic()
  for _ in itertools.islice(stream, steps):
    pass
  return (time.monotonic() - start) / steps


def measure_uncached(run, context: int, rows: int, steps: int) -> float:
  """Returns the seconds per token of all rows with a forward pass over the context."""
  model = run.model
  variables = run.restored.collections

  @jax.jit
  def step(variables, tokens, position):
    memory = language_model.empty_memory(model.config, rows)
    hidden, _, _ = model.apply(variables, tokens, memory)
    last = jax.lax.dynamic_slice_in_dim(hidden, position, 1, axis=1)
    best = model.apply(variables, last, method='log_probs')[:, 0].argmax(axis=-1)
    return jax.lax.dynamic_update_slice(tokens, best[:, None].astype('int32'), (0, position + 1))

  tokens = step(variables, np.zeros((rows, context), np.int32), 0)
  tokens = step(variables, tokens, 0)  # compiles for the sharding of its own output
  jax.block_until_ready(tokens)
  start = time.monotonic()
  for position in range(steps):
    tokens = step(variables, tokens, position)
  jax.block_until_ready(tokens)
  return (time.monotonic() - start) / steps


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='run directory')
  parser.add_argument('--contexts', type=int, nargs='+', default=[128, 1024, 4096])
  parser.add_argument('--rows', type=int, nargs='+', default=[1, 8])
  parser.add_argument('--steps', type=int, default=100, help='number of timed steps with the cache')
  options = parser.parse_args()
  run = ngrammer_jax.load_run(options.workdir)
  greedy = sampling.SamplingConfig(0)
  nucleus = sampling.SamplingConfig(0.8, 40, 0.95)
  print(f'{jax.device_count()} {jax.devices()[0].device_kind}, tokens/s of all rows')
  print(f'{"rows":>5}{"context":>9}{"greedy":>9}{"nucleus":>9}{"uncached":>10}{"ratio":>8}')
  for rows, context in itertools.product(options.rows, options.contexts):
    greedy_time = measure_cached(run, context, rows, options.steps, greedy)
    nucleus_time = measure_cached(run, context, rows, options.steps, nucleus)
    uncached_time = measure_uncached(run, context, rows, max(options.steps // 20, 2))
    speeds = ''.join(f'{rows / seconds:>9,.0f}' for seconds in (greedy_time, nucleus_time))
    uncached = f'{rows / uncached_time:>10,.0f}{uncached_time / greedy_time:>8.1f}'
    print(f'{rows:>5}{context:>9,}{speeds}{uncached}')


if __name__ == '__main__':
  main()
