"""Launchers do what they say."""

import pathlib
import re
import subprocess
import sys

import pytest

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


def test_local_processes_find_each_other_on_one_port():
  given = ['--processes=2', '--port=5000', '--dry_run', '--', 'python', '-m', 'x', '--a=b c']
  done = subprocess.run(
    [sys.executable, LAUNCH / 'local_processes.py', *given],
    capture_output=True,
    text=True,
    check=True,
  )
  where = "python -m x '--a=b c' --coordinator=localhost:5000 --processes=2 --process_id="
  assert done.stdout == f'{where}0\n{where}1\n'


@pytest.mark.parametrize('code, status', [('0', 0), ('2', 2), ('143', 143)])
def test_the_status_of_processes_is_that_of_the_first_that_ends_badly(code, status):
  script = f'import sys; sys.exit({code} if sys.argv[-1] == "--process_id=1" else 0)'
  done = subprocess.run(
    [sys.executable, LAUNCH / 'local_processes.py', '--', sys.executable, '-c', script]
  )
  assert done.returncode == status


def test_a_slurm_job_is_queued_again_unless_it_is_finished_or_cannot_work(tmp_path):
  given = ['--nodes=4', '--option=--partition=gpu', '--', 'python', '-m', 'x', '--a=b c']
  command = [sys.executable, LAUNCH / 'slurm.py', '--dry_run', *given]
  script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
  assert (
    '#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n' in script
    and '#SBATCH --partition=gpu\n' in script
  )
  assert "srun --kill-on-bad-exit=0 python -m x '--a=b c'\n" in script
  for status, queued, count in (
    *((0, False, 0), (2, False, 0), (143, True, 0), (137, True, 99), (137, False, 100)),
  ):
    for name, does in (('srun', f'exit {status}'), ('scontrol', f'echo "$@" > {tmp_path}/again')):
      (tmp_path / name).write_text(f'#!/bin/bash\n{does}\n')
      (tmp_path / name).chmod(0o755)
    env = {
      'PATH': f'{tmp_path}:/usr/bin:/bin',
      'SLURM_JOB_ID': '7',
      'SLURM_RESTART_COUNT': str(count),
    }
    done = subprocess.run(['bash', '-c', script], env=env)
    assert done.returncode == status and (tmp_path / 'again').exists() == queued
    (tmp_path / 'again').unlink(missing_ok=True)


def test_what_launchers_install_there_is():
  root = LAUNCH.parent
  extras = re.search(r'extras_require=\{(.*)\n  \}', (root / 'setup.py').read_text(), re.DOTALL)[1]
  known = set(re.findall(r"^    '(\w+)':", extras, re.MULTILINE))
  wanted = re.findall(r'\.\[([\w,]+)\]', (LAUNCH / 'tpu_vm.py').read_text())
  wanted += re.findall(r'EXTRAS=([\w,]+)', (LAUNCH / 'Dockerfile').read_text())
  assert len(wanted) == 3
  assert {extra for extras in wanted for extra in extras.split(',')} <= known
