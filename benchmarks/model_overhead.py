"""Cost of the N-Grammer layer: examples per second, relative to the same Transformer.

  python benchmarks/model_overhead.py --layers=4 --rows=2 --length=512 --json=overhead.json

Three models of the width of the N-Grammer paper (configs/ngrammer_c4.py, variants `transformer` and
`393k_8k_50`, with fewer layers): the Transformer; the N-Grammer with clusters of every token (or of
the vocabulary, if it has fewer rows); and the N-Grammer with precomputed clusters of all tokens, as
in `evaluate` and `generate`. They are measured in turn; a ratio is the median over rounds of the
ratio of consecutive measurements. `score` is a forward pass with the negative log-likelihoods,
`decode` generates one token for every row.

The paper reports 356.94 / 402.00 examples/s = 0.888 on TPU-v3 (its Table 1). The floor is a lower
bound on the cost of the layer with precomputed clusters: the products of the model at the speed of
large products on this machine, and the necessary bytes of the layer at the speed of a copy.
"""

import argparse
from collections.abc import Callable
import dataclasses
import json
import pathlib
import runpy
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.models import embedding_and_head, language_model

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'ngrammer_c4.py'


def load_config(row: str) -> experiment.Config:
  """Returns a variant of the config."""
  return experiment.resolve(runpy.run_path(str(CONFIGS))['get_config'](row))


def variant_programs(row: str, is_serving: bool, options: argparse.Namespace) -> dict:
  """Returns the `programs` of a variant of the config with fewer layers."""
  config = load_config(row)
  V = config.data.vocabulary_size
  config = dataclasses.replace(config.model, layers=options.layers, scan_layers=False, remat='none')
  return programs(config, V, options, is_serving)


def programs(
  config: experiment.ModelConfig, V: int, options: argparse.Namespace, is_serving: bool = False
) -> dict:
  """Returns functions without arguments that score a batch, and decode tokens of every row.

  Args:
    config: model config.
    V: vocabulary size.
    options: numbers of rows, tokens of a row, and tokens decoded for each row.
    is_serving: whether cluster ids of tokens are precomputed.
  """
  model = language_model.build(config, V)
  B = options.rows
  T = options.length
  tokens = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
  empty = language_model.empty_memory(config, B)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens[:, :1], empty))
  if is_serving:
    serve = jax.jit(
      lambda v: embedding_and_head.for_serving(model.config, v['params'], v['codebook'])
    )
    variables = variables | {'codebook': serve(variables)}

  @jax.jit
  def score(variables, tokens, memory):
    hidden, _, _ = model.apply(variables, tokens, memory)
    return model.apply(variables, hidden, tokens, method='scores').nll_BxT

  def step(variables, tokens, memory):
    hidden, memory, _ = model.apply(variables, tokens, memory)
    return model.apply(variables, hidden, method='log_probs').argmax(axis=-1), memory

  advance = jax.jit(step, donate_argnums=2)
  cached = [language_model.empty_memory(config, B, options.length)]

  def decode():
    for _ in range(options.decoded):
      best, cached[0] = advance(variables, tokens[:, :1], cached[0])
    jax.block_until_ready(best)

  return {'score': lambda: jax.block_until_ready(score(variables, tokens, empty)), 'decode': decode}


def floor(options: argparse.Namespace) -> dict[str, float]:
  """Returns the minimal cost of a token: operations of the model, bytes of the layer."""
  config = load_config('393k_8k_50')
  m = config.model
  n = config.model.ngram
  V = config.data.vocabulary_size
  D = m.width
  F = m.feed_forward_width
  N = m.heads
  block = 2 * (4 * D * D + 3 * D * F) + 2 * options.length * D  # attention over half the length
  operations = options.layers * block + 2 * V * D
  # Inputs and outputs, table rows, ids and hashes.
  moved_bytes = 4 * (2 * D + 2 * N * n.dim + 3 * N)
  a = jnp.ones((1024, D))
  b = jnp.ones((D, 4 * D))
  large = jnp.ones(2**25)
  product = min_seconds(jax.jit(jnp.matmul), a, b) / (2 * 1024 * D * 4 * D)  # seconds per operation
  copy = min_seconds(jax.jit(lambda x: x + 1), large) / (2 * large.nbytes)  # seconds per byte
  ratio = 1 / (1 + moved_bytes * copy / (operations * product))
  return {'model_operations': operations, 'layer_bytes': moved_bytes, 'ratio': ratio}


def min_seconds(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
  """Returns the shortest time of several calls."""
  times = []
  for _ in range(8):
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    times.append(time.perf_counter() - start)
  return min(times)


def compare(models: dict[str, dict], options: argparse.Namespace) -> dict:
  """Prints and returns the speed of models, and their ratio to the first, measured in turn."""
  examples = {'score': options.rows, 'decode': options.rows * options.decoded}
  result = {}
  for job, count in examples.items():
    seconds = {name: [] for name in models}
    for round_number in range(options.rounds + 1):
      for name, runs in models.items():
        start = time.perf_counter()
        runs[job]()
        if round_number:  # the first one compiles
          seconds[name].append(time.perf_counter() - start)
    baseline, *_ = seconds
    for name, times in seconds.items():
      ratio = float(np.median(np.array(seconds[baseline]) / times))
      rate = float(count / np.median(times))
      unit = 'examples/s' if job == 'score' else 'tokens/s'
      print(f'{job:<8}{name:<24}{rate:10.2f} {unit:<12}{ratio:6.3f} of the {baseline}', flush=True)
      result[f'{job}/{name}'] = {unit: rate, 'ratio': ratio}
  return result


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--rows', type=int, default=2)
  parser.add_argument('--length', type=int, default=512)
  parser.add_argument('--decoded', type=int, default=8, help='number of timed tokens per row')
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  models = {
    'transformer': variant_programs('transformer', False, options),
    'ngrammer, clustering': variant_programs('393k_8k_50', False, options),
    'ngrammer, looked up': variant_programs('393k_8k_50', True, options),
  }
  result = {'settings': {k: v for k, v in vars(options).items() if k != 'json'}}
  result |= compare(models, options)
  bound = result['floor'] = floor(options)
  print(
    f'floor with precomputed clusters: {bound["layer_bytes"]:,} bytes and '
    f'{bound["model_operations"] / 1e6:,.1f} million operations per token: {bound["ratio"]:.5f}'
  )
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
