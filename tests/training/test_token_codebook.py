"""The codebook of n-gram memories with compressed token ids, at the start of a run."""

import dataclasses
import types

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from ngrammer_jax import runs, sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.config.ngram import memory as ngram_memory
from ngrammer_jax.data import token_classes, vocabularies
from ngrammer_jax.training import init_from, loop, token_codebook, train_task
from tests.training.helpers import no_validation

VOCABULARY = vocabularies.learn_characters([b'ABCabcxyz012\t\n .'], 'utf-8', separated=False)
# Sorted: tab, newline, space; full stop; digits; A, B, C; a, b, c; x, y, z.
CLASSES = [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10]
CLASS_COUNT = 11


def memory(**fields):
  fields = {'key': 'compressed', 'orders': (2, 3), 'heads': 2, 'rows': (50,)} | fields
  return ngram_memory.NGramMemoryConfig(**fields)


MEMORIES = (
  memory(join='mean', seed=3),  # at the input
  memory(key='tokens', join='mean'),
  memory(layers=(1, 4), seed=5, orders=(2, 3, 4)),
  memory(layers=(1,), hash='ple', seed=7),
)


def model_of(memories):
  return model_config.ModelConfig(layers=5, ngram_memories=tuple(memories))


def empty_arrays(places):
  identity = np.arange(VOCABULARY.size, dtype=np.int32)
  return {'token_classes': identity, 'multipliers': np.zeros((places, 2), np.uint32)}


def codebook_on(mesh):
  """A codebook of identity classes, with arrays of other layers."""
  other = np.ones(3, np.float32)
  codebook = {
    'ngrammer': {'quantizer': {'centroids': other}},
    'ngram_memory_0': empty_arrays(3) | {'usage': other},
    'copy_memory': {'token_classes': np.arange(VOCABULARY.size, dtype=np.int32)},
    'layer_1': {'ngram_memory_2': empty_arrays(4), 'ngram_memory_3': empty_arrays(3)},
    'layer_4': {'ngram_memory_2': empty_arrays(4)},
  }
  codebook = jax.device_put(codebook, NamedSharding(mesh, PartitionSpec()))
  memory_0, rows = codebook['ngram_memory_0'], NamedSharding(mesh, PartitionSpec('data'))
  memory_0['token_classes'] = jax.device_put(memory_0['token_classes'], rows)
  return codebook


def words_to_int(multipliers_Nx2):
  return [(int(high) << 32) + int(low) for high, low in np.asarray(multipliers_Nx2)]


def engram(seed, layer, places):
  """Multipliers by the formula of the sheet."""
  draws = np.random.default_rng(seed + 10007 * layer).integers(
    0, (2**63 - 1) // CLASS_COUNT // 2, size=places, dtype=np.int64
  )
  return [int(draw) * 2 + 1 for draw in draws]


def test_classes_and_multipliers_are_those_of_the_vocabulary_and_of_the_layer():
  before = codebook_on(sharding.make_mesh())
  after = token_codebook.fill(before, model_of(MEMORIES), VOCABULARY)
  assert jax.tree.structure(after) == jax.tree.structure(before)
  layer_1 = after['layer_1']
  ple = hashes.ple_multipliers(CLASS_COUNT, 3, seed=7, index=0).tolist()
  for arrays, multipliers in (
    (after['ngram_memory_0'], engram(3, 0, 3)),
    (layer_1['ngram_memory_2'], engram(5, 1, 4)),
    (after['layer_4']['ngram_memory_2'], engram(5, 4, 4)),
    (layer_1['ngram_memory_3'], ple),
  ):
    assert arrays['token_classes'].tolist() == CLASSES
    assert arrays['token_classes'].dtype == np.int32 and arrays['multipliers'].dtype == np.uint32
    assert words_to_int(arrays['multipliers']) == multipliers
  for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
    assert new.sharding == old.sharding and new.shape == old.shape
  assert after['copy_memory']['token_classes'].tolist() == CLASSES
  assert after['ngrammer'] == before['ngrammer']
  assert after['ngram_memory_0']['usage'] is before['ngram_memory_0']['usage']


def test_the_training_task_fills_the_codebook(tiny):
  config = tiny()
  model = dataclasses.replace(config.model, ngram_memories=(memory(layers=(0,)),))
  task = train_task.CorpusTask(dataclasses.replace(config, model=model))
  arrays = {
    'token_classes': np.arange(257, dtype=np.int32),
    'multipliers': np.zeros((3, 2), 'uint32'),
  }
  state = types.SimpleNamespace(codebook=jax.device_put({'layer_0': {'ngram_memory_0': arrays}}))
  state.replace = lambda **changes: changes
  filled = task.initial_state(state)['codebook']['layer_0']['ngram_memory_0']
  expected = token_classes.token_classes(*task.vocabulary.token_texts())
  np.testing.assert_array_equal(filled['token_classes'], expected)
  assert expected.max() + 1 == 228 and all(m % 2 for m in words_to_int(filled['multipliers']))


@pytest.mark.parametrize('memories', [(), (memory(key='tokens'),)])
def test_other_memories_need_no_classes(memories, monkeypatch):
  monkeypatch.setattr(token_classes, 'token_classes', None)
  codebook = {'ngrammer': {'quantizer': np.ones(2)}}
  assert token_codebook.fill(codebook, model_of(memories), VOCABULARY) is codebook


@pytest.mark.slow
def test_a_run_keeps_its_classes_if_the_rule_changes(tiny, tmp_path, monkeypatch, one_device):
  """The classes of a checkpoint win: resumed, exported, and in a run that starts from it."""
  no_validation(monkeypatch)
  old_classes = np.maximum(np.arange(257) - 1, 0).astype(np.int32)  # all but one are renumbered
  compressed = memory(layers=(0,), rows=(997,), heads=1, width=4)
  model = {'layers': 1, 'ngram': None, 'ngram_memories': (compressed,)}
  train = lambda name, steps, *task, **changes: loop.train(
    tiny(model, {'schedule': 'constant'}, {'steps': steps, 'evaluate_every': 0}, **changes),
    tmp_path / name,
    *task,
  )
  with monkeypatch.context() as patch:
    patch.setattr(token_classes, 'token_classes', lambda *texts: old_classes)
    train('run', 2)
  codebook_of = lambda name: runs.load_run(tmp_path / name).state.codebook['layer_0']
  before = codebook_of('run')['ngram_memory_0']
  np.testing.assert_array_equal(before['token_classes'], old_classes)
  train('run', 4)
  start = lambda config: init_from.Start(config, tmp_path / 'started')
  make_task = lambda config: train_task.CorpusTask(config, start=start(config))
  train('started', 2, make_task, init_from=str(tmp_path / 'run'))
  runs.load_run(tmp_path / 'run').export(tmp_path / 'exported')
  for name in ('run', 'started', 'exported'):
    jax.tree.map(np.testing.assert_array_equal, codebook_of(name)['ngram_memory_0'], before)
