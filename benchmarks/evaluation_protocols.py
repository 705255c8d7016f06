"""Tokens per second of two evaluation protocols at equal attention lengths.

  python benchmarks/evaluation_protocols.py --lengths 800 1800 2800 3800

`memory` reads one stream in segments, with a segment memory of the attention length; `window` reads
a window of that length for every token (`evaluation.protocol=sliding_window`). The model is
`transformer_xl.py:text8_small` with random parameters. The protocols alternate, and the best round
of each counts. The paper's ratios are of Table 9 of Dai et al. 2019, on a GPU.
"""

import argparse
import pathlib
import runpy
import time

from flax import linen as nn
import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.data import token_cache
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.models import language_model

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'transformer_xl.py'
VOCABULARY_SIZE = 27
PAPER_RATIOS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def configs(length: int, options: argparse.Namespace) -> dict[str, experiment.Config]:
  """Returns the config of each protocol at an attention length."""
  config = runpy.run_path(str(CONFIGS))['get_config']('text8_small')
  config.model.layers, config.training.batch_size = options.layers, 1
  config.evaluation.streams, config.evaluation.segment_length = 1, options.segment_length
  config.model.memory.length = length
  memory = experiment.resolve(config)
  config.evaluation.protocol, config.evaluation.segment_length = 'sliding_window', length
  return {'memory': memory, 'window': experiment.resolve(config)}


def make_variables(config: experiment.ModelConfig) -> inference.Variables:
  """Returns random variables of a model."""
  model = language_model.build(config, VOCABULARY_SIZE)
  empty = language_model.empty_memory(config, 1)
  tokens = np.zeros((1, 1), np.int32)
  return {'codebook': {}} | nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens, empty))


def measure(config: experiment.Config, variables: inference.Variables, tokens: int):
  """Returns a function that scores that many tokens and returns the seconds per token."""
  ids = np.random.default_rng(0).integers(0, VOCABULARY_SIZE, tokens).astype(np.uint16)
  split = token_cache.TokenSplit(ids, np.zeros(1, np.int64), None, 0)
  model = language_model.build(config.evaluation_model(), VOCABULARY_SIZE)
  engine = inference.Engine(model, sharding.make_mesh())

  def seconds_per_token():
    start = time.perf_counter()
    language_modeling.evaluate(engine, variables, split, config)
    return (time.perf_counter() - start) / tokens

  return seconds_per_token


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--lengths', type=int, nargs='+', default=list(PAPER_RATIOS))
  parser.add_argument('--segment_length', type=int, default=128, help='of `memory`')
  parser.add_argument('--segments', type=int, default=8, help='timed segments of `memory`')
  parser.add_argument('--windows', type=int, default=2, help='timed windows')
  parser.add_argument('--layers', type=int, default=12)
  parser.add_argument('--rounds', type=int, default=5)
  options = parser.parse_args()
  print(f'{jax.device_count()} {jax.devices()[0].device_kind}, tokens/s')
  print(f'{"length":>6}{"memory":>10}{"window":>10}{"ratio":>8}{"paper":>8}')
  for length in options.lengths:
    by_protocol = configs(length, options)
    variables = make_variables(by_protocol['memory'].model)
    tokens = {'memory': options.segments * options.segment_length, 'window': options.windows}
    timers = {name: measure(c, variables, tokens[name]) for name, c in by_protocol.items()}
    for timer in timers.values():
      timer()  # compiles
    seconds = [{name: timer() for name, timer in timers.items()} for _ in range(options.rounds)]
    memory, window = (min(row[name] for row in seconds) for name in timers)
    ratio, paper = window / memory, PAPER_RATIOS.get(length, '-')
    print(
      f'{length:>6,}{1 / memory:>10,.0f}{1 / window:>10,.2f}{ratio:>8,.0f}{paper:>8}', flush=True
    )


if __name__ == '__main__':
  main()
