"""Trains on a Cloud TPU slice, or on several as one, until it is finished, and gives them back.

  python launch/tpu_vm.py --name=c4 --type=v5litepod-16 --zone=ZONE --spot -- \\
    python -m ngrammer_jax.train --config=configs/ngrammer_c4.py:393k_8k_50 --workdir=gs://BUCKET/c4

A queued resource is asked for; once it is there, this checkout is installed on every worker and the
command started with --distributed, in the checkout. It runs there by itself: when this program is
ended or loses the network, the same command follows it again. Status 0 (finished) and 2 (it cannot
work) end it; after anything else, and when the slice is taken away, it is deleted and asked for
again, --restarts times at most. Multislice needs no variables: JAX finds them on the workers.
"""

import argparse
import functools
import pathlib
import re
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHIPPED = ('setup.py', 'pyproject.toml', 'README.md', 'ngrammer_jax', 'configs')
# https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {'v5litepod': 'v2-alpha-tpuv5-lite', 'v5p': 'v2-alpha-tpuv5', 'v6e': 'v2-alpha-tpuv6e'}
WAITING = ('ACCEPTED', 'WAITING_FOR_RESOURCES', 'CREATING', 'PROVISIONING')
TRIES, LOOKS = 5, 60  # of what may fail for a moment: steps, and all that only looks
SHORT, CRASHES = 600, 3  # seconds of a training, and how many in a row end so soon by themselves
HERE = '/tmp/ngrammer_jax'  # log, pid and status, on each worker; a reboot empties it
say = functools.partial(print, 'tpu_vm:', file=sys.stderr, flush=True)

# gcloud runs these on at most 64 workers at a time, and again where ssh breaks: each may be
# repeated, and none but the last waits for the training. The image has Python 3.10, uv a newer one.
INSTALL = (
  f'test -e {HERE}/pid || {{ rm -rf ngrammer_jax {HERE}; mkdir ngrammer_jax {HERE} && '
  'tar -xzf ngrammer_jax.tgz -C ngrammer_jax && cd ngrammer_jax && '
  'python3 -m pip install --user uv && python3 -m uv venv --python=3.12 .venv && '
  "python3 -m uv pip install --python=.venv/bin/python --editable '.[tpu,gcs]'; }"
)
START = (
  f'test -e {HERE}/pid || {{ cd ngrammer_jax; export PATH="$PWD/.venv/bin:$PATH"; '
  f'setsid bash -c %s >{HERE}/log 2>&1 </dev/null & echo $! >{HERE}/pid; }}'
)
FOLLOW = (
  f'cd {HERE} && tail -n 50 -f --pid=$(cat pid) log; status=$(cat {HERE}/status || echo 1); '
  'echo "<ended with status $status>"; exit $status'
)


def commands(o: argparse.Namespace) -> dict[str, list[str]]:
  """All that is run here, by what it is for."""
  gcloud = ['gcloud', 'compute', 'tpus', 'queued-resources']
  where = [f'--zone={o.zone}', *([f'--project={o.project}'] if o.project else [])]
  packed = f'/tmp/{o.name}.tgz'
  create = [f'--accelerator-type={o.type}', f'--runtime-version={o.runtime}', *where]
  several = [f'--node-count={o.slices}', f'--node-prefix={o.name}']
  create += several if o.slices > 1 else [f'--node-id={o.name}']
  create += ['--spot'] * o.spot + o.option
  everywhere = ['--node=all', '--worker=all', *where]
  ssh = [*gcloud, 'ssh', o.name, *everywhere, '--ssh-flag=-o ServerAliveInterval=30']
  command = o.command + ['--distributed'] * ('--distributed' not in o.command)
  command = shlex.quote(f'{shlex.join(command)}; echo $? >{HERE}/status')
  return {
    'pack': ['tar', '--exclude=__pycache__', '-czf', packed, '-C', str(ROOT), *SHIPPED],
    'create': [*gcloud, 'create', o.name, *create],
    'state': [*gcloud, 'describe', o.name, *where, '--format=value(state.state)'],
    'describe': [*gcloud, 'describe', o.name, *where],
    'copy': [*gcloud, 'scp', packed, f'{o.name}:ngrammer_jax.tgz', *everywhere],
    'install': [*ssh, f'--command={INSTALL}'],
    'start': [*ssh, f'--command={START % command}'],
    'follow': [*ssh, f'--command={FOLLOW}'],
    'delete': [*gcloud, 'delete', o.name, *where, '--force', '--quiet'],
  }


def run(command: list[str], poll: float) -> bool:
  """Whether a command succeeds, of some tries."""
  for _ in range(TRIES):
    if subprocess.run(command).returncode == 0:
      return True
    time.sleep(poll)
  return False


def state(to: dict, poll: float, looks: int = LOOKS) -> str:
  """The state of the queued resource, GONE where there is none."""
  for _ in range(looks):
    done = subprocess.run(to['state'], capture_output=True, text=True)
    if done.returncode == 0:
      return done.stdout.strip()
    if 'NOT_FOUND' in done.stderr:
      return 'GONE'
    say(done.stderr.strip())
    if looks == 1:
      sys.exit('error: gcloud cannot tell what there is, see above; nothing was asked for')
    time.sleep(poll)
  sys.exit(f'error: its state is unknown, and it may cost: {shlex.join(to["delete"])}')


