"""N-gram memories of other implementations: exact outputs and round trips, what is refused."""

import copy
import dataclasses
import json
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.interop import loader_options, ngram_memories, row_files
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram.gate import Gate
from ngrammer_jax.layers.ngram.memory import NGramMemory
from tests import official_memories as official
from tests.checks import assert_close, bad_input, full, mesh_of


def v41_layer(V=11, **changes):
  """The layer of the array `engram_v41_gate`, but its tables have one more row."""
  options = official.preset('engram_v41', heads=2, rows=(1,), width=5)
  return NGramMemory(dataclasses.replace(options, **changes), V, 10, 1, 4, official.FLOAT64)


def assert_written_back(layout, variables, path, arrays):
  """The library reads the same arrays from what the layout writes, bit for bit."""
  layout.save(variables, path)
  written = numpy.load_file(path)
  assert written.keys() == arrays.keys()
  for name, array in arrays.items():
    assert written[name].dtype == array.dtype
    np.testing.assert_array_equal(written[name], array)


def assert_norms(variables, keys, queries):
  """The output depends on their product only."""
  gate = variables['params']['gate']
  np.testing.assert_array_equal(gate['key_norm']['scale'].ravel(), np.ravel(keys))
  np.testing.assert_array_equal(gate['query_norm']['scale'].ravel(), np.ravel(queries))


def outputs(layer, variables, x, tokens):
  context = Context(tokens_BxT=jnp.asarray(tokens, jnp.int32))
  return jax.jit(lambda variables, x: layer.apply(variables, x, context)[0])(variables, x)


@pytest.mark.parametrize('name', ['longcat_n2_k1', 'longcat_n3_k2_prime'])
def test_longcat(reference, tmp_path, monkeypatch, name):
  monkeypatch.setattr(row_files, 'BLOCK_BYTES', 1000)  # less than a table, and across two
  f = reference(name)
  layer, arrays = official.longcat_layer(f), official.weights(f, 'weights/')
  path = official.save(tmp_path / 'official', arrays)
  with jax.enable_x64(True):
    layout = ngram_memories.longcat(layer, 'weights/')
    variables = layout.load(path)
    words = f['weights/word_embeddings.weight'][f['input_ids']]
    assert_close(outputs(layer, variables, words, f['input_ids']), f['output'], 1e-12)
    del arrays['weights/word_embeddings.weight']  # a parameter of the model, not of the memory
    assert_written_back(layout, variables, tmp_path / 'ours', arrays)
    layout.load(tmp_path / 'ours')  # its metadata have the vocabulary


@pytest.mark.parametrize('name', ['qwen_ple_n4_h1_hc1', 'qwen_ple_n2_h4_hc2_short'])
def test_qwen_ple(reference, tmp_path, monkeypatch, name):
  monkeypatch.setattr(row_files, 'BLOCK_BYTES', 1000)
  f = reference(name)
  layer, arrays = official.qwen_layer(f), official.weights(f, 'weights/', official.QWEN_NUMBERS)
  path = official.save(tmp_path / 'official', arrays)
  with jax.enable_x64(True):
    layout = ngram_memories.qwen_ple(layer, 'weights/', '')
    variables = layout.load(path)
    branches = lambda array: array.reshape(*array.shape[:2], layer.branches, layer.width)
    h = branches(f['hidden_states'])
    y = outputs(layer, variables, h, f['input_ids'])
    assert_close(y, h + branches(f['output']), 1e-9)
    assert_norms(variables, *(f[f'weights/norm_{name}.weight'] for name in ('key', 'query')))
    assert_written_back(layout, variables, tmp_path / 'ours', arrays)


