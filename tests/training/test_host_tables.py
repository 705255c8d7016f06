"""Training with tables in host memory gives the numbers of training with tables on the device."""

import dataclasses
import functools
import itertools
import shutil
import types

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import sampling
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.models import host_tables
from ngrammer_jax.optimizers import row_gradient
from ngrammer_jax.training import accumulation, loop, programs
from tests.checks import bad_input, mesh_of
from tests.optimizers import table_model
from tests.training.helpers import arrays, no_validation, records

MEMORY = NGramMemoryConfig(
  hash='polynomial', join='sum', orders=(1, 2), heads=1, rows=(1031,), width=16
)


def run_table_model(shape, optimizer, axes, parts=None):
  """State and metrics after some steps of a model of two lookups in one table."""
  mesh = mesh_of(*shape)
  parts = None if parts is None else accumulation.GradientAccumulation(parts, mesh)
  call, create = table_model.compile_call(mesh, optimizer, parts, axes=axes)
  segments = table_model.segments()
  rows = lambda row_slice: token_batch.map_batches(lambda array: array[:, row_slice], segments)
  with sharding.use(mesh):
    placed = sharding.global_rows(mesh, table_model.B, rows, axis=1)
    return call(create(), placed, np.int32(table_model.STEPS - 1))


def assert_close(one, other):
  """Equal, but for the order of operations that the compiler chooses in float32."""
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
  jax.tree.map(compare, jax.device_get(one), jax.device_get(other))


@pytest.mark.full
@pytest.mark.parametrize(
  'shape, optimizer, parts',
  [
    ((2, 2, 2), 'adagrad', 2),
    ((2, 2, 2), 'row_adagrad', None),
    pytest.param((8, 1, 1), 'frozen', None, marks=pytest.mark.slow),
  ],
)
def test_a_training_step_equals_that_on_the_device(shape, optimizer, parts):
  """State and metrics; tables and their accumulators stay on the host."""
  state, metrics = run_table_model(shape, optimizer, table.HOST_AXES, parts)
  assert_close((state, metrics), run_table_model(shape, optimizer, table.AXES, parts))
  on_host = {
    name for name, leaf in checksums.named_leaves(state).items() if sharding.is_on_host(leaf)
  }
  assert 'params/ngram_memory_0/table' in on_host
  accumulators = {name for name in on_host if 'sum' in name}
  assert len(on_host) == 1 + len(accumulators) == (1 if optimizer == 'frozen' else 2)


def config_of(tiny, memory, **fields):
  memory = dataclasses.replace(memory, **fields)
  model = {'ngram': None, 'ngram_memories': (memory,), 'layers': 1}
  training = {'steps': 8, 'evaluate_every': 8}
  return tiny(model=model, training=training, optimizer={'schedule': 'constant'})


@pytest.mark.slow
def test_a_run_resumes_on_the_device_and_validates_with_rows_looked_up_ahead(
  tiny, tmp_path, one_device
):
  """The metrics and validation loss of tables on the device, and the same checkpoint again."""
  on_host = config_of(tiny, MEMORY, table_memory='host')
  on_device = config_of(tiny, MEMORY)
  loop.train(on_host, tmp_path / 'host')
  resumed = shutil.copytree(tmp_path / 'host', tmp_path / 'resumed')
  shutil.rmtree(resumed / 'checkpoints' / '8')
  loop.train(on_device, resumed)
  for line, expected in zip(records(resumed), records(tmp_path / 'host'), strict=True):
    assert line == pytest.approx(expected, rel=1e-6)
  shutil.rmtree(resumed / 'checkpoints' / '8')
  loop.train(on_host, resumed)
  assert arrays(resumed) == arrays(tmp_path / 'host')


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(1, 1, 1), (2, 2, 2)])
def test_scores_ranks_and_generated_tokens_are_those_of_tables_on_the_device(shape):
  """At the input and in a block, with a convolution and compressed ids."""
  common = {'orders': (2, 3), 'heads': 2, 'rows': (61,), 'width': 8, 'row_multiple': 8}
  random, results = np.random.default_rng(0), []
  documents = [random.integers(0, 37, 40 + i).astype(np.int32) for i in range(5)]
  for where in table.HOST_AXES, table.AXES:
    memory = functools.partial(
      NGramMemoryConfig, **common, table_memory='host' if where == table.HOST_AXES else 'device'
    )
    memories = (
      memory(hash='polynomial', join='sum', projection=True),
      memory(key='compressed', layers=(1,), convolution=2),
    )
    model = model_config.ModelConfig(
      layers=2, width=32, heads=2, feed_forward_width=32, ngram_memories=memories
    )
    config = experiment.Config(model=model)
    run = programs.Programs(config, 37, mesh_of(*shape))
    state = run.create()
    variables = {'params': state.params, 'codebook': state.codebook}
    scores = list(run.engine.score_documents(variables, documents, 0, 16))
    prefixes, choices = zip(*((ids[:9], [ids[9:12], ids[12:15]]) for ids in documents), strict=True)
    ranks = {i: scores for i, scores, _ in run.engine.rank(variables, prefixes, choices, 4)}
    greedy = sampling.SamplingConfig(temperature=0.0)
    tokens = run.engine.generate(variables, prefixes, range(5), greedy, context=32)
    results.append((scores, ranks, list(itertools.islice(tokens, 5))))
  assert_close(*results)


