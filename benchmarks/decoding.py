"""Tokens per second of generation, against running the whole text again for every token.

  python benchmarks/decoding.py --workdir=runs/quickstart --contexts 128 1024 4096 --rows 1 8

"again" is the step that most small codebases generate with: the forward pass over the padded
context. Both are compiled first; greedy, from a prompt of one token.
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


def cached(run, context: int, rows: int, steps: int, options: sampling.SamplingConfig) -> float:
  """Seconds for a token of every row."""
  engine = inference.Engine(run.model, run.mesh)
  variables = {'params': run.state.params, 'codebook': run.state.codebook}
  prompts = [np.array([run.vocabulary.document_start])] * rows
  config = inference.GenerationConfig(options, context)
  stream = engine.generate(variables, prompts, range(rows), config, rows)
  next(stream)
  began = time.monotonic()
  for _ in itertools.islice(stream, steps):
    pass
  return (time.monotonic() - began) / steps


def again(run, context: int, rows: int, steps: int) -> float:
  """Seconds for a token of every row, from a forward pass over the context."""
  model, variables = run.model, {'params': run.state.params, 'codebook': run.state.codebook}

  @jax.jit
  def step(variables, tokens, place):
    memory = language_model.empty_memory(model.config, rows)
    hidden, _, _ = model.apply(variables, tokens, memory)
    last = jax.lax.dynamic_slice_in_dim(hidden, place, 1, axis=1)
    best = model.apply(variables, last, method='log_probs')[:, 0].argmax(axis=-1)
    return jax.lax.dynamic_update_slice(tokens, best[:, None].astype('int32'), (0, place + 1))

  tokens = step(variables, np.zeros((rows, context), np.int32), 0)
  tokens = step(variables, tokens, 0)  # of the kind it will be from now on
  jax.block_until_ready(tokens)
  began = time.monotonic()
  for place in range(steps):
    tokens = step(variables, tokens, place)
  jax.block_until_ready(tokens)
  return (time.monotonic() - began) / steps


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='of a run')
  parser.add_argument('--contexts', type=int, nargs='+', default=[128, 1024, 4096])
  parser.add_argument('--rows', type=int, nargs='+', default=[1, 8])
  parser.add_argument('--steps', type=int, default=100, help='timed, of the cached decoding')
  options = parser.parse_args()
  run = ngrammer_jax.load_run(options.workdir)
  greedy, drawn = sampling.SamplingConfig(0), sampling.SamplingConfig(0.8, 40, 0.95)
  print(f'{jax.device_count()} {jax.devices()[0].device_kind}, tokens/s of all rows')
  print(f'{"rows":>5}{"context":>9}{"greedy":>9}{"drawn":>9}{"again":>9}{"times":>8}')
  for rows, context in itertools.product(options.rows, options.contexts):
    fast = cached(run, context, rows, options.steps, greedy)
    random = cached(run, context, rows, options.steps, drawn)
    slow = again(run, context, rows, max(options.steps // 20, 2))
    speeds = ''.join(f'{rows / seconds:>9,.0f}' for seconds in (fast, random, slow))
    print(f'{rows:>5}{context:>9,}{speeds}{slow / fast:>8.1f}')


if __name__ == '__main__':
  main()
