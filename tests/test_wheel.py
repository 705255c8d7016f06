"""A wheel runs outside the checkout."""

import configparser
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from ngrammer_jax import __main__

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'ngrammer_jax', 'configs')


def run(*command, folder, env=()):
  """Runs a command in a folder and returns its output; the checkout is out of sight."""
  hidden = ('JAX_NUM_CPU_DEVICES', 'PYTHONPATH', 'XLA_FLAGS')
  environment = {k: v for k, v in os.environ.items() if k not in hidden} | dict(env)
  process = subprocess.run(
    [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
  )
  assert process.returncode == 0, process.stdout + process.stderr
  return process.stdout


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The folder that a wheel of a copy of the checkout is installed in."""
  copy, site = (tmp_path_factory.mktemp(name) for name in ('copy', 'site'))
  for name in SOURCES:
    source = ROOT / name
    if source.is_dir():
      shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      shutil.copy(source, copy / name)
  run('-m', 'build', '--wheel', '--no-isolation', folder=copy)
  (wheel,) = (copy / 'dist').glob('*.whl')
  zipfile.ZipFile(wheel).extractall(site)
  return site


@pytest.mark.slow
def test_a_wheel_has_the_package_and_its_configs(site):
  installed = {path.relative_to(site).as_posix() for path in site.rglob('*.py')}
  expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'ngrammer_jax').rglob('*.py')}
  expected |= {f'ngrammer_jax/configs/{path.name}' for path in (ROOT / 'configs').glob('*.py')}
  assert installed == expected
  assert (site / 'ngrammer_jax' / 'py.typed').exists()
  package, source = site / 'ngrammer_jax', ROOT / 'ngrammer_jax'
  for data in ('weights/*/*', '**/*.j2'):
    expected = {path.relative_to(source) for path in source.glob(data)}
    assert expected and {path.relative_to(package) for path in package.glob(data)} == expected
  scripts = configparser.ConfigParser()
  (entry_points,) = site.glob('*.dist-info/entry_points.txt')
  scripts.read(entry_points)
  module, function = scripts['console_scripts']['ngrammer_jax'].split(':')
  assert getattr(importlib.import_module(module), function) is __main__.console_script


@pytest.mark.slow
def test_a_wheel_runs_the_quickstart_outside_the_checkout(site, tmp_path):
  env = {'PYTHONPATH': str(site), 'NGRAMMER_JAX_CACHE': str(tmp_path / 'cache')}
  code = 'import ngrammer_jax; print(ngrammer_jax.__file__)'
  assert run('-c', code, folder=tmp_path, env=env).startswith(str(site))
  assert 'quickstart: ' in run('-m', 'ngrammer_jax', '--list', folder=tmp_path, env=env)
  few = ('--config.training.steps=2', '--config.evaluation.max_tokens=256')
  flags = ('--config=quickstart', '--workdir=runs/quickstart', *few)
  out = run('-m', 'ngrammer_jax.train', *flags, folder=tmp_path, env=env)
  assert out.startswith('finished: 2 steps')
  words = ('--workdir=runs/quickstart', '--prompt=My fellow citizens', '--tokens=4')
  out = run('-m', 'ngrammer_jax.generate', *words, folder=tmp_path, env=env)
  assert out.startswith('My fellow citizens')
  words = ('--pretrained=state_of_the_union', '--prompt=The state of', '--tokens=4')
  out = run('-m', 'ngrammer_jax.generate', *words, folder=tmp_path, env=env)
  assert out.startswith('The state of')
