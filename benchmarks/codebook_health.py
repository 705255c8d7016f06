"""Compares codebook policies on real text: usage of the clusters, and the loss.

  python benchmarks/codebook_health.py --folder=/tmp/health --seeds 0 1 2

Trains a smaller quickstart for every combination of initial centroids, policy for empty clusters
and seed; arguments after `--` are passed to every run. A finished run is not repeated. The default
decay is 0.99: centroids then move in 500 steps as far as in 5,000 steps with a decay of 0.999.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import sys

from ngrammer_jax.config.ngram import memory as ngram_config

QUICKSTART = pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py'
SMALL = (
  f'--config={QUICKSTART}',
  '--config.model.layers=2',
  '--config.model.width=128',
  '--config.model.heads=4',
  '--config.model.feed_forward_width=344',
  '--config.model.ngram.clusters=256',
  '--config.model.ngram.decay=0.99',
  '--config.training.steps=480',
  '--config.training.evaluate_every=480',
  '--config.training.checkpoint_every=480',
  '--config.evaluation.max_tokens=65536',
)
COLUMNS = ('codebook/perplexity', 'codebook/dead', 'codebook/changed', 'validation')


def train(workdir: pathlib.Path, initial: str, empty: str, seed: int, extra: list[str]) -> dict:
  """Trains a model, and returns its last metrics."""
  policy = (f'--config.model.ngram.initial={initial}', f'--config.model.ngram.empty={empty}')
  command = [sys.executable, '-m', 'ngrammer_jax.train', *SMALL, *policy, *extra]
  command += [f'--config.seed={seed}', f'--workdir={workdir}']
  workdir.parent.mkdir(parents=True, exist_ok=True)
  with workdir.with_suffix('.log').open('w') as log:  # the reason if the run fails
    subprocess.run(command, check=True, stdout=log, stderr=log)
  last = {}
  for line in (workdir / 'metrics.jsonl').read_text().splitlines():
    last |= json.loads(line)
  last['validation'] = last['validation/nll_nats_per_token']
  return {name: last[name] for name in COLUMNS}


def main() -> None:
  """Prints a table, row by row, and writes health.json."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, required=True, help='folder of all runs')
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
  parser.add_argument('extra', nargs='*', help='flags for every run, after --')
  options = parser.parse_args()
  print(f'{"initial":<9}{"empty":<8}' + ''.join(f'{name:>24}' for name in COLUMNS), flush=True)
  results = []
  for initial, empty in itertools.product(ngram_config.INITIAL, ngram_config.EMPTY):
    runs = [
      train(options.folder / f'{initial}_{empty}_{seed}', initial, empty, seed, options.extra)
      for seed in options.seeds
    ]
    row = {'initial': initial, 'empty': empty, 'seeds': options.seeds}
    cells = []
    for name in COLUMNS:
      values = [run[name] for run in runs]
      error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
      row[name] = {'mean': statistics.mean(values), 'standard_error': error, 'values': values}
      cells.append(f'{row[name]["mean"]:.4f}' + (f' +- {error:.4f}' if error is not None else ''))
    results.append(row)
    print(f'{initial:<9}{empty:<8}' + ''.join(f'{cell:>24}' for cell in cells), flush=True)
    (options.folder / 'health.json').write_text(json.dumps(results, indent=2) + '\n')


if __name__ == '__main__':
  main()
