"""Training with tables in host memory gives the numbers of training with tables on the device."""

import dataclasses
import functools
import itertools
import shutil

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import host_arrays, sharding
from ngrammer_jax.checkpoints import checksums, reader
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import training as training_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.inference import sampling
from ngrammer_jax.models import host_tables, memories, table_drawing
from ngrammer_jax.optimizers import row_gradient
from ngrammer_jax.system import hosts
from ngrammer_jax.training import loop, programs, table_pages
from tests.checks import bad_input, mesh_of
from tests.training.helpers import arrays, no_validation, records

MEMORY = NGramMemoryConfig(
  hash='polynomial', join='sum', orders=(1, 2), heads=1, rows=(1031,), width=16
)


def assert_close(one, other):
  """Equal, but for the order of operations that the compiler chooses in float32."""
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(compare, jax.device_get(one), jax.device_get(other))


def config_of(tiny, *memories, training=None, **fields):
  memories = tuple(dataclasses.replace(memory, **fields) for memory in memories)
  model = {'ngram': None, 'ngram_memories': memories, 'layers': 1}
  training = {'steps': 8, 'evaluate_every': 8, 'segments_per_call': 1} | (training or {})
  return tiny(model=model, training=training, optimizer={'schedule': 'constant'})


def leaves_of(workdir, config):
  """The train state of the newest checkpoint, by name."""
  abstract = programs.Programs(config, 257, mesh_of(1)).abstract
  _, state = reader.restore_newest(workdir, abstract)
  return checksums.named_leaves(state)


def assert_equal_runs(one, other, *configs):
  """The same records and last state, but for rounding, which the first steps of Adagrad enlarge."""
  for line, expected in zip(records(one), records(other), strict=True):
    assert line == pytest.approx(expected, rel=2e-4)
  leaves = map(leaves_of, (one, other), configs)
  assert_close(*leaves)


def test_a_run_equals_that_with_tables_on_the_device_and_each_resumes_the_other(
  tiny, tmp_path, one_device
):
  """Bit by bit where a table stays in host memory."""
  on_host = config_of(tiny, MEMORY, table_memory='host')
  on_device = config_of(tiny, MEMORY)
  loop.train(on_host, tmp_path / 'host')
  for name in 'host_again', 'device_after_host':
    shutil.copytree(tmp_path / 'host', tmp_path / name)
    shutil.rmtree(tmp_path / name / 'checkpoints' / '8')
  loop.train(on_host, tmp_path / 'host_again')
  assert arrays(tmp_path / 'host_again') == arrays(tmp_path / 'host')
  loop.train(on_device, tmp_path / 'device_after_host')
  assert_equal_runs(tmp_path / 'host', tmp_path / 'device_after_host', on_host, on_device)
  loop.train(on_device, tmp_path / 'device')
  assert_equal_runs(tmp_path / 'host', tmp_path / 'device', on_host, on_device)


@pytest.mark.full
@pytest.mark.parametrize(
  'fields, training',
  [
    (
      {'optimizer': 'row_adagrad'},
      {'batch_size': 16, 'accumulation': training_config.AccumulationConfig(2)},
    ),
    ({'optimizer': 'lazy_adam'}, {}),
    ({'optimizer': 'frozen'}, {}),
    ({'optimizer': 'adagrad', 'key': 'compressed', 'hash': 'engram', 'join': 'gate'}, {}),
  ],
  ids=lambda fields: fields.get('optimizer'),
)
def test_other_optimizers_and_microbatches_equal_those_on_the_device(
  fields, training, tiny, tmp_path
):
  """On 8 devices, with a memory in a block."""
  configs = []
  for where in 'host', 'device':
    configs.append(config_of(tiny, MEMORY, training=training, table_memory=where, **fields))
    loop.train(configs[-1], tmp_path / where)
  assert_equal_runs(tmp_path / 'host', tmp_path / 'device', *configs)


