"""Runs a command as several processes on this machine, as it runs on the hosts of a pod.

  python launch/local_processes.py --processes=4 -- python -m ngrammer_jax.train \\
    --config=configs/quickstart.py --workdir=runs/four

Each has CPU devices of its own; they find each other on a free port. When one ends badly the
others are ended too. SIGTERM and Ctrl-C are SIGTERM for all of them, a second one kills them. The
exit status is that of the first that ended badly.
"""

import argparse
import math
import shlex
import signal
import socket
import subprocess
import sys
import time

import simulate

GRACE = 60  # seconds in which the others may find out by themselves that one is gone


def commands(command: list[str], processes: int, port: int) -> list[list[str]]:
  """The command of each process."""
  where = [f'--coordinator=localhost:{port}', f'--processes={processes}']
  return [[*command, *where, f'--process_id={number}'] for number in range(processes)]


def free_port() -> int:
  """A port that nobody listens on."""
  with socket.socket() as listening:
    listening.bind(('localhost', 0))
    return listening.getsockname()[1]


def main() -> int:
  """Starts all of them, and returns the exit status of the first that ended badly."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--processes', type=int, default=2)
  parser.add_argument('--devices', type=int, default=1, help='of each process')
  parser.add_argument('--port', type=int, help='where they find each other; a free one')
  parser.add_argument('--dry_run', action='store_true', help='print the commands and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  options = parser.parse_args()
  for name in ('processes', 'devices'):
    if getattr(options, name) < 1:
      parser.error(f'--{name} must be at least 1')
  if options.port is not None and not 0 < options.port < 2**16:
    parser.error(f'--port={options.port} must be from 1 to 65535')
  every = commands(options.command, options.processes, options.port or free_port())
  if options.dry_run:
    print('\n'.join(map(shlex.join, every)))
    return 0
  env = simulate.environment(options.devices)
  try:
    # Sessions of their own: what is sent to this process reaches them through it, once.
    running = [subprocess.Popen(each, env=env, start_new_session=True) for each in every]
  except OSError as error:
    sys.exit(f'error: {options.command[0]}: {error.strerror}')
  return ended(running)


def ended(running: list[subprocess.Popen]) -> int:
  """Waits until all have ended. Returns 0, or the status of the first that ended badly."""

  sent = [signal.SIGKILL, signal.SIGTERM]

  def forward(number, frame):
    how = sent.pop() if len(sent) > 1 else sent[0]
    for process in running:
      process.send_signal(how)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, forward)
  bad, since = {}, None
  while len(bad) + sum(process.poll() == 0 for process in running) < len(running):
    for number, process in enumerate(running):
      if process.poll() and number not in bad:
        bad[number], since = process.returncode, since or time.monotonic()
        status = bad[number]
        how = f'status {status}' if status > 0 else signal.Signals(-status).name
        print(f'process {number} ended with {how}', file=sys.stderr, flush=True)
    if since is not None and time.monotonic() - since > GRACE:
      print(f'ending the others after {GRACE} s', file=sys.stderr, flush=True)
      for process in running:
        process.kill()
      since = math.inf
    time.sleep(0.1)
  status = next(iter(bad.values()), 0)
  return status if status >= 0 else 128 - status


if __name__ == '__main__':
  sys.exit(main())
