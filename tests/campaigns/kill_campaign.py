"""Kills a training run repeatedly, and checks that its result is bit-identical.

  python -m tests.campaigns.kill_campaign --folder=/tmp/kills --kills=20 \\
    --config=configs/quickstart.py --config.training.steps=60 --config.training.checkpoint_every=10

One run is not disturbed. Other runs of the same command are killed with SIGKILL at random times,
every second time while a checkpoint is being written, and started again until they finish. Every
array of the train state and every line of metrics.jsonl has to equal that of the undisturbed run.
The exit status is 1 if anything differs.
"""

import argparse
from collections.abc import Iterator
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from tests.training.helpers import arrays, records


def start(subcommand: str, workdir: pathlib.Path, arguments: list[str]) -> subprocess.Popen:
  """Starts a command, with its output in a file next to the workdir."""
  command = [sys.executable, '-m', f'ngrammer_jax.{subcommand}', f'--workdir={workdir}', *arguments]
  with workdir.with_suffix('.log').open('a', encoding='utf-8') as log:
    return subprocess.Popen(command, stdout=log, stderr=log)


def wait(process: subprocess.Popen, workdir: pathlib.Path) -> None:
  """Waits for a process to finish; exits if it fails."""
  if process.wait():
    sys.exit(f'{process.args[2]} failed with status {process.returncode}, see {workdir}.log')


def end(
  process: subprocess.Popen,
  workdir: pathlib.Path,
  seconds: float,
  in_save: bool,
  number: signal.Signals = signal.SIGKILL,
) -> str:
  """Ends a run by a signal after some seconds, or in the next save; returns when that was."""
  folder, start = workdir / 'checkpoints', time.monotonic()
  while process.poll() is None:
    if time.monotonic() - start > seconds and (not in_save or any(folder.glob('*.scratch*'))):
      time.sleep(random.uniform(0, 0.1))
      break
    time.sleep(0.001)
  is_saving = any(folder.glob('*.scratch*'))
  process.send_signal(number)
  process.wait()
  steps = [record['step'] for record in complete_records(workdir)]
  moment = f'after step {steps[-1]}' if steps else 'before the first step'
  return f'{moment}, while saving' if is_saving else moment


def complete_records(workdir: pathlib.Path) -> list[dict[str, float]]:
  """Returns metrics.jsonl after a kill, which may have cut the last line short."""
  path = workdir / 'metrics.jsonl'
  text = path.read_text(encoding='utf-8') if path.exists() else ''
  return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith('\n')]


def differences(workdir: pathlib.Path, reference: pathlib.Path) -> list[str]:
  """Returns the names of all arrays, and of the records, that differ from a reference run.

  Dtype, shape and checksum of an array are compared, and every line of metrics.jsonl but its times.
  """
  actual, expected = arrays(workdir), arrays(reference)
  names = actual.keys() | expected.keys()
  differing = [name for name in names if actual.get(name) != expected.get(name)]
  if records(workdir) != records(reference):
    differing.append('metrics.jsonl')
  return sorted(differing)


def campaign(
  folder: pathlib.Path,
  arguments: list[str],
  count: int,
  number: signal.Signals = signal.SIGKILL,
  subcommand: str = 'train',
) -> Iterator[tuple[list[str], list[str]]]:
  """Yields, for each run, the moments at which it was ended, and the names of what differs.

  Args:
    folder: folder for the workdirs; its content is deleted.
    arguments: arguments of the command.
    count: number of signals.
    number: the signal. A run that gets SIGTERM must end with status 143.
    subcommand: train or finetune.
  """
  reference = folder / 'reference'
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  start_time = time.monotonic()
  wait(start(subcommand, reference, arguments), reference)
  seconds = time.monotonic() - start_time
  ended = -number if number == signal.SIGKILL else 128 + number

  sent, rounds = 0, 0
  while sent < count:
    workdir, moments = folder / f'killed_{rounds}', []
    rounds += 1
    while True:
      start_time, log = time.monotonic(), workdir.with_suffix('.log')
      log_size = log.stat().st_size if log.exists() else 0
      process = start(subcommand, workdir, arguments)
      if sent == count:
        wait(process, workdir)
        break
      moment = end(process, workdir, random.uniform(0, seconds), sent % 2 == 0, number)
      if process.returncode == 0:  # not ended: the program is compiled by now
        seconds = min(seconds, time.monotonic() - start_time)
        break
      # In the first instant Python has not yet loaded the program, which handles SIGTERM.
      is_unloaded = process.returncode == -number and log.stat().st_size == log_size
      if process.returncode != ended and not is_unloaded:
        sys.exit(f'{subcommand} ended with status {process.returncode}, see {workdir}.log')
      sent += 1
      moments.append(moment)
    yield moments, differences(workdir, reference)


def main() -> None:
  """Runs the campaign."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--folder',
    type=pathlib.Path,
    required=True,
    help='folder for the workdirs; its content is deleted',
  )
  parser.add_argument('--kills', type=int, default=20)
  parser.add_argument('--seed', type=int, default=0, help='random seed of the times')
  options, arguments = parser.parse_known_args()
  random.seed(options.seed)
  kills, rounds, num_differences = 0, 0, 0
  for moments, names in campaign(options.folder, arguments, options.kills):
    for moment in moments:
      kills += 1
      print(f'kill {kills}: {moment}', flush=True)
    print(f'killed_{rounds}: {len(names)} differences {", ".join(names)}', flush=True)
    rounds, num_differences = rounds + 1, num_differences + len(names)
  size = len(arrays(options.folder / 'reference'))
  print(f'{kills} kills, {rounds} runs, {num_differences} differences in {size} arrays')
  sys.exit(bool(num_differences))


if __name__ == '__main__':
  main()
