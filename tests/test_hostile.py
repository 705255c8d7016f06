"""Damage of a workdir is refused in one sentence, before anything is written."""

import dataclasses
import itertools
import logging
import math
import os
import random
import shutil
import struct

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs, sharding
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.data import mixture
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.training import loop
from tests.campaigns import damages, hostile
from tests.checks import full
from tests.training.helpers import write_config


@pytest.fixture
def no_device(monkeypatch):
  """A command that reaches for devices fails."""

  def fails(*args):
    raise AssertionError('devices were used')

  monkeypatch.setattr(sharding, 'make_mesh', fails)


@pytest.fixture
def subcommands(trained, tmp_path):
  """The subcommand and arguments of each command and analysis, for the run of `trained`."""
  config = write_config(tmp_path / 'config.py', runs.load_run(trained).config)
  return {'train': ['train', f'--config={config}'], 'generate': ['generate', '--prompt=the']} | {
    f'analyze {name}': ['analyze', name] for name in ('report', 'checkpoint', 'clusters')
  }


def shortcomings(run, subcommands, cases, folders):
  """Anything but a refusal; each case is damage, file, text that is named and command."""
  found, intact = [], shutil.copytree(run, run.with_name('intact'), symlinks=True)
  for damage, file, text, name in cases:
    damage.apply(run / file)
    subcommand, *arguments = subcommands.get(name, [name])
    outcome = damages.run(subcommand, [*arguments, f'--workdir={run}'], folders)
    if reason := outcome.shortcoming(text):
      found.append((file, damage, name, reason, outcome.error))
    damages.remove(run / file)
    shutil.copy(intact / file, run / file)
  return found


@pytest.mark.full
def test_damage_is_refused_in_one_sentence(trained_copy, subcommands, tmp_path, no_device):
  """Each damage with one of the commands that read the file, in turn."""
  cases = []
  for file, changes in damages.DAMAGES.items():
    turns = itertools.cycle(damages.READERS[file])
    cases += [(damage, file, file, next(turns)) for damage in changes.values()]
  for file, values in damages.VALUES.items():
    turns = itertools.cycle(('evaluate', 'analyze clusters'))
    cases += [(damage, file, text, next(turns)) for damage, text in values.values()]
  assert len(cases) > 80
  assert shortcomings(trained_copy, subcommands, cases, (tmp_path,)) == []


def test_a_workdir_that_no_folder_can_be(tmp_path, no_device):
  for subcommand, more in (('evaluate', []), ('analyze', ['report']), ('generate', ['--prompt=a'])):
    outcome = damages.run(subcommand, [*more, f'--workdir={tmp_path}/{"x" * 300}'], (tmp_path,))
    assert outcome.shortcoming('File name too long') is None, outcome


def test_a_step_that_is_not_there_is_named_before_devices(trained, subcommands, no_device):
  for name in ('evaluate', 'generate', 'analyze clusters'):
    subcommand, *arguments = subcommands.get(name, [name])
    outcome = damages.run(
      subcommand, [*arguments, f'--workdir={trained}', '--step=999'], (trained,)
    )
    assert outcome.shortcoming('--step=999: ') is None, outcome
    assert outcome.error.endswith('available: 4, 8, 12\n')


def test_the_cache_of_a_foreign_config_is_said_and_nothing_is_deleted_there(
  trained_copy, tmp_path, caplog
):
  caplog.set_level(logging.INFO)
  cache = tmp_path / 'foreign'
  damages.Change('data/cache_dir', str(cache)).apply(trained_copy / 'config.json')
  run = runs.load_run(trained_copy)
  run.split('test')
  path = run.config.data.path
  assert (
    f'using data.path={path}, data.cache_dir={cache}, from the config of --workdir={trained_copy}'
  ) in caplog.messages
  (folder,) = cache.iterdir()
  assert [p.stat().st_mode & 0o777 for p in (cache, folder)] == [0o700, 0o700]
  abandoned = cache / 'preparing-x'
  abandoned.mkdir()
  os.utime(abandoned, (0, 0))
  (folder / 'meta.json').write_text('[]')
  before = damages.snapshot((cache,))
  with pytest.raises(errors.BadInput, match='is damaged .* delete the folder'):
    runs.load_run(trained_copy).split('test')
  assert damages.snapshot((cache,)) == before
  # Their own folder is prepared again.
  mixture.prepare(run.config.data)
  assert not abandoned.exists()
  runs.load_run(trained_copy).split('test')


def test_a_refused_value_does_not_poison_a_workdir(tiny, one_device, tmp_path):
  """Nothing is written before everything is checked, and without a checkpoint nothing is bound."""
  run, training = tmp_path / 'run', {'steps': 2, 'evaluate_every': 0, 'checkpoint_every': 0}
  with pytest.raises(errors.BadInput, match='needs the environment variable JAX_ENABLE_X64=1'):
    loop.train(tiny(model={'dtype': 'float64'}, training=training), run)
  assert not run.exists()
  run.mkdir()  # as an earlier version or a killed start left it
  experiment.save(tiny(model={'dtype': 'float64'}), run / 'config.json')
  (run / 'corpus.json').write_text('{"content_hash": "of another text"}\n')
  task = loop.train_task.CorpusTask(config := tiny())
  with workdirs.lock_workdir(run, config, task.vocabulary, task.content_hash):
    pass
  assert workdirs.load_config(run) == config
  (run / 'checkpoints' / '2').mkdir(parents=True)
  with pytest.raises(errors.BadInput, match='was started with model.dtype'):
    workdirs.check_workdir(run, tiny(model={'dtype': 'float64'}))


@pytest.mark.parametrize('seeds', [(0,), full((1, 2))])
def test_drawn_wrong_input_is_refused(trained, tmp_path, monkeypatch, seeds):
  """A small part of the trial in `tests/campaigns/hostile.py`."""
  shutil.copytree(trained, tmp_path / 'intact')
  lab = hostile.Lab(tmp_path)
  lab.prepare()
  for name, draw_case in hostile.INPUTS.items():
    for seed in seeds:
      result = hostile.try_input(lab, draw_case(lab, random.Random(seed)))
      assert result[0] in hostile.GOOD, (name, seed, result)
  model = lab.run.parent / 'published' / 'whole'
  config, weights = (model / name for name in ('config.json', 'model.safetensors'))
  nan = lambda: weights.write_bytes(weights.read_bytes()[:-4] + struct.pack('<f', math.nan))
  arguments, reached = ('--prompt=a', f'--workdir={model}'), (inference.Engine, 'prepare')
  case = hostile.Case('generate', arguments, ('whole',), nan, reached=reached)
  assert hostile.try_input(lab, case)[0] == 'refused'
  monkeypatch.setattr(hostile, 'ARRAYS_READ', 'no other reason')
  assert hostile.try_input(lab, case)[0] == 'refused after devices were used'
  layers = lambda: damages.Change('num_hidden_layers', 3).apply(config)
  assert hostile.try_input(lab, dataclasses.replace(case, damage=layers))[0] == 'refused'
  result = hostile.try_checkpoint(lab, random.Random(0))
  assert result[0] in hostile.GOOD, result
