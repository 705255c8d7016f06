"""Tokens per second of two evaluation protocols at equal attention lengths.

  python -m benchmarks.evaluation_protocols

`memory` reads one stream in segments, with a segment memory of the attention length, and is timed
once the memory is full, as blocks without tokens are skipped; `window` reads a window of that
length for every token (`evaluation.protocol=sliding_window`). The model is
`transformer_xl.py:text8_small` with more layers, and random parameters. The protocols alternate,
and the best round of each counts. A ratio divides the seconds per token of `window` by the seconds
of `memory`, of the wall clock and of the CPU. The paper's ratios are in Table 9 of Dai et al. 2019,
on a GPU.
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
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.models import language_model

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'transformer_xl.py'
VOCABULARY_SIZE, WIDTH = 27, 192
PAPER_RATIOS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def configs(length: int, options: argparse.Namespace) -> dict[str, experiment.Config]:
  """Returns the config of each protocol at an attention length."""
  config = runpy.run_path(str(CONFIGS))['get_config']('text8_small')
  config.model.layers = options.layers
  config.model.width = WIDTH
  config.training.batch_size = 1
  config.evaluation.streams = 1
  config.evaluation.segment_length = options.segment_length
  config.model.memory.length = config.evaluation.memory.length = length
  memory = experiment.resolve(config)
  config.evaluation.protocol = 'sliding_window'
  config.evaluation.segment_length = length
  return {'memory': memory, 'window': experiment.resolve(config)}


def make_variables(config: experiment.ModelConfig) -> inference.Variables:
  """Returns random variables of a model."""
  model = language_model.build(config, VOCABULARY_SIZE)
  empty = language_model.empty_memory(config, 1)
  tokens = np.zeros((1, 1), np.int32)
  return {'codebook': {}} | nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens, empty))


def measure(
  config: experiment.Config, variables: inference.Variables, tokens: int, untimed: int = 0
):
  """Returns a function that scores tokens and returns the wall and CPU seconds per token.

  Those of the first `untimed` tokens, which fill the memory, do not count.
  """
  ids = np.random.default_rng(0).integers(0, VOCABULARY_SIZE, untimed + tokens).astype(np.uint16)
  split = token_split.TokenSplit(ids, np.zeros(1, np.int64), None, 0)
  model = language_model.build(config.evaluation_model(), VOCABULARY_SIZE)
  engine = inference.Engine(model, sharding.make_mesh())

  def seconds_per_token():
    clocks = [(0, time.perf_counter(), time.process_time())]

    def report(count):
      clocks.append((clocks[-1][0] + count, time.perf_counter(), time.process_time()))

    language_modeling.evaluate(engine, variables, split, config, report=report)
    first = next(clock for clock in clocks if clock[0] >= untimed)
    count, wall, cpu = np.subtract(clocks[-1], first)
    return wall / count, cpu / count

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
  devices = f'{jax.device_count()} {jax.devices()[0].device_kind}'
  print(f'{devices}, {options.layers} layers of width {WIDTH}')
  columns = ('memory, tokens/s', 'window, tokens/s', 'ratio', 'CPU ratio', 'paper')
  print(f'{"length":>6}' + ''.join(f'{column:>18}' for column in columns))
  for length in options.lengths:
    by_protocol = configs(length, options)
    variables = make_variables(by_protocol['memory'].model)
    timed = options.segments * options.segment_length
    filling = -length % options.segment_length
    timers = {
      'memory': measure(by_protocol['memory'], variables, timed, length + filling),
      'window': measure(by_protocol['window'], variables, options.windows),
    }
    for timer in timers.values():
      timer()  # compiles
    seconds = [[timer() for timer in timers.values()] for _ in range(options.rounds)]
    (memory, memory_cpu), (window, window_cpu) = np.min(seconds, axis=0)
    rates = f'{1 / memory:>18,.0f}{1 / window:>18,.2f}'
    ratios = f'{window / memory:>18,.0f}{window_cpu / memory_cpu:>18,.0f}'
    print(f'{length:>6,}{rates}{ratios}{PAPER_RATIOS.get(length, "-"):>18}', flush=True)


if __name__ == '__main__':
  main()
