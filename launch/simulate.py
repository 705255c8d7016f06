"""Runs a command on simulated devices, to try a mesh on one machine without accelerators.

  python launch/simulate.py --devices=8 -- python -m ngrammer_jax.train \\
    --config=configs/quickstart.py --workdir=runs/mesh --config.mesh.fsdp=2 --config.mesh.model=2
"""

import argparse
import os
import sys


def environment(devices: int) -> dict[str, str]:
  """The environment in which JAX sees so many CPU devices, and nothing else."""
  flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={devices}'
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags.strip()}


def main() -> None:
  """Replaces this process by the command."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--devices', type=int, default=8)
  parser.add_argument('--dry_run', action='store_true', help='print the command and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  options = parser.parse_args()
  if options.devices < 1:
    parser.error('--devices must be at least 1')
  env = environment(options.devices)
  if options.dry_run:
    changed = [f'{key}={env[key]!r}' for key in ('JAX_PLATFORMS', 'XLA_FLAGS')]
    print(' '.join(['env', *changed, *options.command]))
    return
  try:
    os.execvpe(options.command[0], options.command, env)
  except OSError as error:
    sys.exit(f'error: {options.command[0]}: {error.strerror}')


if __name__ == '__main__':
  sys.exit(main())
