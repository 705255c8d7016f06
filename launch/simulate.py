"""Runs a command on simulated devices, to try a mesh on one machine without accelerators.

  python launch/simulate.py --devices=8 -- python -m ngrammer_jax.train \\
    --config=configs/quickstart.py --workdir=runs/mesh --config.mesh.fsdp=2 --config.mesh.model=2
"""

import argparse
import os
import sys


def environment(devices: int) -> dict[str, str]:
  """Returns environment variables with which JAX has this number of CPU devices."""
  flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={devices}'
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags.strip()}


def main() -> None:
  """Replaces this process with the command."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--devices', type=int, default=8, help='number of devices')
  parser.add_argument('--dry_run', action='store_true', help='print the command and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  args = parser.parse_args()
  if args.devices < 1:
    parser.error('--devices must be at least 1')
  env = environment(args.devices)
  if args.dry_run:
    changed = [f'{key}={env[key]!r}' for key in ('JAX_PLATFORMS', 'XLA_FLAGS')]
    print(' '.join(['env', *changed, *args.command]))
    return
  try:
    os.execvpe(args.command[0], args.command, env)
  except OSError as error:
    sys.exit(f'error: {args.command[0]}: {error.strerror}')


if __name__ == '__main__':
  sys.exit(main())
