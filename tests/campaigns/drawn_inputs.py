"""Runs a trial of many drawn inputs, each from a seed of its own."""

import argparse
from collections.abc import Callable
import sys


def run(description: str | None, check: Callable[[int], object], inputs: int) -> None:
  """Checks inputs, prints the seeds that fail, and ends the program.

  Args:
    description: what the trial is.
    check: draws the input of a seed, and checks it.
    inputs: their number, unless `--inputs` has another.
  """
  parser = argparse.ArgumentParser(
    description=description, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--inputs', type=int, default=inputs)
  parser.add_argument('--seed', type=int, default=0, help='seed of the first input; others follow')
  options = parser.parse_args()
  failures = 0
  for seed in range(options.seed, options.seed + options.inputs):
    try:
      check(seed)
    except Exception as error:  # all failures are listed
      failures += 1
      print(f'seed {seed}: {type(error).__name__}: {error}')
  print(f'{options.inputs} inputs, {failures} failures')
  sys.exit(bool(failures))
