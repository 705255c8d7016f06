"""What the N-Grammer layer costs a model: examples per second, over the same Transformer.

  python benchmarks/model_overhead.py --layers=4 --rows=2 --length=512 --json=overhead.json

Three models of the width of the N-Grammer paper (configs/ngrammer_c4.py, rows `transformer` and
`393k_8k_50`, with fewer layers): the Transformer; the N-Grammer that clusters every token; and
the same with the clusters of all tokens looked up, as `evaluate` and `generate` serve it. They
are measured in turn, and a ratio is the median over rounds of that of neighbours in time.
`score` is a forward pass with the negative log-likelihoods, `decode` a token for every row.

The paper reports 356.94 over 402.00 examples/s, 0.888, on TPU-v3 (its Table 1). The floor is what
the looked-up layer must do: two layer norms and moving a few rows, next to the products of the
model; what the layer costs beyond it is overhead of our own.
"""

import argparse
import dataclasses
import json
import pathlib
import runpy
import time

from flax import linen as nn
import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.models import transformer

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'ngrammer_c4.py'


def programs(row: str, serving: bool, options: argparse.Namespace) -> dict:
  """Functions without arguments that score a batch, or decode a token of every row."""
  config = experiment.resolve(runpy.run_path(str(CONFIGS))['get_config'](row))
  V = config.data.vocabulary_size
  config = dataclasses.replace(config.model, layers=options.layers, scan_layers=False, remat='none')
  model = transformer.TransformerLM(config, V)
  B, T = options.rows, options.length
  tokens = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
  empty = transformer.empty_memory(config, B)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens[:, :1], empty))
  if serving:
    serve = jax.jit(lambda v: transformer.for_serving(model, v['params'], v['codebook']))
    variables = variables | {'codebook': serve(variables)}

  @jax.jit
  def score(variables, tokens, memory):
    hidden, _, _ = model.apply(variables, tokens, memory)
    return model.apply(variables, hidden, tokens, method='scores').nll_BxT

  def step(variables, tokens, memory):
    hidden, memory, _ = model.apply(variables, tokens, memory)
    return model.apply(variables, hidden, method='log_probs').argmax(axis=-1), memory

  advance = jax.jit(step, donate_argnums=2)
  cached = [transformer.empty_memory(config, B, options.length)]

  def decode():
    for _ in range(options.decoded):
      best, cached[0] = advance(variables, tokens[:, :1], cached[0])
    jax.block_until_ready(best)

  return {'score': lambda: jax.block_until_ready(score(variables, tokens, empty)), 'decode': decode}


def floor(options: argparse.Namespace) -> dict[str, float]:
  """Operations and bytes of a token in the model and in the looked-up layer."""
  D, F, V, N, E = 1024, 2731, 32_000, 8, 32
  block = 2 * (4 * D * D + 3 * D * F) + 2 * options.length * D  # attention over half the length
  return {
    'model_flops': options.layers * block + 2 * V * D,
    'layer_flops': 8 * (D + N * E),  # two norms: mean, variance, scale, bias
    'layer_bytes': 4 * (2 * D + 2 * N * E + 3 * N),  # in and out, rows, ids and hashes
  }


def main() -> None:
  """Prints a table, and writes it as JSON where asked."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--rows', type=int, default=2)
  parser.add_argument('--length', type=int, default=512)
  parser.add_argument('--decoded', type=int, default=8, help='tokens of a row that are timed')
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--json', type=pathlib.Path, help='where to write the result')
  options = parser.parse_args()
  models = {
    'transformer': programs('transformer', False, options),
    'ngrammer, clustering': programs('393k_8k_50', False, options),
    'ngrammer, looked up': programs('393k_8k_50', True, options),
  }
  examples = {'score': options.rows, 'decode': options.rows * options.decoded}
  result = {'settings': {k: v for k, v in vars(options).items() if k != 'json'}}
  for job, count in examples.items():
    seconds = {name: [] for name in models}
    for round_number in range(options.rounds + 1):
      for name, runs in models.items():
        began = time.perf_counter()
        runs[job]()
        if round_number:  # the first one compiles
          seconds[name].append(time.perf_counter() - began)
    of_transformer = np.array(seconds['transformer'])
    for name, taken in seconds.items():
      ratio = float(np.median(of_transformer / taken))
      rate = float(count / np.median(taken))
      unit = 'examples/s' if job == 'score' else 'tokens/s'
      print(f'{job:<8}{name:<24}{rate:10.2f} {unit:<12}{ratio:6.3f} of the Transformer', flush=True)
      result[f'{job}/{name}'] = {unit: rate, 'ratio': ratio}
  least = result['floor'] = floor(options)
  print(
    f'floor of the looked-up layer: {least["layer_flops"]:,} operations and '
    f'{least["layer_bytes"]:,} bytes a token, of {least["model_flops"] / 1e6:,.1f} million '
    f'operations of the model: a ratio of {1 - least["layer_flops"] / least["model_flops"]:.5f}'
  )
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