@pytest.mark.parametrize('name, block', [('engram_o23_h8', 15), full('engram_o23_h2_zero', 2)])
def test_engram_demo(reference, tmp_path, monkeypatch, name, block):
  monkeypatch.setattr(row_files, 'BLOCK_BYTES', 1000)
  f, path = reference(name), f'layer{block}/'
  layer = official.demo_layer(f, block, row_multiple=64)  # padding that is not in the file
  arrays = official.weights(
    f, f'{path}weights/', [path + number for number in official.DEMO_NUMBERS]
  )
  file = official.save(tmp_path / 'official', arrays)
  with jax.enable_x64(True):
    layout = ngram_memories.engram_demo(layer, f['lookup_table'], f'{path}weights/', path)
    variables = layout.load(file)
    h = f['hidden_states']
    y = outputs(layer, variables, h, f['input_ids'])
    assert_close(y, h + f[f'{path}output'], 1e-9)
    norm = lambda i: [f[f'{path}weights/norm{i}.{g}.weight'] for g in range(layer.branches)]
    assert_norms(variables, norm(1), norm(2))
    rows = len(f[f'{path}weights/multi_head_embedding.embedding.weight'])
    assert len(variables['params']['table']) % 64 == 0 != rows % 64
    assert not np.any(variables['params']['table'][rows:])
    assert_written_back(layout, variables, tmp_path / 'ours', arrays)


@pytest.mark.full
def test_engram_v41(reference, tmp_path):
  f = reference('engram_v41_gate')
  arrays = {k: f[k] for k in f if k.startswith('weights/')}
  arrays['weights/embed'] = np.pad(arrays['weights/embed'], ((0, 1), (0, 0)))
  path = official.save(tmp_path / 'official', arrays)
  with jax.enable_x64(True):
    layout = ngram_memories.engram_v41(v41_layer(), np.arange(11) // 2, prefix='weights/')
    variables = layout.load(path, made_with={'vocabulary': 6, 'seed': 0, 'layer': 1})
    params, h = variables['params'], f['hidden_states']
    gate = Gate(None, bias=False, epsilon=1e-6, zero_score='positive', dtype=official.FLOAT64)
    e = params['table'][f['hash_ids']].reshape(1, len(h), -1)
    y, _ = gate.apply({'params': params['gate']}, h[None], e, None)
    assert_close(h + y[0], f['output'], 1e-9)
    assert_norms(variables, f['weights/k_weight'], f['weights/q_weight'])
    assert_written_back(layout, variables, tmp_path / 'ours', arrays)


def save_bytes(path, arrays, codes):
  """Writes a file by hand: the library does not write all dtypes of NumPy."""
  header, end = {}, 0
  for name, array in arrays.items():
    header[name] = {'dtype': codes.get(name, 'F32'), 'shape': array.shape}
    header[name]['data_offsets'] = [end, end := end + array.nbytes]
  text = json.dumps(header).encode()
  data = b''.join(array.tobytes() for array in arrays.values())
  path.write_bytes(struct.pack('<Q', len(text)) + text + data)
  return path


def v41_arrays():
  """Weights of DeepSeek-V4.1."""
  rng, shapes = np.random.default_rng(0), {'embed': (41, 64), 'wkv': (50, 384)}
  shapes |= {'q_weight': (4, 10), 'k_weight': (4, 10)}
  return {name: rng.normal(size=shape).astype('float32') for name, shape in shapes.items()}


MADE_WITH = {'vocabulary': 11, 'seed': 0, 'layer': 1}


def large_longcat():
  """A layer with a table of 16 MB, and random variables."""
  options = official.preset(
    'longcat', orders=(2, 3), heads=2, rows=(2**16,), width=16, row_multiple=8
  )
  layer = NGramMemory(options, 1000, 8)
  rng = np.random.default_rng(0)
  table = rng.normal(size=(*options.table_rows(1000), 16)).astype('float32')
  projection = rng.normal(size=(4, 16, 8)).astype('float32')
  return layer, {'params': {'table': jnp.asarray(table), 'sum': {'projection': projection}}}


def test_no_table_is_whole_in_the_memory_of_the_host(tmp_path, monkeypatch):
  monkeypatch.setattr(row_files, 'BLOCK_BYTES', 2**18)
  layer, variables = large_longcat()
  layout, path = ngram_memories.longcat(layer), tmp_path / 'memory'
  tracemalloc.start()
  try:
    layout.save(variables, path)
    loaded = layout.load(path)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert path.stat().st_size > 16 * 2**20
  assert peak < 2 * 2**20  # 8 ranges of rows
  rows = sum(map(sum, layout.hash.sizes))
  tables = [v['params']['table'][:rows] for v in (loaded, variables)]
  np.testing.assert_array_equal(*tables)


@pytest.mark.full
@pytest.mark.parametrize('axes', [(('model', 'data'), None), ('model', 'data'), (None, None)])
def test_devices_read_their_own_rows(tmp_path, monkeypatch, axes):
  monkeypatch.setattr(row_files, 'BLOCK_BYTES', 20 * 256)
  layer = v41_layer(width=64, row_multiple=8)
  path = tmp_path / 'official'
  numpy.save_file(v41_arrays(), path)
  layout = ngram_memories.engram_v41(layer, np.arange(11))
  whole = layout.load(path, made_with=MADE_WITH)
  reads, read = [], row_files.StoredArray.read

  def record(array, start, stop):
    reads.append((array.shape, stop - start))
    return read(array, start, stop)

  monkeypatch.setattr(row_files.StoredArray, 'read', record)
  mesh = mesh_of(4, model=2)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
  sharded = layout.load(path, made_with=MADE_WITH, sharding=sharding)
  table = sharded['params']['table']
  assert table.sharding == sharding
  np.testing.assert_array_equal(table, whole['params']['table'])
  copies = {(('model', 'data'), None): 1, ('model', 'data'): 4, (None, None): 8}[axes]
  counts = [count for shape, count in reads if shape == (41, 64)]
  assert max(counts) <= 20 and sum(counts) == 41 * copies
  layout.save(jax.device_get(whole), tmp_path / 'whole')
  layout.save(sharded, tmp_path / 'sharded')
  assert (tmp_path / 'whole').read_bytes() == (tmp_path / 'sharded').read_bytes()


def test_tables_in_host_memory_and_of_other_dtypes(tmp_path):
  layer = v41_layer(width=64)
  path = tmp_path / 'official'
  numpy.save_file(v41_arrays(), path)
  layout = ngram_memories.engram_v41(layer, np.arange(11))
  whole = layout.load(path, made_with=MADE_WITH)['params']
  host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind='pinned_host')
  params = layout.load(path, made_with=MADE_WITH, sharding=host, dtype='bfloat16')['params']
  assert params['table'].sharding.memory_kind == 'pinned_host'
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {'bfloat16'}
  expected = np.asarray(whole['table']).astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(np.asarray(params['table']), expected)
  layout.save({'params': params}, tmp_path / 'ours')  # a table of 16 bits, which trains in 32
  assert row_files.stored_arrays(tmp_path / 'ours')[0]['embed'].code == 'BF16'
  again = layout.load(tmp_path / 'ours')['params']
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(again)} == {'float32'}
  np.testing.assert_array_equal(again['table'], expected.astype(np.float32))


