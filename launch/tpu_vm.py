"""Trains on one or more Cloud TPU slices until the training is finished, then deletes them.

  python launch/tpu_vm.py --name=c4 --type=v5litepod-16 --zone=ZONE --spot -- \\
    python -m ngrammer_jax.train --config=configs/ngrammer_c4.py:393k_8k_50 --workdir=gs://BUCKET/c4

It requests a queued resource. When the slices are there, it installs this checkout on every worker
and starts the command with --distributed, in the checkout. The command runs in the background: if
this program is stopped or loses the network, rerun it to follow the training again. It ends with
status 0 (finished) or 2 (bad input); after any other status or a preemption, the slices are deleted
and requested again, at most --restarts times. Multislice needs no environment variables: JAX finds
them on the workers.
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
PACKED = ('setup.py', 'pyproject.toml', 'README.md', 'ngrammer_jax', 'configs')
# https://cloud.google.com/tpu/docs/runtimes
OLD_VERSIONS, OLD_RUNTIME = ('v2', 'v3', 'v4'), 'tpu-ubuntu2204-base'
RUNTIMES = {'v5litepod': 'v2-alpha-tpuv5-lite', 'v5p': 'v2-alpha-tpuv5', 'v6e': 'v2-alpha-tpuv6e'}
PENDING_STATES = ('ACCEPTED', 'WAITING_FOR_RESOURCES', 'CREATING', 'PROVISIONING')
COMMAND_TRIES, POLL_TRIES = 5, 60
MIN_RUN_SECONDS = 600  # a shorter run counts as a crash unless the slices were lost
MAX_CRASHES = 3  # in a row
WORKER_DIR = '/tmp/ngrammer_jax'  # log, pid and status, on each worker; a reboot empties it
log = functools.partial(print, 'tpu_vm:', file=sys.stderr, flush=True)

# gcloud runs these on at most 64 workers at a time, and repeats them if ssh fails, so each command
# is idempotent, and only the last one waits for the training. The image has Python 3.10; uv
# installs a newer version.
INSTALL = (
  f'test -e {WORKER_DIR}/pid || {{ rm -rf ngrammer_jax {WORKER_DIR}; '
  f'mkdir ngrammer_jax {WORKER_DIR} && '
  'tar -xzf ngrammer_jax.tgz -C ngrammer_jax && cd ngrammer_jax && '
  'python3 -m pip install --user uv && python3 -m uv venv --python=3.12 .venv && '
  "python3 -m uv pip install --python=.venv/bin/python --editable '.[tpu,gcs]'; }"
)
START = (
  f'test -e {WORKER_DIR}/pid || {{ cd ngrammer_jax; export PATH="$PWD/.venv/bin:$PATH"; '
  f'setsid bash -c %s >{WORKER_DIR}/log 2>&1 </dev/null & echo $! >{WORKER_DIR}/pid; }}'
)
FOLLOW = (
  f'cd {WORKER_DIR} && tail -n 50 -f --pid=$(cat pid) log; '
  f'status=$(cat {WORKER_DIR}/status || echo 1); '
  'echo "<ended with status $status>"; exit $status'
)


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
  """Returns the commands that are run on this machine, by name."""
  gcloud = ['gcloud', 'compute', 'tpus', 'queued-resources']
  location = [f'--zone={args.zone}', *([f'--project={args.project}'] if args.project else [])]
  archive = f'/tmp/{args.name}.tgz'
  create = [f'--accelerator-type={args.type}', f'--runtime-version={args.runtime}', *location]
  nodes = [f'--node-count={args.slices}', f'--node-prefix={args.name}']
  create += nodes if args.slices > 1 else [f'--node-id={args.name}']
  create += ['--spot'] * args.spot + args.option
  all_workers = ['--node=all', '--worker=all', *location]
  ssh = [*gcloud, 'ssh', args.name, *all_workers, '--ssh-flag=-o ServerAliveInterval=30']
  command = args.command + ['--distributed'] * ('--distributed' not in args.command)
  command = shlex.quote(f'{shlex.join(command)}; echo $? >{WORKER_DIR}/status')
  return {
    'pack': ['tar', '--exclude=__pycache__', '-czf', archive, '-C', str(ROOT), *PACKED],
    'create': [*gcloud, 'create', args.name, *create],
    'state': [*gcloud, 'describe', args.name, *location, '--format=value(state.state)'],
    'describe': [*gcloud, 'describe', args.name, *location],
    'copy': [*gcloud, 'scp', archive, f'{args.name}:ngrammer_jax.tgz', *all_workers],
    'install': [*ssh, f'--command={INSTALL}'],
    'start': [*ssh, f'--command={START % command}'],
    'follow': [*ssh, f'--command={FOLLOW}'],
    'delete': [*gcloud, 'delete', args.name, *location, '--force', '--quiet'],
  }


class Launcher:
  """Creates slices, trains on them and deletes them.

  Args:
    commands: see `commands`.
    poll: seconds between two attempts or checks.
  """

  def __init__(self, commands: dict[str, list[str]], poll: float):
    self._commands, self._poll = commands, poll

  def state(self, tries: int = POLL_TRIES) -> str:
    """Returns the state of the queued resource, NOT_FOUND if there is none."""
    for _ in range(tries):
      result = subprocess.run(self._commands['state'], capture_output=True, text=True)
      if result.returncode == 0:
        return result.stdout.strip()
      if 'NOT_FOUND' in result.stderr:
        return 'NOT_FOUND'
      log(result.stderr.strip())
      if tries == 1:
        sys.exit('error: gcloud failed to describe the queued resource; nothing was requested')
      time.sleep(self._poll)
    sys.exit(
      f'error: the state is unknown, and it may cost: {shlex.join(self._commands["delete"])}'
    )

  def run_until_finished(self, restarts: int) -> int:
    """Trains until it is finished, and deletes the slices. Returns the exit status."""
    subprocess.run(self._commands['pack'], check=True)
    crashes = 0
    for restarts_left in reversed(range(restarts + 1)):
      start_time = time.monotonic()
      status = self._run_once()
      is_short = time.monotonic() - start_time < MIN_RUN_SECONDS
      crashes = crashes + 1 if is_short and self.state() in ('ACTIVE', 'FAILED') else 0
      self._delete()
      if status is None and crashes == MAX_CRASHES:
        log(f'crashed {MAX_CRASHES} times within minutes, without losing the slices; see the log')
        return 1
      if status is not None:
        return status
      log(f'lost or stopped, and deleted; {restarts_left} restarts left')
    return 1

  def _run_once(self) -> int | None:
    """Runs on one set of slices. Returns the exit status, or None to try again."""
    state = self._create()
    if state != 'ACTIVE':
      subprocess.run(self._commands['describe'])  # the reason, such as a quota
      return 1 if state == 'NOT_FOUND' else None
    for step in ('copy', 'install', 'start'):
      if not self._run(step):
        return 1 if self.state() == 'ACTIVE' else None
    return self._follow()

  def _create(self) -> str:
    """Requests the slices if there are none, and waits. Returns the final state."""
    state = self.state()
    if state not in (*PENDING_STATES, 'ACTIVE'):
      self._delete()
      self._run('create')
      state = self.state()
    while state in PENDING_STATES:
      log(state)
      previous = state
      while state == previous:
        time.sleep(self._poll)
        state = self.state()
    return state

  def _follow(self) -> int | None:
    """Prints the log of the training until it ends. Returns 0, 2, or None to start it again."""
    for _ in range(POLL_TRIES):
      statuses, pipe = [], {'stdout': subprocess.PIPE, 'text': True, 'errors': 'replace'}
      with subprocess.Popen(self._commands['follow'], **pipe) as process:
        for line in process.stdout:
          print(line, end='', flush=True)
          statuses += map(int, re.findall(r'<ended with status (\d+)>', line))
      if 2 in statuses:
        return 2
      if statuses and not any(statuses) and process.returncode == 0:
        return 0
      if any(statuses) or self.state() != 'ACTIVE':
        return None
      log('the connection to the workers was lost; connecting again')
      time.sleep(self._poll)
    return None

  def _delete(self) -> None:
    """Deletes the slices. Exits with an error if that fails, because they cost money."""
    for _ in range(POLL_TRIES):
      if self.state() == 'NOT_FOUND' or self._run('delete'):
        return
    sys.exit(f'error: the slices still exist, and cost: {shlex.join(self._commands["delete"])}')

  def _run(self, name: str) -> bool:
    """Runs a command until it succeeds; returns whether it did."""
    for _ in range(COMMAND_TRIES):
      if subprocess.run(self._commands[name]).returncode == 0:
        return True
      time.sleep(self._poll)
    return False


def main() -> int:
  """Trains, or prints the commands."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument('--name', required=True, help='name of the queued resource')
  parser.add_argument('--type', required=True, help='type of a slice: v5litepod-16, v5p-32, v6e-64')
  parser.add_argument('--slices', type=int, default=1, help='number of slices')
  parser.add_argument('--zone', required=True)
  parser.add_argument('--project', help='default: the project of gcloud')
  parser.add_argument('--runtime', help='runtime version; default: that of the type')
  parser.add_argument(
    '--spot', action='store_true', help='use spot capacity: cheaper, can be preempted'
  )
  parser.add_argument(
    '--option', action='append', default=[], help='option for create, such as --reserved'
  )
  parser.add_argument('--restarts', type=int, default=100, help='maximum number of restarts')
  parser.add_argument('--poll', type=float, default=30, help='seconds between two checks')
  parser.add_argument('--dry_run', action='store_true', help='print the commands and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  args = parser.parse_args()
  if args.slices < 1:
    parser.error('--slices must be at least 1')
  if args.restarts < 0 or args.poll < 0:
    parser.error('--restarts and --poll must be at least 0')
  if not re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', args.name):
    parser.error(
      f'--name={args.name} must be lower-case letters, digits and hyphens, starting with a letter'
    )
  version = args.type.split('-')[0]
  has_runtime = version in RUNTIMES or version in OLD_VERSIONS or args.runtime is not None
  if not has_runtime or not re.fullmatch(r'v\d+[a-z]*-\d+', args.type):
    parser.error(
      f'--type={args.type}: expected for example v5litepod-16 (which is v5e:4x4), v5p-32 or '
      f'v6e-64; a type of another version needs --runtime'
    )
  workdir = re.search(r'--workdir[= ](\S+)', ' '.join(args.command))
  if workdir and not workdir[1].startswith('gs://'):
    parser.error(f'{workdir[0]} would be deleted with the slice: use a bucket, gs://BUCKET/FOLDER')
  args.runtime = args.runtime or RUNTIMES.get(version, OLD_RUNTIME)
  launcher_commands = commands(args)
  if args.dry_run:
    print('\n'.join(map(shlex.join, launcher_commands.values())))
    return 0
  launcher = Launcher(launcher_commands, args.poll)
  try:
    launcher.state(tries=1)
    return launcher.run_until_finished(args.restarts)
  except KeyboardInterrupt:
    delete = shlex.join(launcher_commands['delete'])
    log(f'the training continues, and costs; rerun the same command to follow it, or: {delete}')
    return 130
  except (OSError, subprocess.CalledProcessError) as error:
    sys.exit(f'error: {error}; --dry_run prints the commands')


if __name__ == '__main__':
  sys.exit(main())
