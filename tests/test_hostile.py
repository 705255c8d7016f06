"""A workdir is data: damage is refused in one sentence, and nothing outside of it is touched."""

import itertools
import json
import logging
import os
import random
import shutil

import pytest

from benchmarks import hostile as trial
from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs, sharding
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.data import token_cache
from ngrammer_jax.training import loop
from tests import hostile
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
    f'analyze {name}': ['analyze', name] for name in ('curve', 'checkpoint', 'clusters')
  }


def shortcomings(run, subcommands, cases, folders):
  """Anything but a refusal; each case is damage, file, text that is named and command."""
  found, intact = [], shutil.copytree(run, run.with_name('intact'), symlinks=True)
  for damage, file, text, name in cases:
    damage.apply(run / file)
    subcommand, *arguments = subcommands.get(name, [name])
    outcome = hostile.run(subcommand, [*arguments, f'--workdir={run}'], folders)
    if reason := outcome.shortcoming(text):
      found.append((file, damage, name, reason, outcome.error))
    hostile.remove(run / file)
    hostile.remove(hostile.outside(run / file))
    if (intact / file).is_dir():
      shutil.copytree(intact / file, run / file)
    elif (intact / file).exists():
      shutil.copy(intact / file, run / file)
  return found


def test_damage_is_refused_in_one_sentence(trained_copy, subcommands, tmp_path, no_device):
  """Each damage with one of the commands that read the file, in turn."""
  cases = []
  for file, damages in hostile.DAMAGES.items():
    turns = itertools.cycle(hostile.READERS[file])
    cases += [(damage, file, file, next(turns)) for damage in damages.values()]
  for file, values in hostile.VALUES.items():
    turns = itertools.cycle(('evaluate', 'analyze clusters'))
    cases += [(damage, file, text, next(turns)) for damage, text in values.values()]
  assert len(cases) > 90
  assert shortcomings(trained_copy, subcommands, cases, (tmp_path,)) == []


def test_what_stands_in_place_of_a_file_or_leads_out_is_named(
  trained_copy, subcommands, tmp_path, no_device
):
  turns = itertools.cycle(('train', 'evaluate', 'generate', 'analyze curve', 'analyze checkpoint'))
  cases = []
  for file in (*workdirs.FILES, *workdirs.FOLDERS):
    other = hostile.Other('folder') if file in workdirs.FILES else hostile.Content(b'')
    cases += [(damage, file, file, next(turns)) for damage in (other, hostile.Other('link'))]
  assert shortcomings(trained_copy, subcommands, cases, (tmp_path,)) == []


def test_links_inside_of_a_workdir_and_to_it_are_no_damage(trained_copy, tmp_path):
  (trained_copy / 'evaluation').mkdir(exist_ok=True)
  (trained_copy / 'evaluation' / 'best').symlink_to(trained_copy / 'checkpoints' / '12')
  (tmp_path / 'link').symlink_to(trained_copy)
  assert runs.load_run(tmp_path / 'link').find_checkpoint() == 12


def test_a_write_follows_no_link(tmp_path):
  """Whoever knows the name of the scratch file may have put a link there."""
  (tmp_path / 'own').write_text('untouched')
  (tmp_path / 'config.json.scratch').symlink_to(tmp_path / 'own')
  experiment.save(experiment.Config(), tmp_path / 'config.json')
  assert (tmp_path / 'own').read_text() == 'untouched'
  assert experiment.load(tmp_path / 'config.json') == experiment.Config()


def test_a_workdir_that_no_folder_can_be(tmp_path, no_device):
  for subcommand, more in (('evaluate', []), ('analyze', ['curve']), ('generate', ['--prompt=a'])):
    for name, reason in (('x' * 300, 'File name too long'), ('a\0b', 'embedded null byte')):
      outcome = hostile.run(subcommand, [*more, f'--workdir={tmp_path}/{name}'], (tmp_path,))
      assert outcome.shortcoming(reason) is None, outcome


def test_a_step_that_is_not_there_is_named_before_devices(trained, subcommands, no_device):
  for name in ('evaluate', 'generate', 'analyze clusters'):
    subcommand, *arguments = subcommands.get(name, [name])
    outcome = hostile.run(
      subcommand, [*arguments, f'--workdir={trained}', '--step=999'], (trained,)
    )
    assert outcome.shortcoming('--step=999: ') is None, outcome
    assert outcome.error.endswith('available: 4, 8, 12\n')


def test_the_cache_of_a_foreign_config_is_said_and_nothing_is_deleted_there(
  trained_copy, tmp_path, caplog
):
  caplog.set_level(logging.INFO)
  cache = tmp_path / 'foreign'
  hostile.Change('data/cache_dir', str(cache)).apply(trained_copy / 'config.json')
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
  before = hostile.snapshot((cache,))
  with pytest.raises(errors.BadInput, match='is damaged .* delete the folder'):
    runs.load_run(trained_copy).split('test')
  assert hostile.snapshot((cache,)) == before
  # Their own folder is prepared again.
  token_cache.prepare(run.config.data)
  assert not abandoned.exists()
  runs.load_run(trained_copy).split('test')


def test_a_cache_that_leaves_its_folder_is_prepared_again(tiny, cache):
  data = tiny().data
  first = token_cache.prepare(data)
  (folder,) = cache.iterdir()
  meta = json.loads((folder / 'meta.json').read_text())
  meta['splits'] = {f'../{folder.name}/{name}': entry for name, entry in meta['splits'].items()}
  (folder / 'meta.json').write_text(json.dumps(meta))
  assert token_cache.prepare(data).splits.keys() == first.splits.keys()


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
  with workdirs.lock_workdir(run, config, task):
    pass
  assert workdirs.load_config(run) == config
  (run / 'checkpoints' / '2').mkdir(parents=True)
  with pytest.raises(errors.BadInput, match='was started with model.dtype'):
    workdirs.check(run, tiny(model={'dtype': 'float64'}))


def test_an_evaluation_reads_no_pipe_and_no_deep_link(trained_copy, tmp_path, no_device):
  """What is not a file is not opened: a pipe would wait for ever."""
  os.mkfifo(trained_copy / 'evaluation.pipe')
  (trained_copy / 'logs' / 'deep').mkdir()
  (trained_copy / 'logs' / 'deep' / 'link').symlink_to(tmp_path)
  outcome = hostile.run('evaluate', [f'--workdir={trained_copy}'], (trained_copy,))
  assert outcome.shortcoming('logs/deep/link is a link to') is None, outcome


def test_the_lock_of_a_start_that_was_killed_is_no_link(tiny, tmp_path):
  """It is opened and cut before there is a config."""
  (tmp_path / 'own').write_text('untouched')
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'lock').symlink_to(tmp_path / 'own')
  with pytest.raises(errors.BadInput, match='lock is a link to'):
    loop.train(tiny(), tmp_path / 'run')
  assert (tmp_path / 'own').read_text() == 'untouched'


def test_drawn_wrong_input_is_refused(trained, tmp_path):
  """A small part of the trial in `benchmarks/hostile.py`."""
  shutil.copytree(trained, tmp_path / 'intact')
  lab = trial.Lab(tmp_path)
  lab.prepare()
  for name, draw_case in trial.INPUTS.items():
    for seed in range(3):
      result = trial.try_input(lab, draw_case(lab, random.Random(seed)))
      assert result[0] in trial.GOOD, (name, seed, result)
  result = trial.try_checkpoint(lab, random.Random(0))
  assert result[0] in trial.GOOD, result