def test_values_of_a_table_that_are_not_finite_are_counted(tmp_path):
  arrays = v41_arrays()
  arrays['embed'] = arrays['embed'].copy()
  arrays['embed'][1:3, :2] = np.nan
  numpy.save_file(arrays, tmp_path / 'official')
  layout = ngram_memories.engram_v41(v41_layer(width=64), np.arange(11))
  with pytest.raises(errors.BadInput, match='nan or infinite values, 4 in all, in the table'):
    layout.load(tmp_path / 'official', made_with=MADE_WITH)


def test_another_vocabulary_seed_or_layer_is_refused(reference, tmp_path):
  f = reference('engram_o23_h8')
  classes = f['lookup_table']
  names = [f'layer1/{number}' for number in official.DEMO_NUMBERS]
  path = official.save(tmp_path / 'demo', official.weights(f, 'layer1/weights/', names))
  load = lambda layer, classes=classes, **given: ngram_memories.engram_demo(
    layer, classes, 'layer1/weights/', **given
  )
  m = 'layer1/multipliers is [189840691535365831, 11989825045965581, 89082896236724093] in the file'
  of = 'the weights are of another vocabulary, seed or layer'
  with pytest.raises(errors.BadInput) as error:
    load(official.demo_layer(f, 1, seed=5), hash_prefix='layer1/').load(path)
  assert str(error.value).startswith(m) and 'vocabulary=40, seed=5, layer=1: ' in str(error.value)
  assert str(error.value).endswith(of)
  with pytest.raises(errors.BadInput, match='with vocabulary=39, seed=0, layer=1: the weights are'):
    load(official.demo_layer(f, 1), np.minimum(classes, 38), hash_prefix='layer1/').load(path)
  with pytest.raises(errors.BadInput, match=r'weight is \(2742, 4\), expected \(3430, 4\)'):
    load(official.demo_layer(f, 15)).load(path)

  layout = load(official.demo_layer(f, 1))
  for name, value, ours in (('vocabulary', 41, 40), ('seed', 1, 0), ('layer', 15, 1)):
    with bad_input(
      f'the weights were made with {name}={value}, but the hash of the memory has {name}={ours}: '
      f'it would read other rows'
    ):
      layout.load(path, made_with={name: value})
  with bad_input(
    'the file does not state vocabulary, layer of the hash that its rows are for: give '
    "made_with={'vocabulary': ..., 'layer': ...}, from the config of its model"
  ):
    layout.load(path, made_with={'seed': 0})
  with bad_input("made_with has 'index', expected 'vocabulary', 'seed', 'layer'"):
    layout.load(path, made_with={'index': 0})
  variables = layout.load(path, made_with={'vocabulary': 40, 'seed': 0, 'layer': 1})
  layout.save(variables, tmp_path / 'ours')
  other = load(official.demo_layer(f, 1, seed=5))
  with bad_input(
    'the weights were made with seed=0, but the hash of the memory has seed=5: '
    'it would read other rows'
  ):
    other.load(tmp_path / 'ours')


