"""Evaluates a run: python -m ngrammer_jax.evaluate --workdir=DIR --split=test."""

import argparse
import pathlib

from ngrammer_jax import flags


def main(argv: list[str]) -> int:
  """Scores a split, writes evaluation/<split>.json and prints a table."""
  parser = argparse.ArgumentParser(prog='python -m ngrammer_jax.evaluate', description=__doc__)
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='of the run')
  parser.add_argument('--split', default='test', help='train, validation or test')
  parser.add_argument('--step', default='newest', help='a checkpoint: a step, newest or best')
  options = parser.parse_args(argv)

  from ngrammer_jax import runs
  from ngrammer_jax.evaluation import language_modeling

  result = runs.load_run(options.workdir, flags.step(options.step)).evaluate(options.split)
  path = options.workdir / 'evaluation' / f'{options.split}.json'
  language_modeling.save(result, path)
  print(language_modeling.table({options.split: result}))
  print(f'step {result["step"]:,}, written to {path}')
  return 0


if __name__ == '__main__':
  flags.run(main)
