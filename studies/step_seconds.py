"""Seconds of a training step of each arm of studies/program.md, on equal hardware.

  python -m studies.step_seconds --arms value_embeddings engram --rounds=3

times the steps of the arms in turn, each in a process of its own on one core, and appends a line
for each arm and round to program.jsonl. Rounds are paired: what slows the machine slows the arms
of a round alike. The machine should do nothing else. Training seconds in the lines of the runs are
of shared cores, and are not compared.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
import tempfile

from ngrammer_jax import errors, flags
from studies import program, results, run

TABLE = 'speed'


def step_seconds(arm: str, core: int) -> float:
  """Returns the seconds of a training step of an arm on one core.

  Raises:
    BadInput: the dry run fails.
  """
  with tempfile.TemporaryDirectory() as workdir:
    command = [sys.executable, '-m', 'ngrammer_jax.train', f'--config=studies/arms.py:{arm}']
    command += ['--config.data.path=unread', f'--workdir={workdir}/run', '--dry_run']
    pinned = ['taskset', '--cpu-list', str(core), *command]
    process = subprocess.run(pinned, capture_output=True, text=True)
  return read_seconds(process.stdout + process.stderr, arm)


def read_seconds(printed: str, arm: str) -> float:
  """Returns the seconds of a step that a dry run has printed. Raises BadInput without them."""
  match = re.search(r'(?m)^step +([\d.]+) s,', printed)
  if match is None:
    raise errors.BadInput(f'the dry run of {arm} printed no seconds of a step:\n{printed}')
  return float(match[1])


def main(argv: list[str]) -> int:
  """Times the arms."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--arms', nargs='*', choices=program.ARMS, default=program.ARMS)
  parser.add_argument('--rounds', type=int, default=3, help='times of each arm')
  options = parser.parse_args(argv)
  core = max(os.sched_getaffinity(0))
  lines = results.read(results.PROGRAM)
  rounds = [line['seed'] for line in lines if line['table'] == TABLE]
  first = max(rounds, default=-1) + 1
  for number in range(first, first + options.rounds):
    for arm in options.arms:
      seconds = step_seconds(arm, core)
      names = {'cell': f'{TABLE}.{arm}.{number}', 'table': TABLE, 'model': arm, 'seed': number}
      line = names | {'step_seconds': seconds, 'hardware': run.hardware(1)}
      results.append(results.PROGRAM, line)
      logging.info('%s: %.3f s', line['cell'], seconds)
  return 0


if __name__ == '__main__':
  flags.run(main)