def test_the_vocabulary_of_longcat_is_that_of_its_embedding(reference, tmp_path):
  f = reference('longcat_n2_k1')
  path = official.save(tmp_path / 'official', official.weights(f, 'weights/'))
  layout = ngram_memories.longcat(official.longcat_layer(f).clone(vocabulary_size=33), 'weights/')
  with bad_input(
    'the weights were made with vocabulary=32, but the hash of the memory has vocabulary=33: '
    'it would read other rows'
  ):
    layout.load(path)


def test_arrays_that_are_not_those_of_the_memory_are_refused(tmp_path):
  arrays, layer = v41_arrays(), v41_layer(width=64)
  layout = ngram_memories.engram_v41(layer, np.arange(11))
  load = lambda arrays, **codes: layout.load(
    save_bytes(tmp_path / 'file', arrays, codes), made_with=MADE_WITH
  )
  changed = {**arrays, 'bias': arrays['k_weight'], 'wkv': arrays['wkv'][:, :320]}
  del changed['q_weight']
  with bad_input(
    '3 arrays do not match the Engram of DeepSeek-V4.1. Check the config against the arrays.\n'
    '  missing: q_weight (4, 10)\n  extra: bias (4, 10)\n'
    '  wrong shape: wkv is (50, 320), expected (50, 384)'
  ):
    load(changed)
  refused = 'embed of the Engram of DeepSeek-V4.1 has the dtype {}, not F64 or F32 or F16 or BF16: '
  # A table of 8 bits has the right shape, but its values are those of the model only with scales.
  in_8_bits = arrays | {
    'embed': np.zeros((41, 64), np.uint8),
    'scales': np.zeros((41, 2), np.uint8),
  }
  with bad_input(refused.format('F8_E4M3') + 'convert its product with its scales to BF16'):
    load(in_8_bits, embed='F8_E4M3', scales='F8_E8M0')
  with bad_input(refused.format('I32') + 'convert it to BF16'):
    load(arrays, embed='I32')
  file = save_bytes(tmp_path / 'file', arrays, {})
  with bad_input(f'{file} and {file} both have embed: load one of them'):
    layout.load([file, file], made_with=MADE_WITH)
  (tmp_path / 'file').write_bytes(b'not a safetensors file')
  with pytest.raises(errors.BadInput, match='cannot be read as safetensors'):
    layout.load(file, made_with=MADE_WITH)
  with bad_input(
    'token_classes has the shape (10,), but vocabulary_size=11: use the classes of the vocabulary '
    'of the layer'
  ):
    ngram_memories.engram_v41(layer, np.arange(10))
  with bad_input('block=3 is not one of options.layers=(1, 14)'):
    ngram_memories.engram_v41(layer.clone(block=3), np.arange(11))
  with bad_input(
    '1 array does not match the Engram of DeepSeek-V4.1. Check the config against the arrays.\n'
    '  wrong shape: table is (0,), expected (41, 64)'
  ):
    layout.save({'params': {}}, tmp_path / 'ours')


