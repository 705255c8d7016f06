"""Launchers do what they say."""

import pathlib
import subprocess
import sys

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / 'launch'


def test_simulated_devices():
  command = [sys.executable, LAUNCH / 'simulate.py', '--devices=3', '--']
  code = 'import jax; print(jax.device_count(), jax.default_backend())'
  done = subprocess.run(
    [*command, sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout.split() == ['3', 'cpu']


def test_dry_run_prints_the_command():
  done = subprocess.run(
    [sys.executable, LAUNCH / 'simulate.py', '--devices=2', '--dry_run', '--', 'true', 'x'],
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.startswith("env JAX_PLATFORMS='cpu' XLA_FLAGS=")
  assert done.stdout.endswith("--xla_force_host_platform_device_count=2' true x\n")
