"""What is frozen has no gradient and no optimizer state, keeps its dtype, and is stored once."""

import dataclasses
import functools
import pathlib
import shutil

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs
from ngrammer_jax.checkpoints import checksums, frozen, manifest, reader, writer
from ngrammer_jax.config.optimizer import RateConfig
from ngrammer_jax.models import parameter_groups
from ngrammer_jax.optimizers import partition, row_gradient
from ngrammer_jax.system import hosts
from ngrammer_jax.training import init_from, loop, programs, train_task
from tests import tiny_run
from tests.checks import mesh_of
from tests.training.helpers import arrays, flip

TRAINED = ('head', 'ngram')


def config_of(trained, checkpoint_every=12):
  """A run that starts from the tiny N-Grammer and trains two parts."""
  optimizer = {'train': TRAINED, 'schedule': 'constant'}
  training = {'evaluate_every': 0, 'checkpoint_every': checkpoint_every}
  options = {'optimizer': optimizer, 'training': training, 'init_from': str(trained)}
  return tiny_run.config(trained.parent / 'text.txt', **options)


def train(workdir, config):
  start = lambda config: init_from.Start(config, workdir)
  make = lambda config: train_task.CorpusTask(config, workdir, start=start(config))
  loop.train(config, workdir, make)
  return workdir


def leaves(run):
  state = runs.load_run(run).state
  named = checksums.named_leaves({'params': state.params, 'codebook': state.codebook})
  return {name: np.asarray(leaf) for name, leaf in named.items()}


def test_only_the_named_parts_change_and_the_rest_is_stored_once(trained, tmp_path, one_device):
  run = train(tmp_path / 'run', config_of(trained))
  before, after = leaves(trained), leaves(run)
  changed = {name for name in after if not np.array_equal(before[name], after[name])}
  of_parts = {name for name in after if parameter_groups.group_of(name.split('/', 1)[1]) in TRAINED}
  assert {name for name in of_parts if name.startswith('params')} <= changed <= of_parts
  assert any(name.startswith('codebook') for name in changed)
  stored = {name.removeprefix('params/') for name in arrays(run) if name.startswith('params')}
  assert {parameter_groups.group_of(name) for name in stored} == set(TRAINED)

  base = run / 'base'
  message = f'{base}, with the frozen parameters, is damaged or belongs to another run: '

  def refused(reason):
    with pytest.raises(errors.BadInput) as caught:
      _ = runs.load_run(run).state
    assert str(caught.value).startswith(f'{message}{reason}')

  reader.verify(run, 12)
  largest = max(base.rglob('*'), key=lambda path: path.stat().st_size)
  flip(largest)
  with pytest.raises(manifest.CorruptError, match='wrong checksum'):
    reader.verify(run, 12)
  refused(f'{largest.relative_to(base)} was changed: wrong checksum')
  shutil.rmtree(base)
  refused('manifest.json is missing')
  shutil.copytree(run / 'checkpoints' / '12', base)
  refused('its arrays are not those of the checkpoint')
  with pytest.raises(manifest.CorruptError, match='base is not the one'):
    reader.verify(run, 12)


@pytest.mark.slow
def test_a_run_with_frozen_parts_resumes_bit_identically(trained, tmp_path):
  run = train(tmp_path / 'run', config := config_of(trained, 4))
  whole = arrays(run)
  for step in (12, 8):
    shutil.rmtree(run / 'checkpoints' / str(step))
  train(run, config)
  assert arrays(run) == whole


def test_a_damaged_base_without_a_checkpoint_is_written_again(tmp_path):
  params = {'kernel': jnp.arange(4.0), 'empty': jnp.zeros((0, 3))}
  for name in ('base', 'base.scratch', 'base.scratch.orbax-checkpoint-tmp-1'):
    (tmp_path / name).mkdir()
    (tmp_path / name / manifest.FILE_NAME).write_text('{')
  with writer.CheckpointWriter(tmp_path) as checkpoints:
    checkpoints.save_frozen(params)
  assert {path.name for path in tmp_path.iterdir()} == {'base', 'checkpoints'}
  manifest.verify(tmp_path / 'base')
  assert {*frozen.dtypes(tmp_path)} == {'kernel', 'empty'}