@pytest.mark.full
@pytest.mark.parametrize('shape', [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_scores_ranks_and_generated_tokens_are_those_of_tables_on_the_device(shape):
  """At the input and in a block, with a convolution and compressed ids."""
  common = {'orders': (2, 3), 'heads': 2, 'rows': (61,), 'width': 8, 'row_multiple': 8}
  random, results = np.random.default_rng(0), []
  documents = [random.integers(0, 37, 40 + i).astype(np.int32) for i in range(5)]
  for where in 'host', 'device':
    memory = functools.partial(NGramMemoryConfig, **common, table_memory=where)
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
    tokens = list(itertools.islice(tokens, 5))
    read = run.engine.start_incremental_decoding(variables, 0, greedy, context=32)
    read_tokens = [read(prefixes[0]), read(choices[0][0])]
    results.append((scores, ranks, tokens, read_tokens))
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
  assert all(host_arrays.is_on_host(leaf) == (where == 'host') for leaf in tables)


@pytest.mark.parametrize('where', ['device', 'host'])
def test_bfloat16_is_rounded_by_the_step_and_resumes_bit_by_bit(
  tiny, one_device, tmp_path, monkeypatch, where
):
  no_validation(monkeypatch)
  config = config_of(tiny, MEMORY, table_memory=where, table_dtype='bfloat16')
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


def test_jax_without_the_processor_is_refused(monkeypatch):
  config = model_config.ModelConfig(
    ngram_memories=(dataclasses.replace(MEMORY, table_memory='host'),)
  )

  def no_backend(backend):
    raise RuntimeError(f'Unknown backend {backend}')

  monkeypatch.setattr(jax, 'local_devices', no_backend)
  with bad_input(
    'model.ngram_memories.0.table_memory="host" computes row numbers on the processor, which '
    f'JAX_PLATFORMS={jax.config.jax_platforms} excludes: use JAX_PLATFORMS='
    f'{jax.config.jax_platforms},cpu, or model.ngram_memories.0.table_memory="device"'
  ):
    host_tables.check_processor(config)


@pytest.mark.parametrize(
  'fields', [{}, {'table_initial': 'uniform'}, {'deviation': 0.3}, {'table_dtype': 'bfloat16'}]
)
def test_rows_of_a_table_drawn_in_pieces_are_those_of_one_draw(monkeypatch, fields):
  """The last piece is shorter; another process may draw the first rows."""
  memory = dataclasses.replace(MEMORY, **fields)
  module = memory_module(memory)
  key = np.array([3, 2**32 - 5], np.uint32)
  V, E = module.table_shape()
  initialize = jax.jit(module.table_initializer(), static_argnums=(1, 2))
  whole = np.asarray(initialize(jax.random.wrap_key_data(key), (V, E), module.table_dtype))
  assert len(np.unique(whole.astype(np.float32), axis=0)) == V
  draw = functools.partial(table_drawing.draw, module, key, module.table_dtype)
  for values in (table_drawing.PIECE_VALUES, 300 * E):
    monkeypatch.setattr(table_drawing, 'PIECE_VALUES', values)
    for rows in (slice(0, V), slice(700, V), slice(V, V)):
      np.testing.assert_array_equal(draw(host_tables.processor(), rows), whole[rows])


def memory_module(memory):
  """The module of a memory at the input of a small model."""
  model = model_config.ModelConfig(layers=1, width=16, heads=2, ngram_memories=(memory,))
  placed = next(memories.make(model, 257).flatten())
  return placed.make(parent=None)


def set_process(monkeypatch, index, count):
  """Makes this process one of several."""
  monkeypatch.setitem(hosts._process, 'index', index)
  monkeypatch.setitem(hosts._process, 'count', count)


@pytest.mark.parametrize('V', [20, 21, 2, 300_000])
def test_each_row_of_an_array_is_in_one_process(monkeypatch, V):
  """Those of a large array in whole chunks of its checkpoint."""
  rows = []
  for index in range(4):
    set_process(monkeypatch, index, 4)
    own = host_arrays.rows_of_process(V)
    assert own.stop - own.start <= host_arrays.rows_per_process(V)
    if host_arrays.CHUNK_ROWS < V and own.start < V:
      assert own.start % host_arrays.CHUNK_ROWS == 0
    rows += range(own.start, own.stop)
  assert rows == list(range(V))


@pytest.mark.parametrize('processes', [1, 3])
def test_rows_are_read_and_written_in_pieces(monkeypatch, processes):
  """Different rows, each in its process; all others are zeros."""
  monkeypatch.setattr(host_arrays, 'PIECE_ROWS', 3)
  random = np.random.default_rng(0)
  array = random.normal(size=(20, 4)).astype(np.float32)
  rows = np.sort(random.permutation(20)[:8])
  new = random.normal(size=(8, 4)).astype(np.float32)
  total = 0
  written = []
  for index in range(processes):
    set_process(monkeypatch, index, processes)
    own = host_arrays.rows_of_process(20)
    leaf = host_arrays.from_rows(array[own].copy(), array.shape)
    assert leaf.shape == array.shape and host_arrays.is_on_host(leaf)
    total = total + host_arrays.take_here(leaf, rows, 10)
    host_arrays.put_here(leaf, rows, new)
    written.append(host_arrays.rows_here(leaf)[1])
  np.testing.assert_array_equal(total, np.concatenate([array[rows], np.zeros((2, 4))]))
  np.testing.assert_array_equal(host_arrays.take(array, rows.reshape(2, 4))[1], array[rows[4:]])
  expected = array.copy()
  for row, value in zip(rows, new, strict=True):
    expected[row] = value
  np.testing.assert_array_equal(np.concatenate(written), expected)


@pytest.mark.parametrize('before', [[], [2], [0, 3, 4, 7], [5, 6, 9]])
def test_rows_of_the_step_before_are_taken_from_it(before):
  """And no others; entries that are not used are none."""
  rows = np.array([3, 4, 6, 9], np.int32)
  expected = [before.index(row) if row in before else -1 for row in rows] + [-1, -1]
  index_L = table_pages.previous_indices(rows, np.array(before, np.int32), 6)
  assert index_L.tolist() == expected


def test_an_array_is_placed_as_another_one(monkeypatch):
  """In host memory, with its dtype; of several processes, each places its own rows."""
  array = np.arange(14, dtype=np.float32).reshape(7, 2)
  on_host = sharding.replicated(mesh_of(1)).with_memory_kind(sharding.HOST_MEMORY_KIND)
  like = jax.ShapeDtypeStruct(array.shape, 'bfloat16', sharding=on_host)
  placed = host_arrays.place_like(array, like)
  assert type(placed) is np.ndarray and placed.dtype == like.dtype
  np.testing.assert_array_equal(placed, array)
  set_process(monkeypatch, 1, 3)
  for source in (array, jax.numpy.asarray(array)):
    placed = host_arrays.place_like(source, like)
    assert placed.shape == array.shape and placed.dtype == like.dtype
    np.testing.assert_array_equal(placed.rows, array[3:6])
  again = host_arrays.place_like(
    placed, jax.ShapeDtypeStruct(array.shape, 'float32', sharding=on_host)
  )
  assert again.dtype == np.float32
  np.testing.assert_array_equal(again.rows, array[3:6])
