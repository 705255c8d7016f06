"""A training starts with the parameters of another run, and refuses one that does not fit."""

import dataclasses
import json
import os
import pathlib
import shutil
import types

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import command_line, errors, runs, sharding, train
from ngrammer_jax import config as experiment
from ngrammer_jax.checkpoints import reader
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.models.model_variables import ModelVariables
from ngrammer_jax.training import init_from, loop
from ngrammer_jax.training import state as train_state
from tests import published_folders
from tests.checks import bad_input, mesh_of
from tests.loops import each
from tests.training import toy
from tests.training.helpers import arrays, records, write_config


@pytest.fixture
def source(tiny, tmp_path, monkeypatch):
  """A finished run of the small model."""
  toy.install(monkeypatch.setattr)
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # the command adds to it
  loop.train(tiny(), tmp_path / 'source')
  return tmp_path / 'source'


@pytest.mark.full
def test_training_starts_from_another_run_and_resumes_without_it(tiny, source, tmp_path):
  config, run = tiny(init_from=str(source)), tmp_path / 'run'
  file = write_config(tmp_path / 'config.py', config)
  arguments = [f'--workdir={run}', f'--config={file}']
  assert train.main(arguments) == 0
  assert json.loads((run / 'begun_with.json').read_text()) == {'init_from': str(source), 'step': 12}
  assert [r['step'] for r in records(run) if 'loss' in r] == [2, 4, 6, 8, 10, 12]
  whole = arrays(run)
  assert whole != arrays(source)  # it did not start from the initial parameters again

  shutil.rmtree(run / 'checkpoints' / '12')
  source.rename(tmp_path / 'moved')
  assert train.main(arguments) == 0 and arrays(run) == whole
  with bad_input(
    f'--workdir={run} was started with init_from={str(source)!r}, now it is None: use the old '
    f'value, or another workdir'
  ):
    train.main([*arguments, '--config.init_from=None'])
  shutil.rmtree(run / 'checkpoints')
  with bad_input(f'init_from={source}: no such folder; expected the workdir of a run'):
    train.main(arguments)
  (tmp_path / 'moved').rename(source)
  assert train.main(arguments) == 0 and arrays(run) == whole


def test_only_parameters_and_codebook_are_of_the_other_run(tiny, source, tmp_path):
  config = tiny(init_from=str(source))
  new = toy.Programs(config, 257, mesh_of(2)).create()
  new = new.replace(codebook={}, opt_state={'moment': new.params['embedding'] + 1})
  (tmp_path / 'run').mkdir()
  state = init_from.Start(config, tmp_path / 'run')(new)
  embedding = runs.load_run(source).state.params['embedding']
  np.testing.assert_array_equal(state.params['embedding'], embedding)
  assert np.abs(embedding).max() > 0
  assert state.step == 0 and state.opt_state is new.opt_state and state.memory is new.memory
  assert state.params['embedding'].sharding == new.params['embedding'].sharding


@pytest.fixture
def saved(tiny, tmp_path):
  """A function that saves a run without a checkpoint, of a tiny model with some changes."""

  def save(model=(), vocabulary=None):
    folder = tmp_path / 'saved'
    folder.mkdir(exist_ok=True)
    experiment.save(tiny(model), folder / 'config.json')
    (vocabulary or vocabularies.ByteVocabulary()).save(folder)
    return str(folder)

  return save


@each(
  'model, message',
  [
    ({'width': 32}, 'model.width=32, now it is 16'),
    ({'norm': 'post'}, "model.norm='post', now it is 'pre'"),
    ({'memory': model_config.MemoryConfig(length=9)}, 'model.memory=(length=9), now it is None'),
  ],
)
def test_another_model_is_refused(tiny, saved, tmp_path, model, message):
  config = tiny(init_from=saved(model))
  with pytest.raises(errors.BadInput) as caught:
    init_from.Start(config, tmp_path / 'run')
  assert str(caught.value).startswith(f'init_from={config.init_from} was trained with {message}')
  assert str(caught.value).endswith(f': use --config={config.init_from}, or omit init_from')


