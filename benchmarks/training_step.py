"""Training speed, utilisation and memory on one accelerator: N-Grammer and Transformer.

  python benchmarks/training_step.py --rows=16 --length=1024 --json=training.json

Runs the training step of the variants `transformer` and `393k_8k_50` of configs/ngrammer_c4.py in
turn, with 16 layers of width 1,024, in bfloat16, on random tokens. The ratio is the median over
rounds of the ratio of consecutive measurements. --only=ROW also reports the peak memory of this
variant. The utilisation (MFU) counts the operations of training/flops.py over the peak of the
vendor.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import runpy
import time

# The trainer sets this flag too.
os.environ['XLA_FLAGS'] = f'--xla_gpu_deterministic_ops=true {os.environ.get("XLA_FLAGS", "")}'

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.data import streams
from ngrammer_jax.training import flops, programs

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'ngrammer_c4.py'
ROWS = ('transformer', '393k_8k_50')


class Training:
  """The training steps of one variant."""

  def __init__(self, row: str, options: argparse.Namespace):
    config = experiment.resolve(runpy.run_path(str(CONFIGS))['get_config'](row))
    model = dataclasses.replace(
      config.model, layers=options.layers, kernel=options.kernel, remat=options.remat
    )
    training = dataclasses.replace(
      config.training,
      batch_size=options.rows,
      segment_length=options.length,
      segments_per_call=options.steps,
    )
    self.config = dataclasses.replace(config, model=model, training=training)
    V, mesh = config.data.vocabulary_size, sharding.make_mesh()
    self._run = programs.Programs(self.config, V, mesh)
    self._state = self._run.create()
    random = np.random.default_rng(0)
    shape = options.steps, options.rows, options.length
    tokens = random.integers(0, V, shape, np.int32)
    segment = streams.Segment(tokens, tokens, np.zeros(shape, bool), np.ones(shape, np.float32))
    load = lambda rows: streams.map_segments(lambda array: array[:, rows], segment)
    self._segments = sharding.global_rows(mesh, options.rows, load, axis=1)
    self._run.compile(self._state, self._segments)
    self.flops = 3 * self._run.flops.forward()
    self.tokens = int(np.prod(shape))

  def measure(self) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    steps = self.config.training.segments_per_call
    self._state, metrics = self._run.call(self._state, self._segments, steps)
    assert np.isfinite(jax.device_get(metrics['loss'])).all()
    return time.perf_counter() - start


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--only', choices=ROWS, help='run only this variant, and report its peak memory'
  )
  parser.add_argument('--layers', type=int, default=16)
  parser.add_argument('--rows', type=int, default=16)
  parser.add_argument('--length', type=int, default=1024)
  parser.add_argument('--steps', type=int, default=4, help='steps per call')
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--kernel', help='attention kernel; default: selected for the device')
  parser.add_argument('--remat', default='minimal')
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  runs = {row: Training(row, options) for row in ([options.only] if options.only else ROWS)}
  times = {row: [] for row in runs}
  for round_number in range(options.rounds + 1):
    for row, run in runs.items():
      seconds = run.measure()
      if round_number:  # the first one is a warm-up
        times[row].append(seconds)
  kind = jax.devices()[0].device_kind
  peak, memory = flops.peak_flops(kind), jax.devices()[0].memory_stats() or {}
  result = {'device': kind, 'settings': {k: v for k, v in vars(options).items() if k != 'json'}}
  for row, run in runs.items():
    rate = run.tokens / float(np.median(times[row]))
    result[row] = {'tokens_per_second': rate}
    if peak is not None:
      result[row]['mfu'] = rate * run.flops / peak / jax.device_count()
    if options.only:
      result[row]['peak_bytes'] = memory.get('peak_bytes_in_use')
    print(row, *(f'{key} {value}' for key, value in result[row].items()), sep='  ')
  if not options.only:
    transformer_times, ngrammer_times = (np.array(times[row]) for row in ROWS)
    result['ratio'] = float(np.median(transformer_times / ngrammer_times))
    print(f'{result["ratio"]:.3f} of the Transformer, on {kind}')
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
