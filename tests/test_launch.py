"""Launchers: simulated devices, local processes and Slurm."""

import pathlib
import re
import subprocess
import sys

import pytest

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / 'launch'


def test_simulated_devices():
  command = [sys.executable, LAUNCH / 'simulate.py', '--devices=3', '--']
  code = 'import jax; print(jax.device_count(), jax.default_backend())'
  process = subprocess.run(
    [*command, sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert process.stdout.split() == ['3', 'cpu']


def test_dry_run_prints_the_command():
  process = subprocess.run(
    [sys.executable, LAUNCH / 'simulate.py', '--devices=2', '--dry_run', '--', 'true', 'x'],
    capture_output=True,
    text=True,
    check=True,
  )
  assert process.stdout.startswith("env JAX_PLATFORMS='cpu' XLA_FLAGS=")
  assert process.stdout.endswith("--xla_force_host_platform_device_count=2' true x\n")


def test_local_processes_share_a_coordinator_port():
  flags = ['--processes=2', '--port=5000', '--dry_run', '--', 'python', '-m', 'x', '--a=b c']
  process = subprocess.run(
    [sys.executable, LAUNCH / 'local_processes.py', *flags],
    capture_output=True,
    text=True,
    check=True,
  )
  expected = "python -m x '--a=b c' --coordinator=localhost:5000 --processes=2 --process_id="
  assert process.stdout == f'{expected}0\n{expected}1\n'


@pytest.mark.parametrize('code, status', [('0', 0), ('2', 2), ('143', 143)])
def test_status_is_that_of_the_first_process_that_fails(code, status):
  script = f'import sys; sys.exit({code} if sys.argv[-1] == "--process_id=1" else 0)'
  process = subprocess.run(
    [sys.executable, LAUNCH / 'local_processes.py', '--', sys.executable, '-c', script],
    capture_output=True,
    text=True,
  )
  assert process.returncode == status
  assert re.search(r'^process 0 has PID \d+\nprocess 1 has PID \d+$', process.stderr, re.MULTILINE)


def test_slurm_job_is_requeued_except_after_status_0_and_2(tmp_path):
  flags = ['--nodes=4', '--option=--partition=gpu', '--', 'python', '-m', 'x', '--a=b c']
  command = [sys.executable, LAUNCH / 'slurm.py', '--dry_run', *flags]
  script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
  assert (
    '#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n' in script
    and '#SBATCH --partition=gpu\n' in script
  )
  assert "srun --kill-on-bad-exit=0 python -m x '--a=b c'\n" in script
  for status, queued, count in (
    *((0, False, 0), (2, False, 0), (143, True, 0), (137, True, 99), (137, False, 100)),
  ):
    for name, action in (
      ('srun', f'exit {status}'),
      ('scontrol', f'echo "$@" > {tmp_path}/requeued'),
    ):
      (tmp_path / name).write_text(f'#!/bin/bash\n{action}\n')
      (tmp_path / name).chmod(0o755)
    env = {
      'PATH': f'{tmp_path}:/usr/bin:/bin',
      'SLURM_JOB_ID': '7',
      'SLURM_RESTART_COUNT': str(count),
    }
    process = subprocess.run(['bash', '-c', script], env=env)
    assert process.returncode == status and (tmp_path / 'requeued').exists() == queued
    (tmp_path / 'requeued').unlink(missing_ok=True)


def test_extras_that_launchers_install_exist():
  root = LAUNCH.parent
  extras = re.search(r'extras_require=\{(.*)\n  \}', (root / 'setup.py').read_text(), re.DOTALL)[1]
  available = set(re.findall(r"^    '(\w+)':", extras, re.MULTILINE))
  required = re.findall(r'\.\[([\w,]+)\]', (LAUNCH / 'tpu_vm.py').read_text())
  required += re.findall(r'EXTRAS=([\w,]+)', (LAUNCH / 'Dockerfile').read_text())
  assert len(required) == 3
  assert {extra for extras in required for extra in extras.split(',')} <= available