def test_a_missing_memory_is_named_with_its_preset(tiny, saved, tmp_path):
  memory = NGramMemoryConfig.from_preset('engram')
  source = saved({'ngram_memories': (dataclasses.replace(memory, layers=(0,)),)})
  with bad_input(
    f'init_from={source} has model.ngram_memories.0, which is missing: add '
    f'--config.model.ngram_memories.0.preset=engram, or omit init_from'
  ):
    init_from.Start(tiny(init_from=source), tmp_path / 'run')


def test_the_folder_of_a_run_is_its_config(tiny, saved):
  folder = saved({'dropout': 0.1})
  (pathlib.Path(folder) / 'corpus.json').write_text('{"content_hash": null}')
  for spec in (folder, f'hf:{folder}', f'{folder}/config.json'):
    assert command_line.resolve(spec, []) == tiny({'dropout': 0.1})


def test_what_leaves_the_meaning_of_the_parameters_may_differ(tiny, saved, tmp_path, caplog):
  caplog.set_level('INFO')
  source = saved({'memory': model_config.MemoryConfig(length=8)})
  changes = {'dropout': 0.1, 'dtype': 'float32', 'scan_layers': False}
  model = changes | {'memory': model_config.MemoryConfig(length=4)}
  init_from.Start(tiny(model, init_from=source), tmp_path / 'run')
  assert not caplog.messages  # no memory is new
  model['memory'] = model_config.MemoryConfig(length=4, across_documents=True)
  with pytest.raises(errors.BadInput, match='was trained with model.memory.across_documents=False'):
    init_from.Start(tiny(model, init_from=source), tmp_path / 'run')


def test_a_published_model_gets_memories(tmp_path, one_device, caplog, monkeypatch):
  """Its parameters are where they were, the others as they were drawn; two draws are of it."""
  caplog.set_level('INFO')
  folder, workdir = tmp_path / 'model', tmp_path / 'run'
  params = published_folders.write(folder)
  overrides = [('init_from', f'hf:{folder}'), ('model.ngram_memories.0.preset', 'engram')]
  overrides += [('model.ngram.clusters', '6'), ('training.segment_length', '8')]
  overrides += [('training.batch_size', '2'), ('model.persistent.vectors', '3')]
  overrides += [('training.accumulation.parts', '2')]
  config = command_line.resolve(f'hf:{folder}', overrides)
  workdir.mkdir()
  model = language_model.build(config.model, published_folders.V)
  variables = nn.unbox(model_variables.abstract(model))
  mesh = runs.load_run(folder).mesh
  place = lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), sharding.replicated(mesh))
  variables = jax.tree.map(place, variables)
  memory = language_model.empty_memory(config.model, 2)
  state = train_state.TrainState(
    place(np.int32(0)), variables['params'], variables['codebook'], {}, memory
  )
  tokens = np.random.default_rng(0).integers(0, published_folders.V, (3, 2, 8), np.int32)

  def segment(step, rows):
    valid = np.ones((2, 8), np.float32)
    valid[1, 4:] = 0
    batch = token_batch.Batch(tokens[step % 3], tokens[0], np.zeros((2, 8), bool), valid)
    return token_batch.map_batches(lambda array: array[rows], batch)

  apply, shapes = type(model).apply, set()
  note = lambda self, variables, tokens, *args, **options: (
    shapes.add(tokens.shape) or apply(self, variables, tokens, *args, **options)
  )
  monkeypatch.setattr(type(model), 'apply', note)
  started = init_from.Start(config, workdir)(state, segment)
  assert shapes == {(1, 8)}  # the parts of a batch, as in training
  old, new = (traverse_util.flatten_dict(tree) for tree in (params, started.params))
  for path, leaf in old.items():
    np.testing.assert_array_equal(new[path], leaf)
  drawn = {path for path in new if 'ngram_memory_0' in path or 'ngrammer' in path}
  persistent = {path for path in new if 'persistent' in path}
  assert new.keys() == old.keys() | drawn | persistent and drawn
  assert {path[-1] for path in persistent} == {'persistent_keys', 'persistent_values', 'gate'}
  assert all(not np.any(new[path]) for path in drawn | persistent)
  count = lambda paths: sum(new[path].size for path in paths)
  total = sum(leaf.size for leaf in old.values())
  share = 100 * (count(new) - total) / total
  assert (
    f'new: model.ngram, model.ngram_memories.0, model.persistent, with {count(new) - total:,} '
    f'parameters, {share:.1f} % of the {total:,} of the trained model'
  ) in caplog.messages
  centroids_NxKxH = np.asarray(started.codebook['ngrammer']['quantizer']['centroids'])
  rows_KxD = centroids_NxKxH.swapaxes(0, 1).reshape(6, -1)
  seen = {token for batch in tokens for token in (*batch[0], *batch[1, :4])}
  embedded = {params['embedding'][token].tobytes() for token in seen}
  assert len({row.tobytes() for row in rows_KxD} & embedded) == 6
  # A training that starts from this one has its centroids.
  restored = ModelVariables(0, started.params, started.codebook)
  run = types.SimpleNamespace(
    config=config, restored=restored, origin={}, model=model, published=None
  )
  monkeypatch.setattr(init_from, 'open_initial_run', lambda *_: run)
  read = lambda *_: pytest.fail('drawn again')
  second = init_from.initial_state(config, workdir, state, read)
  jax.tree.map(np.testing.assert_array_equal, second.codebook, started.codebook)