def test_presets_have_the_shapes_of_the_checkpoints():
  shapes = {}
  for name, preset, V, D, G in (
    ('longcat', 'longcat', 131_072, 3072, 1),
    ('qwen_ple', 'ple', 248_320, 2560, 1),
    ('engram_demo', 'engram', 129_280, 1024, 4),
    ('engram_v41', 'engram_v41', 129_280, 5120, 4),
  ):
    options = NGramMemoryConfig.from_preset(preset)
    if name == 'qwen_ple':
      options = dataclasses.replace(options, eos_id=0)
    layer = NGramMemory(options, V, D, *options.layers[:1], branches=G)
    shapes |= layout_of(name, layer).shapes()
  assert shapes['embedders.0.weight'] == (10_223_617, 256)
  assert shapes['embedders.11.weight'] == (10_223_639, 256)
  assert shapes['post_projs.11.weight'] == (3072, 256)
  assert shapes['ple_embedding.ngram_embedding.weight'] == (320_001_536, 160)
  assert shapes['multi_head_embedding.embedding.weight'] == (10_344_164, 64)
  assert shapes['embed'] == (384_006_168, 256)
  assert shapes['wkv'] == (25_600, 6144)


def layout_of(name, layer):
  classes = () if name in ('longcat', 'qwen_ple') else (np.arange(layer.vocabulary_size),)
  return getattr(ngram_memories, name)(layer, *classes)


@pytest.mark.parametrize('name', ngram_memories.SUPPORTED_OPTIONS)
def test_options_are_named_or_refused(reference, name):
  layer = {
    'longcat': lambda: official.longcat_layer(reference('longcat_n2_k1')),
    'qwen_ple': lambda: official.qwen_layer(reference('qwen_ple_n4_h1_hc1')),
    'engram_demo': lambda: official.demo_layer(reference('engram_o23_h2_zero'), 2),
    'engram_v41': v41_layer,
  }[name]()
  assert layout_of(name, layer).sources
  free = {
    'orders',
    *ngram_memories.FREE_OPTIONS[name],
    *loader_options.NGRAM_MEMORY_TRAINING_OPTIONS,
  }
  for key in dataclasses.fields(layer.options):
    value, choices = getattr(layer.options, key.name), key.metadata['key'].choices or ()
    allowed = ngram_memories.SUPPORTED_OPTIONS[name].get(key.name, (value,))
    others = [other for other in (*choices, True, 3, 'other') if other not in (*allowed, value)]
    if key.name not in free:
      with pytest.raises(errors.BadInput, match=rf'options\.{key.name}=.* must be .* for these'):
        options = copy.copy(layer.options)
        object.__setattr__(options, key.name, others[0])  # also of a type that is refused
        layout_of(name, layer.clone(options=options))
  with pytest.raises(errors.BadInput, match=r'options\.orders=\(3,\) must be \(2, 3\)'):
    layout_of(name, layer.clone(options=dataclasses.replace(layer.options, orders=(3,))))

  new = ('new_option', int, field(0, 'added after the loader was written'))
  later = dataclasses.make_dataclass('Later', [new], bases=(NGramMemoryConfig,), frozen=True)
  with bad_input('options.new_option=1 must be 0 for these weights'):
    layout_of(name, layer.clone(options=later(**vars(layer.options), new_option=1)))
