"""Speed of ngrammer_jax beside other implementations for the same models, in one table.

  pip install torch transformers n-grammer-pytorch
  git clone https://github.com/facebookresearch/adaptive-span
  git clone https://github.com/kimiyoung/transformer-xl
  python -m benchmarks.against_peers --json=peers.json \\
    --peer adaptive-span=adaptive-span --peer transformer-xl=transformer-xl

Installed packages are used, and repositories with a folder in --peer. Missing ones are skipped, and
named. --quick takes less than five minutes on two cores. See
`benchmarks.paired`: a ratio above 1 says that ngrammer_jax is faster. On a busy machine, give every
side one core (`taskset --cpu-list 0`) and compare CPU seconds: waiting threads of PyTorch count as
busy.
"""

import argparse
from collections.abc import Callable, Mapping
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess

from benchmarks import (
  decoding_against_peers,
  dense_step,
  ngrammer_layer,
  paired,
  published_model,
  span_step,
  transformer_xl_step,
)

PACKAGES = ('jax', 'flax', 'torch', 'transformers', 'n-grammer-pytorch')
Peers = Mapping[str, pathlib.Path]  # folders of repositories, by name
# Return the sides of a comparison. QUICK has fewer cases, sides and passes.
CASES: dict[str, Callable[[Peers], dict[str, paired.Make]]] = {
  'dense_step': lambda peers: dense_step.sides(with_compile=True),
  'dense_step_plain': lambda peers: dense_step.sides('plain'),
  'ngrammer_layer': lambda peers: ngrammer_layer.sides(),
  'decoding': lambda peers: decoding_against_peers.sides(),
  'published_model': published_model.sides,
  'span_step': span_step.sides,
  'transformer_xl_step': transformer_xl_step.sides,
}
QUICK = CASES | {
  'dense_step': lambda peers: dense_step.sides(),
  'decoding': lambda peers: decoding_against_peers.sides(is_quick=True),
}
del QUICK['dense_step_plain'], QUICK['published_model']


def versions(peers: Peers) -> dict[str, str]:
  """Returns the versions of Python, of the packages that are installed, and of repositories."""
  result = {'python': platform.python_version()}
  for name in PACKAGES:
    try:
      result[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  for name, folder in peers.items():
    command = ['git', '-C', folder, 'log', '-1', '--format=%h of %cs']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result[name] = done.stdout.strip() or 'unknown'
  return result


def named_folder(text: str) -> tuple[str, pathlib.Path]:
  """Parses NAME=FOLDER."""
  name, equals, folder = text.partition('=')
  if not equals or not pathlib.Path(folder).is_dir():
    raise argparse.ArgumentTypeError(f'{text} is not NAME=FOLDER of a checkout')
  return name, pathlib.Path(folder).resolve()


def main() -> None:
  """Prints a table for each case; with --json also writes them."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--peer', type=named_folder, action='append', default=[], help='NAME=FOLDER')
  parser.add_argument('--cases', nargs='+', choices=CASES, help='default: all')
  parser.add_argument('--rounds', type=int, help='default: 7, or 3 if quick')
  parser.add_argument('--quick', action='store_true', help='fewer rounds, sides and passes')
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  peers = dict(options.peer)
  cases = QUICK if options.quick else CASES
  rounds = options.rounds or (3 if options.quick else 7)
  report = {
    'versions': versions(peers),
    'processor': platform.processor() or platform.machine(),
    'cores': len(os.sched_getaffinity(0)),
    'rounds': rounds,
    'cases': {},
  }
  print(f'{report["cores"]} cores of {report["processor"]}, {rounds} rounds')
  print(', '.join(f'{name} {version}' for name, version in report['versions'].items()))
  for name in options.cases or cases:
    report['cases'][name] = paired.measure(cases[name](peers), rounds)
    print(f'\n{name}\n{paired.format_table(report["cases"][name])}', flush=True)
    if options.json:  # also if a later case is interrupted
      options.json.write_text(json.dumps(report, indent=2) + '\n')


if __name__ == '__main__':
  main()
