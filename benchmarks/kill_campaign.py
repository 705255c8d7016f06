"""Kills a training run again and again and compares what it ends with, bit by bit.

  python benchmarks/kill_campaign.py --folder=/tmp/kills --kills=20 \\
    --config=configs/quickstart.py --config.training.steps=60 --config.training.checkpoint_every=10

One run is left alone. Others of the same command are killed with SIGKILL at random moments,
every other time while a checkpoint is being written, and started again until they finish;
then every array of the train state and every line of metrics.jsonl must be the same.
Exit status 1 if anything differs.
"""

import argparse
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

TIMES = ('tokens_per_second', 'mfu', 'goodput')  # all of metrics.jsonl that may differ


def train(workdir: pathlib.Path, arguments: list[str]) -> subprocess.Popen:
  """Starts training, its output in a file beside the workdir."""
  command = [sys.executable, '-m', 'ngrammer_jax.train', f'--workdir={workdir}', *arguments]
  with workdir.with_suffix('.log').open('a', encoding='utf-8') as log:
    return subprocess.Popen(command, stdout=log, stderr=log)


def finish(process: subprocess.Popen, workdir: pathlib.Path) -> None:
  """Waits for a run that nobody kills."""
  if process.wait():
    sys.exit(f'training failed with status {process.returncode}, see {workdir}.log')


def records(workdir: pathlib.Path) -> list[dict[str, float]]:
  """metrics.jsonl without the times."""
  path = workdir / 'metrics.jsonl'
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def arrays(workdir: pathlib.Path) -> dict[str, list]:
  """Dtype, shape and checksum of every array of the last checkpoint, by name."""
  steps = [path for path in (workdir / 'checkpoints').iterdir() if path.name.isdecimal()]
  last = max(steps, key=lambda path: int(path.name))
  return json.loads((last / 'manifest.json').read_text(encoding='utf-8'))['leaves']


def kill(process: subprocess.Popen, workdir: pathlib.Path, seconds: float, saving: bool) -> str:
  """Kills after some seconds, or in the next save after them; returns what was going on."""
  folder, began = workdir / 'checkpoints', time.monotonic()
  while process.poll() is None:
    if time.monotonic() - began > seconds and (not saving or any(folder.glob('*.scratch*'))):
      time.sleep(random.uniform(0, 0.1))
      break
    time.sleep(0.001)
  writing = any(folder.glob('*.scratch*'))
  process.send_signal(signal.SIGKILL)
  process.wait()
  logged = [r['step'] for r in whole_lines(workdir)]
  at = f'after step {logged[-1]}' if logged else 'before the first step'
  return f'{at}, while saving' if writing else at


def whole_lines(workdir: pathlib.Path) -> list[dict[str, float]]:
  """metrics.jsonl as a kill leaves it: the last line may be half."""
  path = workdir / 'metrics.jsonl'
  text = path.read_text(encoding='utf-8') if path.exists() else ''
  return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith('\n')]


def differences(workdir: pathlib.Path, whole: pathlib.Path) -> list[str]:
  """Names of all arrays, and numbers of all records, that are not the same."""
  one, other = arrays(workdir), arrays(whole)
  wrong = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
  if records(workdir) != records(whole):
    wrong.append('metrics.jsonl')
  return sorted(wrong)


def main() -> None:
  """Runs the campaign."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, required=True, help='for the workdirs')
  parser.add_argument('--kills', type=int, default=20)
  parser.add_argument('--seed', type=int, default=0, help='of the moments')
  options, arguments = parser.parse_known_args()
  random.seed(options.seed)
  whole = options.folder / 'whole'
  for old in options.folder.glob('*') if options.folder.exists() else ():
    shutil.rmtree(old) if old.is_dir() else old.unlink()
  options.folder.mkdir(parents=True, exist_ok=True)
  began = time.monotonic()
  finish(train(whole, arguments), whole)
  seconds = time.monotonic() - began
  print(f'undisturbed: {seconds:.1f} s', flush=True)

  kills, rounds, differ = 0, 0, 0
  while kills < options.kills:
    workdir = options.folder / f'killed_{rounds}'
    rounds += 1
    while True:
      process = train(workdir, arguments)
      if kills == options.kills:
        finish(process, workdir)
        break
      where = kill(process, workdir, random.uniform(0, seconds), saving=kills % 2 == 0)
      if process.returncode == 0:
        break
      if process.returncode != -signal.SIGKILL:
        finish(process, workdir)
      kills += 1
      print(f'kill {kills}: {where}', flush=True)
    wrong = differences(workdir, whole)
    differ += len(wrong)
    print(f'{workdir.name}: {len(wrong)} differences {", ".join(wrong)}', flush=True)
  print(f'{kills} kills, {rounds} runs, {differ} differences in {len(arrays(whole))} arrays')
  sys.exit(bool(differ))


if __name__ == '__main__':
  main()
