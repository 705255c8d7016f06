"""Runs of wandb: the same id on resume, another one for a copy, and no value twice."""

import json
import shutil
import sys
import types

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.training.records import wandb_run, writers
from tests.checks import bad_input

CONFIG = experiment.Config(training=experiment.TrainingConfig(log_to=('wandb',)))


class UsageError(Exception):
  """Stands for `wandb.errors.UsageError`."""


class FakeWandb(types.SimpleNamespace):
  """The package, which records what it is told.

  Attributes:
    inits: arguments of each `init`.
    logged: what each of these runs logged.
    finished: number of runs that have ended.
  """

  def __init__(self):
    errors = types.SimpleNamespace(UsageError=UsageError)
    super().__init__(inits=[], logged=[], finished=0, Settings=dict, errors=errors)

  def init(self, **options):
    self.inits.append(options)
    self.logged.append([])
    return self

  def define_metric(self, name, step_metric=None):
    pass

  def log(self, values):
    self.logged[-1].append(values)

  def finish(self):
    self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
  fake = FakeWandb()
  monkeypatch.setitem(sys.modules, 'wandb', fake)
  return fake


def write(workdir, restored_step, records):
  writer = writers.MetricsWriter(workdir, restored_step, CONFIG)
  for step, values in records:
    writer.scalars(step, values)
  writer.close()


def test_a_resumed_run_is_the_same_one_and_has_each_value_once(tmp_path, wandb):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  write(workdir, 0, [(2, {'loss': 1.0}), (4, {'loss': 0.9}), (4, {'validation/a': 3.0})])
  write(workdir, 2, [(4, {'loss': 0.9}), (4, {'validation/b': 3.0}), (6, {'loss': 0.8})])
  first, second = wandb.inits
  assert first['id'] == second['id'] and second['resume'] == 'allow'
  assert first['config']['training']['log_to'] == ('wandb',) and len(first['config']) > 5
  assert wandb.logged == [
    [
      {'step': 2, 'train/loss': 1.0},
      {'step': 4, 'train/loss': 0.9},
      {'step': 4, 'validation/a': 3.0},
    ],
    [{'step': 4, 'validation/b': 3.0}, {'step': 6, 'train/loss': 0.8}],
  ]
  assert wandb.finished == 2 and not (workdir / 'tensorboard').exists()
  # metrics.jsonl has all of them.
  steps = [json.loads(line)['step'] for line in (workdir / 'metrics.jsonl').open()]
  assert steps == [2, 4, 4, 6]


def test_a_copy_has_a_run_of_its_own(tmp_path, wandb):
  (tmp_path / 'trunk').mkdir()
  write(tmp_path / 'trunk', 0, [(2, {'loss': 1.0}), (4, {'loss': 0.9})])
  shutil.copytree(tmp_path / 'trunk', tmp_path / 'copy')
  write(tmp_path / 'copy', 2, [(4, {'loss': 0.5})])
  assert wandb.inits[0]['id'] != wandb.inits[1]['id']
  assert wandb.logged[1] == [{'step': 4, 'train/loss': 0.5}]


def test_wandb_that_fails_ends_no_training(tmp_path, wandb, monkeypatch, caplog):
  def fail(*_, **__):
    raise ValueError('no connection')

  monkeypatch.setattr(wandb, 'log', fail)
  write(tmp_path, 0, [(2, {'loss': 1.0}), (4, {'loss': 0.9})])
  assert caplog.messages == ['wandb gets no further values: no connection']
  monkeypatch.setattr(wandb, 'init', fail)
  write(tmp_path, 4, [(6, {'loss': 0.8})])
  assert caplog.messages[1:] == ['wandb cannot start, and gets no values: no connection']


def test_wandb_that_is_not_set_up_is_bad_input(tmp_path, wandb, monkeypatch):
  def fail(*_, **__):
    raise UsageError('api_key not configured (no-tty)')

  monkeypatch.setattr(wandb, 'init', fail)
  with bad_input(
    'wandb cannot start: api_key not configured (no-tty); run `wandb login`, set '
    'WANDB_MODE=offline, or leave it out of training.log_to'
  ):
    write(tmp_path, 0, [])


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setattr(wandb_run.importlib.util, 'find_spec', lambda name: None)
  with bad_input(
    "training.log_to needs wandb, but it is not installed: pip install 'ngrammer_jax[wandb]', or "
    'leave it out'
  ):
    wandb_run.check_package()


@pytest.mark.full
def test_the_package_writes_offline(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  write(tmp_path, 0, [(2, {'loss': 1.0}), (4, {'loss': 0.9})])
  write(tmp_path, 2, [(4, {'loss': 0.9}), (6, {'loss': 0.8})])
  folders = sorted((tmp_path / 'wandb').glob('offline-run-*'))
  run_id = json.loads((tmp_path / 'wandb.json').read_text())['id']
  assert len(folders) == 2 and all(run_id in folder.name for folder in folders)
  for folder in folders:
    content = (folder / f'run-{run_id}.wandb').read_bytes()
    assert b'loss' in content and b'git_commit' in content