@pytest.mark.parametrize('where', ['device', 'host'])
def test_tables_in_bfloat16_have_accumulators_in_float32(tiny, where):
  config = config_of(tiny, MEMORY, table_memory=where, table_dtype='bfloat16')
  abstract = checksums.named_leaves(programs.Programs(config, 260, mesh_of(1)).abstract)
  table, accumulator = (
    [leaf for name, leaf in abstract.items() if name.startswith(part) and name.endswith('/table')]
    for part in ('params', 'opt_state')
  )
  tables = [*table, *accumulator]
  assert [str(leaf.dtype) for leaf in tables] == ['bfloat16', 'float32']
  assert all(sharding.is_on_host(leaf) == (where == 'host') for leaf in tables)


def test_bfloat16_is_rounded_by_the_step_and_resumes_bit_by_bit(
  tiny, one_device, tmp_path, monkeypatch
):
  no_validation(monkeypatch)
  config = config_of(tiny, MEMORY, table_dtype='bfloat16')
  keys, round_rows = set(), row_gradient.round_stochastically

  def record(values, rows, key):
    jax.debug.callback(lambda data: keys.add(tuple(data.tolist())), jax.random.key_data(key))
    return round_rows(values, rows, key)

  with monkeypatch.context() as patch:
    patch.setattr(row_gradient, 'round_stochastically', record)
    loop.train(config, tmp_path / 'whole')
  jax.effects_barrier()
  assert len(keys) == config.training.steps
  shutil.copytree(tmp_path / 'whole', tmp_path / 'resumed')
  shutil.rmtree(tmp_path / 'resumed' / 'checkpoints' / '8')
  loop.train(config, tmp_path / 'resumed')
  assert arrays(tmp_path / 'whole') == arrays(tmp_path / 'resumed')


def test_a_start_at_padding_starts_no_document(monkeypatch):
  monkeypatch.setattr(host_tables, '_memories', lambda *args: ())
  config = model_config.ModelConfig(layers=1, width=4, heads=1)
  segment = token_batch.Batch(
    np.zeros((1, 3), np.int32), None, np.array([[True, False, True]]), np.array([[1, 1, 0]])
  )
  state = host_tables.empty_state(config, 1)
  model = types.SimpleNamespace(config=config, vocabulary_size=5)
  _, state = host_tables.look_up(model, {}, segment, state)
  assert state['document'].tolist() == [1]


def test_devices_without_such_memory_are_refused():
  gpu = types.SimpleNamespace(
    platform='gpu', device_kind='NVIDIA H100', addressable_memories=lambda: []
  )
  mesh = types.SimpleNamespace(devices=np.array([gpu]))
  with bad_input(
    'model.ngram_memories.0.table_memory="host" is for cpu and tpu with pinned_host '
    'memory, not for this gpu (NVIDIA H100): use model.ngram_memories.0.table_memory="device"'
  ):
    sharding.check_host_memory('model.ngram_memories.0.table_memory', mesh)


def test_checksums_of_shards_on_hosts_are_those_of_the_array():
  place = jax.sharding.NamedSharding(mesh_of(2, 2, 2), jax.P('fsdp'), memory_kind='pinned_host')
  with jax.enable_x64(True):
    for dtype in ('float16', 'float32', 'float64'):
      array = np.random.default_rng(0).normal(size=(8, 3)).astype(dtype)
      sums = checksums._sum_of_shards(jax.device_put(array, place))
      assert sums.tolist() == checksums._sum_on_host(array).tolist(), dtype