@each(
  'vocabulary, size',
  [
    (vocabularies.ByteVocabulary(), None),
    (vocabularies.WordVocabulary(['<eos>', '<unk>', 'a']), 3),
    (vocabularies.CharacterVocabulary('ab', 'utf-8', False), 2),
  ],
)
def test_another_vocabulary_is_refused(tiny, saved, tmp_path, vocabulary, size):
  config = tiny(init_from=saved())
  start = init_from.Start(config, tmp_path / 'run')
  if size is None:
    return start.check_vocabulary(vocabulary)
  with bad_input(
    f'init_from={config.init_from} has another vocabulary, of 257 token ids instead of {size}: use '
    f'--config={config.init_from}, or omit init_from'
  ):
    start.check_vocabulary(vocabulary)
  own = pathlib.Path(config.init_from) / 'vocabulary.model'
  own.touch()
  with pytest.raises(errors.BadInput, match='path=.*/vocabulary.model and .*vocabulary_size=None'):
    start.check_vocabulary(vocabulary)
  own.unlink()


@each(
  'one, other',
  [
    (['<eos>', '<unk>', 'a', 'b'], ['<eos>', '<unk>', 'b', 'a']),
    (['<eos>', '<unk>', 'a', 'b'], ['<eos>', '<unk>', 'a', 'c']),
  ],
)
def test_the_definition_of_a_vocabulary_is_that_of_its_ids(one, other):
  definition = lambda words: vocabularies.WordVocabulary(words).definition
  assert definition(one) == definition(list(one)) != definition(other)


@each('folder', ['none', 'empty'])
def test_what_is_no_run_is_refused(tiny, tmp_path, folder):
  (tmp_path / 'empty').mkdir(exist_ok=True)
  expected = {'none': 'no such folder; ', 'empty': 'it holds no config.json; expected a run '}
  with pytest.raises(errors.BadInput) as caught:
    init_from.Start(tiny(init_from=f'{tmp_path}/{folder}'), tmp_path / 'run')
  assert str(caught.value).startswith(f'init_from={tmp_path}/{folder}: {expected[folder]}')
  assert not reader.steps(tmp_path / 'run')


def test_a_table_in_host_memory_stays_there():
  """It is one that a step may change in place."""
  device = jnp.ones((3, 4))
  merged = init_from._merge('run', {'table': np.zeros((3, 4), np.float32)}, {'table': device})
  assert isinstance(merged['table'], np.ndarray) and merged['table'].flags.writeable
  np.testing.assert_array_equal(merged['table'], device)