def delete(to: dict, poll: float) -> None:
  """Deletes what is there: it must not go on costing unnoticed."""
  for _ in range(LOOKS):
    if state(to, poll) == 'GONE' or run(to['delete'], poll):
      return
  sys.exit(f'error: it is still there, and costs: {shlex.join(to["delete"])}')


def wait(to: dict, poll: float) -> str:
  """Asks for the slices unless they are there, and waits. Returns ACTIVE, or what came instead."""
  now = state(to, poll)
  if now not in (*WAITING, 'ACTIVE'):
    delete(to, poll)
    run(to['create'], poll)
    now = state(to, poll)
  while now in WAITING:
    say(now)
    before = now
    while now == before:
      time.sleep(poll)
      now = state(to, poll)
  return now


def follow(to: dict, poll: float) -> int | None:
  """Shows the training until it ends. Returns 0, 2, or None where it has to be started again."""
  for _ in range(LOOKS):
    statuses, pipe = [], {'stdout': subprocess.PIPE, 'text': True, 'errors': 'replace'}
    with subprocess.Popen(to['follow'], **pipe) as process:
      for line in process.stdout:
        print(line, end='', flush=True)
        statuses += map(int, re.findall(r'<ended with status (\d+)>', line))
    if 2 in statuses:
      return 2
    if statuses and not any(statuses) and process.returncode == 0:
      return 0
    if any(statuses) or state(to, poll) != 'ACTIVE':
      return None
    say('the connection to the workers broke; they are still there')
    time.sleep(poll)
  return None


def live(to: dict, poll: float) -> int | None:
  """One life of the slices. Returns the status to end with, or None to try again."""
  if (now := wait(to, poll)) != 'ACTIVE':
    subprocess.run(to['describe'])  # a quota, for instance; soon it is deleted
    return 1 if now == 'GONE' else None
  for step in ('copy', 'install', 'start'):
    if not run(to[step], poll):
      return 1 if state(to, poll) == 'ACTIVE' else None
  return follow(to, poll)


def until_finished(to: dict, poll: float, restarts: int) -> int:
  """Lives until one ends with a status to end with. Whatever comes of it, nothing stays."""
  subprocess.run(to['pack'], check=True)
  crashes = 0
  for left in reversed(range(restarts + 1)):
    began = time.monotonic()
    status = live(to, poll)
    soon = time.monotonic() - began < SHORT and state(to, poll) in ('ACTIVE', 'FAILED')
    crashes = crashes + 1 if soon else 0
    delete(to, poll)
    if status is None and crashes == CRASHES:
      say(f'ended {CRASHES} times within minutes, and not because it was taken away: see above')
      return 1
    if status is not None:
      return status
    say(f'lost or stopped, and deleted; {left} restarts left')
  return 1


def main() -> int:
  """Runs all of it, or prints the commands."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument('--name', required=True, help='of the queued resource: one a training')
  parser.add_argument('--type', required=True, help='of a slice: v5litepod-16, v5p-32, v6e-64')
  parser.add_argument('--slices', type=int, default=1)
  parser.add_argument('--zone', required=True)
  parser.add_argument('--project', help='that of gcloud')
  parser.add_argument('--runtime', help='software of the workers; that of the type')
  parser.add_argument('--spot', action='store_true', help='cheaper, and taken away at any moment')
  parser.add_argument('--option', action='append', default=[], help='more for create: --reserved')
  parser.add_argument('--restarts', type=int, default=100, help='at most')
  parser.add_argument('--poll', type=float, default=30, help='seconds between two looks')
  parser.add_argument('--dry_run', action='store_true', help='print the commands and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  o = parser.parse_args()
  if o.slices < 1:
    parser.error('--slices must be at least 1')
  if o.restarts < 0 or o.poll < 0:
    parser.error('--restarts and --poll must be at least 0')
  if not re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', o.name):
    parser.error(f'--name={o.name}: small letters, digits and hyphens, a letter first')
  if not re.fullmatch(r'v\d+[a-z]*-\d+', o.type):
    parser.error(
      f'--type={o.type}: expected as in v5litepod-16, which is v5e:4x4, v5p-32 or v6e-64'
    )
  workdir = re.search(r'--workdir[= ](\S+)', ' '.join(o.command))
  if workdir and not workdir[1].startswith('gs://'):
    parser.error(f'{workdir[0]} would be deleted with the slice: name a bucket, gs://BUCKET/FOLDER')
  o.runtime = o.runtime or RUNTIMES.get(o.type.split('-')[0], 'tpu-ubuntu2204-base')
  to = commands(o)
  if o.dry_run:
    print('\n'.join(map(shlex.join, to.values())))
    return 0
  try:
    state(to, o.poll, looks=1)
    return until_finished(to, o.poll, o.restarts)
  except KeyboardInterrupt:
    say(f'it goes on, and costs; the same command follows it, or: {shlex.join(to["delete"])}')
    return 130
  except (OSError, subprocess.CalledProcessError) as error:
    sys.exit(f'error: {error}; --dry_run prints what would be run')


if __name__ == '__main__':
  sys.exit(main())
