"""A run whose tables are packed, as on TPUs, is the run with tables as the model declares them."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.training import loop, programs
from ngrammer_jax.training import state as train_state
from tests.checks import mesh_of
from tests.training.helpers import arrays, drawn_state, no_initialization, records

COMMON = {'orders': (2,), 'heads': 2, 'rows': (64,), 'row_multiple': 64, 'width': 32}
MEMORIES = (  # at the input, and in a block, with gradients as tables and as rows
  NGramMemoryConfig(hash='polynomial', join='sum', projection=True, exchange='table', **COMMON),
  NGramMemoryConfig(layers=(1,), exchange='rows', **COMMON),
  NGramMemoryConfig(layers=(0,), optimizer='adam', **COMMON),
  NGramMemoryConfig(layers=(1,), optimizer='lazy_adam', **COMMON),  # by rows: never packed
  NGramMemoryConfig(layers=(0,), optimizer='row_adagrad', exchange='rows', **COMMON),
)


def config_of(tiny, memories, layers=2):
  model = {'ngram': None, 'ngram_memories': memories, 'remat': 'minimal'}
  return tiny(model=model | {'layers': layers}, training={'steps': 8, 'evaluate_every': 8})


@pytest.fixture
def packs(monkeypatch):
  """Sets whether tables are packed."""
  set_platforms = lambda names: monkeypatch.setattr(train_state, 'PACKED_PLATFORMS', names)
  return lambda is_packed: set_platforms(('cpu',) if is_packed else ())


def test_a_run_continues_with_packed_tables(tiny, tmp_path, packs, one_device, monkeypatch):
  """Bit by bit as with those that are not packed; only norms add their squares in another order."""
  no_initialization(monkeypatch)
  at_input, in_block = MEMORIES[:2]
  in_block = dataclasses.replace(in_block, layers=(0,))
  config = config_of(tiny, (at_input, in_block, MEMORIES[4]), layers=1)
  packs(False)
  loop.train(config, tmp_path / 'plain')
  packed = shutil.copytree(tmp_path / 'plain', tmp_path / 'packed')
  shutil.rmtree(packed / 'checkpoints' / '8')
  packs(True)
  loop.train(config, packed)
  assert arrays(packed) == arrays(tmp_path / 'plain')
  rounded = [pytest.approx(record, rel=1e-6) for record in records(tmp_path / 'plain')]
  assert records(packed) == rounded


def test_narrow_tables_are_packed_with_their_optimizer_state(tiny, packs):
  packs(True)
  run, shapes = programs.Programs(config_of(tiny, MEMORIES), 260, mesh_of(2, 2, 2)), {}
  for path, leaf in jax.tree.leaves_with_path((run.packed.params, run.packed.opt_state)):
    *_, memory, name = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
    if name == 'table':
      shapes.setdefault(int(memory[-1]), []).append(leaf.shape)
  packed, plain = (48, 128), (192, 32)
  by_row = [packed, (48, 4)]
  assert shapes == {0: [packed] * 2, 1: [packed] * 2, 2: [packed] * 3, 3: [plain] * 3, 4: by_row}
  state = drawn_state(run.abstract)
  before = jax.device_get(state.params)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  again = run.unpack(run.pack(state))  # which deletes what it packs
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.params), before)
  assert jax.tree.map(lambda leaf: leaf.sharding, again) == shardings


def test_only_whole_rows_are_packed():
  shapes = (8, 32), (6, 32), (8, 48), (8, 128), (8, 256)
  expected = [(2, 128), *shapes[1:]]
  assert [table.packed_shape(*shape) for shape in shapes] == expected