def test_one_process_reads_the_manifest_of_the_base_for_all(tmp_path, monkeypatch):
  with writer.CheckpointWriter(tmp_path) as checkpoints:
    checkpoints.save_frozen({'kernel': jnp.arange(4.0)})
  (tmp_path / 'checkpoints' / '4').mkdir()
  saved, sent = frozen.read_manifest(tmp_path), []
  monkeypatch.setattr(hosts, 'broadcast', lambda value: sent.append(value) or value)
  with writer.CheckpointWriter(tmp_path):
    pass
  # In another process, whose disk shows no file yet.
  monkeypatch.setattr(hosts, 'is_primary', lambda: False)
  monkeypatch.setattr(hosts, 'broadcast', lambda value: sent.pop(0))
  (tmp_path / 'base').rename(tmp_path / 'moved')
  (tmp_path / 'checkpoints' / '4').rmdir()
  with writer.CheckpointWriter(tmp_path) as checkpoints:
    assert checkpoints._frozen.leaves.keys() == saved.leaves.keys()
  assert not sent


def abstract(config, source=None):
  return programs.Programs(config, 257, mesh_of(1), source)


def test_frozen_parameters_keep_their_dtype_and_have_no_optimizer_state():
  config, whole = config_of(pathlib.Path('trained')), abstract(tiny_run.config('text')).abstract
  names = traverse_util.flatten_dict(whole.params, sep='/')
  half = abstract(config, dict.fromkeys(names, jnp.dtype('bfloat16'))).abstract
  for name, leaf in traverse_util.flatten_dict(half.params, sep='/').items():
    assert leaf.dtype == ('float32' if parameter_groups.group_of(name) in TRAINED else 'bfloat16')
  count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  trained = parameter_groups.without(half.params, abstract(config).frozen)
  table = half.params['ngrammer']['table'].size  # Adagrad has one value, Adam two
  assert count(half.opt_state) - 3 <= 2 * count(trained) - table < count(whole.opt_state)


def test_matrices_of_trained_parts_decay_and_nothing_else():
  """The update of a gradient of 0: all that it does is decay."""
  config = config_of(pathlib.Path('trained'))
  decay = dataclasses.replace(config.optimizer, weight_decay=0.1, train=('blocks',))
  prepared = abstract(dataclasses.replace(config, optimizer=decay))
  params = parameter_groups.without(prepared.abstract.params, prepared.frozen)
  ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), params)
  zeros = jax.tree.map(np.zeros_like, ones)
  optimizer = prepared._step.optimizer
  updates, _ = jax.jit(lambda: optimizer.update(zeros, optimizer.init(ones), ones))()
  updates = traverse_util.flatten_dict(updates, sep='/')
  changed = {name for name, update in updates.items() if np.any(update)}
  assert changed == {name for name in updates if name.endswith('kernel')}
  assert all(name.startswith('layer_') for name in changed)


def test_a_part_has_a_learning_rate_of_its_own():
  params = {'embedding': jnp.ones(2), 'layer_0': {'out': jnp.ones(3)}, 'ngrammer': jnp.ones((4, 2))}
  labels = {'embedding': 'dense', 'layer_0': {'out': 'dense'}, 'ngrammer': 'ngram_table'}
  rows = row_gradient.RowGradient(jnp.array([1, 3]), jnp.ones((2, 2)))
  gradient = {'embedding': jnp.ones(2), 'layer_0': {'out': jnp.ones(3)}, 'ngrammer': rows}
  rates = RateConfig('blocks', 0.25), RateConfig('ngram', 3.0)

  def updates(rates):
    optimizer = partition.make(experiment.OptimizerConfig(rates=rates), 10, labels)
    return jax.jit(lambda: optimizer.update(gradient, optimizer.init(params), params)[0])()

  expected, actual = updates(()), updates(rates)
  same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  same(actual['embedding'], expected['embedding'])
  same(actual['layer_0']['out'], 0.25 * expected['layer_0']['out'])
  same(actual['ngrammer'].values, 3 * expected['ngrammer'].values)
  assert actual['ngrammer'].rows.tolist() == [1, 3]
