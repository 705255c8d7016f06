"""Runs a command in several processes on this machine, as on the hosts of a pod.

  python launch/local_processes.py --processes=4 -- python -m ngrammer_jax.train \\
    --config=configs/quickstart.py --workdir=runs/four

Each process has its own CPU devices; they connect through a free port. If one fails, the others are
killed after a grace period. SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C are forwarded as SIGTERM,
once; a third signal kills all processes. The exit status is the status of the first failed process.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
import types

GRACE = 60  # seconds for the other processes to exit by themselves


def main() -> int:
  """Starts the processes; returns 0, or the exit status of the first that failed."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--processes', type=int, default=2, help='number of processes')
  parser.add_argument('--devices', type=int, default=1, help='devices of each process')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  args = parser.parse_args()
  for name in ('processes', 'devices'):
    if getattr(args, name) < 1:
      parser.error(f'--{name} must be at least 1')
  with socket.socket() as listening:
    listening.bind(('localhost', 0))
    coordinator = f'localhost:{listening.getsockname()[1]}'
  command = [*args.command, f'--coordinator={coordinator}', f'--processes={args.processes}']
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(args.devices)}
  processes: list[subprocess.Popen] = []
  try:
    for index in range(args.processes):
      arguments = [*command, f'--process_id={index}']
      # In separate sessions, so that they receive Ctrl-C only once, forwarded by this process.
      processes.append(subprocess.Popen(arguments, env=env, start_new_session=True))
  except OSError as error:
    for process in processes:
      process.kill()
    sys.exit(f'error: {args.command[0]}: {error.strerror}')
  for index, process in enumerate(processes):
    print(f'process {index} has PID {process.pid}', file=sys.stderr, flush=True)
  return wait(processes)


def wait(processes: list[subprocess.Popen]) -> int:
  """Waits for all processes. Returns 0, or the exit status of the first that failed."""
  received = []

  def forward(number: int, frame: types.FrameType | None) -> None:
    received.append(number)
    if len(received) == 1:  # not by print, which the signal may have interrupted
      os.write(2, f'{signal.Signals(number).name}: passed on to all as SIGTERM\n'.encode())
      send_to_all(signal.SIGTERM)
    elif len(received) > 2:
      send_to_all(signal.SIGKILL)

  def send_to_all(number: signal.Signals) -> None:
    for process in processes:
      process.send_signal(number)

  for name in ('SIGTERM', 'SIGUSR1', 'SIGUSR2', 'SIGHUP', 'SIGINT'):
    if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN:  # as under nohup
      signal.signal(signal.Signals[name], forward)
  failed: dict[int, int] = {}  # exit status by index, in the order of their ends
  deadline = math.inf
  while len(failed) + sum(process.poll() == 0 for process in processes) < len(processes):
    ended = [i for i, process in enumerate(processes) if process.poll() and i not in failed]
    # Killed ones first: the others ended because of them.
    for index in sorted(ended, key=lambda index: processes[index].returncode):
      status = processes[index].returncode
      failed[index] = status
      deadline = min(deadline, time.monotonic() + GRACE)
      reason = f'status {status}'
      if status < 0:
        reason = signal.Signals(-status).name
      print(f'process {index} ended with {reason}', file=sys.stderr, flush=True)
    if time.monotonic() > deadline:
      for index, process in enumerate(processes):
        if process.poll() is None:
          message = f'process {index} has not ended {GRACE} s after the first one: killing it'
          print(message, file=sys.stderr, flush=True)
          process.kill()
      deadline = math.inf
    time.sleep(0.1)
  status = next(iter(failed.values()), 0)
  if status < 0:  # of a signal, as shells do
    return 128 - status
  return status


if __name__ == '__main__':
  sys.exit(main())
