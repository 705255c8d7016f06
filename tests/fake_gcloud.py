"""A stand-in for `gcloud compute tpus queued-resources`, whose slices live as planned.

All that it knows is in files of one folder: `plan`, how each life ends, a status of each worker or
a word; `life`, how many there were; `state`; and `calls`, what it was asked.
"""

from collections.abc import Callable
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time


def answer(
  here: pathlib.Path, words: list[str], remote: Callable[..., int], say: Callable[[str], None]
) -> int | str:
  """What a command exits with, as of `sys.exit`: a status, or what is wrong.

  Args:
    here: the folder.
    words: the command and its arguments.
    remote: runs a script on a worker: its folder, the script and the status that is planned.
    say: what goes to standard output.
  """
  subcommand = words[0]
  with open(here / 'calls', 'a') as calls:
    calls.write(f'{subcommand}\n')
  state, life = here / 'state', here / 'life'
  lives = int(life.read_text()) if life.exists() else 0
  plan = (here / 'plan').read_text().split()
  mine = plan[min(max(lives, 1), len(plan)) - 1]
  workers = [here / f'worker{number}' for number in (0, 1)]
  if subcommand == 'create':
    if mine == 'refused':
      return 'PERMISSION_DENIED'
    mine = plan[min(lives, len(plan) - 1)]
    state.write_text('FAILED' if mine == 'failed' else 'PROVISIONING')
    life.write_text(str(lives + 1))
  elif subcommand == 'describe':
    if mine == 'untold':
      return 'ERROR: no project'
    if not state.exists():
      return 'ERROR: NOT_FOUND: Resource was not found'
    say(state.read_text())
    if state.read_text() == 'PROVISIONING':
      state.write_text('ACTIVE')
  elif subcommand == 'delete':
    state.unlink()
    for worker in workers:
      shutil.rmtree(worker, ignore_errors=True)
  elif subcommand == 'scp':
    for worker in workers:
      worker.mkdir(exist_ok=True)
      shutil.copy(words[1], worker / words[2].split(':')[1])
  elif subcommand == 'ssh':
    script = next(word for word in words if word.startswith('--command=')).split('=', 1)[1]
    follows = 'tail' in script
    if follows and mine == 'preempted':
      state.write_text('SUSPENDED')
      return 255
    if follows and mine == 'broken' and not (here / 'broke').exists():
      (here / 'broke').touch()
      return 255
    if follows and mine == 'nobody':  # gcloud prepares no worker, warns, and ends with 0
      state.write_text('SUSPENDED')
      return 0
    if follows and mine == 'endless':
      say('training')
      time.sleep(60)
    planned = mine.split(',') if re.fullmatch(r'[\d,]+', mine) else ['0', '0']
    pairs = zip(workers, planned, strict=True)
    statuses = [remote(here, worker, script, status) for worker, status in pairs]
    return next(filter(None, statuses), 0)
  return 0


def in_bash(here, worker, script, status):
  """Really runs a script, in the folder of the worker."""
  env = {'HOME': str(worker), 'PATH': f'{here}:/usr/bin:/bin', 'STATUS': status}
  script = script.replace('/tmp/ngrammer_jax', str(worker / 'state'))
  script = script.replace('tail ', 'tail --sleep-interval=0.05 ')
  return subprocess.run(['bash', '-c', script], env=env, cwd=worker).returncode


if __name__ == '__main__':  # as `gcloud compute tpus queued-resources ...`
  print_now = lambda text: print(text, flush=True)
  sys.exit(answer(pathlib.Path(os.environ['FAKE_GCLOUD']), sys.argv[4:], in_bash, print_now))
