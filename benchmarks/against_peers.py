"""Speed of ngrammer_jax beside other codes for the same models, in one table.

  pip install torch transformers n-grammer-pytorch
  python -m benchmarks.against_peers --json=peers.json \
    --peer adaptive-span=/path/to/adaptive-span --peer transformer-xl=/path/to/transformer-xl

Packages are used where they are installed, repositories where --peer names their folder. What is
missing is skipped, and named. --quick takes about five minutes. See `benchmarks.paired`: a ratio
above 1 says that ngrammer_jax is faster.
"""

import argparse
from collections.abc import Callable
import functools
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

from benchmarks import decoding_against_peers, dense_step, ngrammer_layer, paired

PACKAGES = ('jax', 'flax', 'torch', 'transformers', 'n-grammer-pytorch')


def make_layer(side: str) -> dict[str, Callable[[], int]]:
  """Returns the passes of the N-Grammer layer, see `paired.Make`."""
  runs = ngrammer_layer.make_jax()[0] if side == paired.OURS else ngrammer_layer.make_torch()

  def once(run):
    run()
    return 1

  return {name: functools.partial(once, run) for name, run in runs.items()}


def compare(is_quick: bool, peers: dict[str, pathlib.Path]) -> dict[str, dict[str, Any]]:
  """Returns the measurements of each comparison, see `paired.measure`."""
  rounds = 3 if is_quick else 7
  layers = (paired.OURS, 'n-grammer-pytorch')
  return {
    'plain Transformer of the quickstart': dense_step.measure(rounds, with_compile=not is_quick),
    'N-Grammer layer': paired.measure(
      {side: functools.partial(make_layer, side) for side in layers}, rounds
    ),
    'greedy decoding, by token': decoding_against_peers.measure(rounds, is_quick),
  }


def versions() -> dict[str, str]:
  """Returns the versions of the packages that are installed."""
  found = {'python': platform.python_version()}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def named_folder(text: str) -> tuple[str, pathlib.Path]:
  """Parses NAME=FOLDER."""
  name, equals, folder = text.partition('=')
  if not equals or not pathlib.Path(folder).is_dir():
    raise argparse.ArgumentTypeError(f'{text} is not NAME=FOLDER of a checkout')
  return name, pathlib.Path(folder)


def main() -> None:
  """Prints the tables; with --json also writes them."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--peer', type=named_folder, action='append', default=[], help='NAME=FOLDER')
  parser.add_argument('--quick', action='store_true', help='fewer rounds and cases')
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  print(', '.join(f'{name} {version}' for name, version in versions().items()))
  result = compare(options.quick, dict(options.peer))
  for name, measured in result.items():
    print(f'\n{name}\n{paired.format_table(measured)}')
  if options.json:
    report = {'versions': versions(), 'processor': platform.processor(), 'comparisons': result}
    options.json.write_text(json.dumps(report, indent=2) + '\n')


if __name__ == '__main__':
  main()
