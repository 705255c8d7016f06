"""A whole memory equals the official implementations, from ids to output, also in segments."""

import functools
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.interop import ngram_memories
from ngrammer_jax.layers.context import Context, EmbeddingLookup
from ngrammer_jax.layers.ngram import hashing
from ngrammer_jax.layers.ngram.gate import Gate
from ngrammer_jax.layers.ngram.memory import NGramMemory
from tests import official_memories as official
from tests.checks import assert_close, full, random_variables, rest_is_full


def gradients(layer, variables, x, tokens, cotangent):
  """Output, gradients of its product with the cotangent by parameters and x, and intermediates."""
  context = Context(tokens_BxT=jnp.asarray(tokens, jnp.int32))

  @jax.jit
  def function(params, x):
    def loss(params, x):
      all_variables = {**variables, 'params': params}
      (y, _), seen = layer.apply(all_variables, x, context, mutable=['intermediates'])
      return (y * cotangent).sum(), (y, seen)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

  (d_params, d_x), (y, seen) = function(variables['params'], x)
  return y, d_params, d_x, seen.get('intermediates')


def assert_gradient(d_params, layout, path, arrays):
  """Every parameter has its official gradient, which a layout reads as it reads weights."""
  expected = layout.load(official.save(path, arrays))['params']
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-9), d_params, expected)


@pytest.mark.parametrize(
  'name', ['engram_o2_h1', 'engram_o23_h8', full('engram_short'), full('engram_o23_h2_zero')]
)
def test_equals_engram_from_the_ids_on(reference, tmp_path, name):
  f = reference(name)
  with jax.enable_x64(True):
    for number in json.loads(str(f['config']))['layer_ids']:
      path = f'layer{number}'
      layer = official.demo_layer(f, number)
      numbers = [f'{path}/{each}' for each in official.DEMO_NUMBERS]
      arrays = official.weights(f, f'{path}/weights/', numbers)
      layout = ngram_memories.engram_demo(layer, f['lookup_table'], f'{path}/weights/', f'{path}/')
      variables = layout.load(official.save(tmp_path / 'file', arrays))
      h, cotangent = f['hidden_states'], f[f'{path}/cotangent']
      y, d_params, d_h, seen = gradients(layer, variables, h, f['input_ids'], cotangent)
      assert_close(y, h + f[f'{path}/output'], 1e-9)
      assert_close(d_h, cotangent + f[f'{path}/grad/hidden_states'], 1e-9)
      of_weights = {name.replace('/weights/', '/grad/'): name for name in arrays}
      arrays |= {name: f[gradient] for gradient, name in of_weights.items() if gradient in f}
      assert_gradient(d_params, layout, tmp_path / 'gradient', arrays)
      assert_close(seen['gate']['gate'][0], f[f'{path}/gates'], 1e-9)


@pytest.mark.parametrize('name', ['longcat_n2_k1', full('longcat_n3_k2_prime')])
def test_equals_longcat_from_the_ids_on(reference, tmp_path, name):
  f = reference(name)
  with jax.enable_x64(True):
    layer = official.longcat_layer(f)
    path = official.save(tmp_path / 'file', official.weights(f, 'weights/'))
    variables = ngram_memories.longcat(layer, 'weights/').load(path)
    words = f['weights/word_embeddings.weight'][f['input_ids']]
    y, d_params, d_x, _ = gradients(layer, variables, words, f['input_ids'], f['cotangent'])
    assert_close(y, f['output'], 1e-12)
    arrays = official.weights(f, 'grad/')
    assert_gradient(d_params, ngram_memories.longcat(layer, 'grad/'), tmp_path / 'gradient', arrays)
    d_words = np.zeros_like(f['grad/word_embeddings.weight'])
    np.add.at(d_words, f['input_ids'], d_x)
    d_words[layer.options.untrained_row] = 0  # the official code does not train this embedding
    assert_close(d_words, f['grad/word_embeddings.weight'], 1e-12)
    apply, state, parts = jax.jit(layer.apply), layer.empty_state(len(words)), []
    for part in (slice(0, 7), slice(7, 8), slice(8, None)):
      context = Context(tokens_BxT=jnp.asarray(f['input_ids'][:, part], jnp.int32))
      y, state = apply(variables, words[:, part], context, state)
      parts.append(y)
    assert_close(np.concatenate(parts, axis=1), f['output_chunks_7_1_rest'], 1e-12)


@pytest.mark.full
@pytest.mark.parametrize('name', ['qwen_ple_n4_h1_hc1', 'qwen_ple_n2_h4_hc2_short'])
def test_equals_qwen_from_the_ids_on(reference, tmp_path, name):
  f = reference(name)
  with jax.enable_x64(True):
    layer = official.qwen_layer(f)
    path = official.save(tmp_path / 'file', official.weights(f, 'weights/', official.QWEN_NUMBERS))
    variables = ngram_memories.qwen_ple(layer, 'weights/', '').load(path)
    branches = lambda array: array.reshape(*array.shape[:-1], layer.branches, layer.width)
    h, cotangent = branches(f['hidden_states']), branches(f['cotangent'])
    y, d_params, d_h, _ = gradients(layer, variables, h, f['input_ids'], cotangent)
    assert_close(y, h + branches(f['output']), 1e-9)
    assert_close(d_h, cotangent + branches(f['grad/hidden_states']), 1e-9)
    arrays = official.weights(f, 'grad/', official.QWEN_NUMBERS)
    del arrays['grad/hidden_states']
    layout = ngram_memories.qwen_ple(layer, 'grad/', '')
    assert_gradient(d_params, layout, tmp_path / 'gradient', arrays)


@pytest.mark.full
@pytest.mark.parametrize('name', ['blt_hash_2to5_short', 'blt_hash_4x3'])
def test_equals_blt_from_the_bytes_on(reference, name):
  f = reference(name)
  c = json.loads(str(f['config']))
  orders, K = tuple(c['group_sizes']), c['functions']
  options = official.preset('blt', orders=orders, heads=K, rows=(c['rows'],), width=c['dim'])
  # Their tables are ordered by function, then by order.
  number = [j * len(orders) + g for g in range(len(orders)) for j in range(K)]
  tables_of = lambda path: np.concatenate(
    [f[f'{path}/encoder_hash_tok_embedding.{i}.weight'] for i in number]
  )
  with jax.enable_x64(True):
    layer = NGramMemory(options, 257, c['dim'], dtype=jnp.dtype('float64'))
    variables = {'params': {'table': jnp.asarray(tables_of('weights'))}}
    x = f['weights/tok_embeddings.weight'][f['input_ids']]
    y, d_params, *_ = gradients(layer, variables, x, f['input_ids'] - 4, f['cotangent'])
    assert_close(y, f['output'], 1e-12)
    assert_close(d_params['table'], tables_of('grad'), 1e-12)


@pytest.mark.full
def test_tables_of_blt_are_cut_at_three_deviations():
  options = official.preset('blt', orders=(3,), rows=(2000,), width=4)
  ids = Context(tokens_BxT=jnp.zeros((1, 2), jnp.int32))
  layer = NGramMemory(options, 257, 4)
  variables = layer.init(jax.random.key(0), jnp.zeros((1, 2, 4)), ids)
  table = np.asarray(nn.unbox(variables)['params']['table']) / 4**-0.5
  assert 2.9 < np.abs(table).max() <= 3 and table.std() == pytest.approx(0.986, abs=0.02)


def test_padding_has_no_gradient_and_no_key():
  options = NGramMemoryConfig(layers=(0,), heads=2, rows=(19,), width=3, convolution=2, bias=True)
  layer = NGramMemory(options, 11, 4)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 6, 4)).astype('float32')
  tokens, valid = rng.integers(0, 11, (2, 6)), np.arange(6) < [[4], [6]]
  variables = random_variables(layer, x, Context(tokens_BxT=jnp.asarray(tokens)))

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss_and_gradient(params, tokens):
    context = Context(tokens_BxT=jnp.asarray(tokens), valid_BxT=jnp.asarray(valid))
    y, state = layer.apply({'params': params}, x, context)
    return y.sum(), state  # also where padding is

  results = [
    loss_and_gradient(variables['params'], np.where(valid, tokens, other)) for other in (0, 7)
  ]
  jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.full
def test_clusters_of_the_embedding_are_those_of_its_tokens():
  V, D = 7, 8
  rng = np.random.default_rng(0)
  rows, tokens = rng.normal(size=(V, D)).astype('float32'), rng.integers(0, V, (2, 5))
  options = NGramMemoryConfig(
    key='embedding_clusters', clusters=3, layers=(0,), orders=(1,), heads=2, rows=(19,), width=3
  )
  layer = NGramMemory(options, V, D)
  context = Context(
    tokens_BxT=jnp.asarray(tokens),
    vocabulary=EmbeddingLookup(jnp.asarray(rows), jnp.asarray(tokens)),
  )
  x = rng.normal(size=(2, 5, D)).astype('float32')
  variables = random_variables(layer, x, context)
  y, state = jax.jit(layer.apply)(variables, x, context)
  assert state is None
  # Equal tokens in equal streams have equal outputs; the clusters do not depend on x.
  centroids = np.asarray(variables['codebook']['quantizer']['centroids'])
  heads = rows[tokens].reshape(2, 5, 2, 1, D // 2)
  clusters = ((heads - centroids) ** 2).sum(axis=-1).argmin(axis=-1)
  sizes = options.hashes(V)[0].sizes[0]
  row = hashing.NGramHash(**vars(options.hashes(V)[0]))([jnp.asarray(clusters, jnp.int32)])
  table = np.asarray(variables['params']['table'])
  e = np.stack([table[row[..., 0]], table[sizes[0] + row[..., 1]]], axis=-2).reshape(2, 5, -1)

  gated, _ = Gate(None, bias=False).apply(
    {'params': variables['params']['gate']}, x[:, :, None], e, None
  )
  assert_close(y, x + gated[:, :, 0], 1e-5)


# One for each key and join, with a control or a boundary.
SPLIT = {
  'tokens': dict(layers=(0,), convolution=3, bias=True),
  'end of sentence': dict(layers=(0,), convolution=2, boundary='eos_id', eos_id=3, hash='ple'),
  'compressed': dict(layers=(0,), key='compressed', orders=(1, 3)),
  'bytes': dict(join='sum', key='bytes', hash='blt', width=8, displacement=2),
  'clusters': dict(layers=(0,), key='clusters', clusters=4, convolution=2, gate='half'),
  'embedding clusters': dict(layers=(0,), key='embedding_clusters', clusters=4, orders=(4,)),
  'mean': dict(join='mean', hash='polynomial', projection=True, amplification='norm'),
  'concat': dict(join='concat', key='clusters', hash='praxis', row_rule='exact', width=2),
  'add': dict(join='add', key='embedding_clusters', width=4),
  'no boundary': dict(layers=(0,), boundary='none', convolution=2),
}


@pytest.mark.parametrize('name', rest_is_full(SPLIT, ('tokens',)))
def test_segments_equal_one_pass_and_documents_are_apart(name):
  """Rows are the same stream: in one pass, in segments, one by one, and its last document alone."""
  options = NGramMemoryConfig(**dict(heads=2, rows=(11,), width=3) | SPLIT[name])
  T, V, D, last = 8, 13, 8, 5
  rng = np.random.default_rng(0)
  embedding, tokens = rng.normal(size=(V, D)), rng.integers(0, V, T)
  starts = np.arange(T) == last
  lengths = [[T] + [0] * 7, [3, 0, 4, 1, 0, 0, 0, 0], [1] * T, [0] * T]
  noise = rng.normal(size=(T, D))
  with jax.enable_x64(True):
    layer = NGramMemory(options, V, D, dtype=jnp.dtype('float64'))
    step = jax.jit(layer.apply)
    state = layer.empty_state(4)
    rows, document = np.array(lengths), starts.cumsum()
    rows[3, 0] = T - last
    begin = np.array([0, 0, 0, last])
    outputs, variables = np.zeros((4, T, D)), None
    for i in range(T):
      place = begin[:, None] + np.arange(T)
      valid = np.arange(T) < rows[:, i, None]
      at = np.minimum(place, T - 1)
      ids = np.where(valid, tokens[at], V - 1)
      x = embedding[ids] + noise[at]
      context = Context(
        tokens_BxT=jnp.asarray(ids, jnp.int32),
        starts_BxT=jnp.asarray(starts[at] & valid),
        documents_BxT=jnp.asarray(document[at], jnp.int32),
        valid_BxT=jnp.asarray(valid, jnp.int32),
        vocabulary=EmbeddingLookup(jnp.asarray(embedding), jnp.asarray(ids, jnp.int32)),
      )
      if variables is None:
        variables = random_variables(layer, x, context, dtype='float64')
      y, state = step(variables, x, context, state)
      row, column = np.nonzero(valid)
      outputs[row, place[valid]] = np.asarray(y)[row, column]
      begin = begin + rows[:, i]
  for split in outputs[1:3]:
    assert_close(split, outputs[0], 1e-10)
  is_apart = np.abs(outputs[3] - outputs[0])[last:].max() < 1e-10
  assert is_apart == (options.boundary != 'none')


def test_what_a_memory_cannot_read_is_named():
  options = NGramMemoryConfig(layers=(1,), heads=1, rows=(11,), width=2)
  x, tokens = np.zeros((1, 2, 8), 'float32'), Context(tokens_BxT=jnp.zeros((1, 2), jnp.int32))
  for fields, x_input, context, error in (
    ({'block': 0}, x, tokens, r'block 0 is not among the layers \(1,\) of the memory'),
    ({'block': 1}, x, Context(), 'an n-gram memory needs the tokens: set context.tokens_BxT'),
    ({'block': 1}, x[..., :4], tokens, r'shape \[1, 2, 4\]: expected hidden states \[B, T, 8\]'),
    ({'block': 1}, x.reshape(1, 2, 2, 4), tokens, r'expected hidden states \[B, T, 8\]'),
    ({'block': 1, 'branches': 2}, x, tokens, r'\[B, T, 2, 8\] for branches=2 and width=8'),
    ({'block': 1}, x[:, :1], tokens, r'tokens_BxT has the shape \[1, 2\], but .* \[1, 1\] of the'),
    ({'block': 1}, x, Context(jnp.zeros(2, jnp.int32)), r'pass the token ids \[1, 2\] of the same'),
  ):
    with pytest.raises(ValueError, match=error):
      NGramMemory(options, 5, 8, **fields).init(jax.random.key(0), x_input, context)


def test_branches_of_a_residual_stream_need_a_gate():
  options = NGramMemoryConfig(layers=1, join='sum', heads=1, rows=11, width=8)
  memory = NGramMemory(options, 5, 8, block=1, branches=2)
  context = Context(jnp.zeros((1, 2), jnp.int32))
  with pytest.raises(ValueError, match='branches=2 needs join="gate", not join=\'sum\''):
    memory.init(jax.random.key(0), np.zeros((1, 2, 2, 8), 'float32'), context)


@pytest.mark.parametrize(
  ('options', 'error'),
  [
    ({'key': 'token'}, "key='token' is not one of: tokens, compressed"),
    ({'join': 'gates'}, "join='gates' is not one of: gate, product"),
    ({'rows': 0}, r'rows=\(0,\): 0 must be at least 1'),
  ],
)
def test_invalid_options_are_refused_as_in_a_config(options, error):
  memory = NGramMemory(NGramMemoryConfig(layers=1, **options), 5, 8, block=1)
  context = Context(jnp.zeros((1, 2), jnp.int32))
  with pytest.raises(errors.BadInput, match=error):
    memory.init(jax.random.key(0), np.zeros((1, 2, 8), 'float32'), context)


@pytest.mark.parametrize('options', ['engram', {'preset': 'engram'}])
def test_options_of_another_type_are_refused(options):
  memory = NGramMemory(options, 5, 8, block=1)
  context = Context(jnp.zeros((1, 2), jnp.int32))
  with pytest.raises(TypeError, match="pass NGramMemoryConfig\\(preset='engram'"):
    memory.init(jax.random.key(0), np.zeros((1, 2, 8), 'float32'), context)


@pytest.mark.parametrize(
  ('other', 'name'),
  [({'orders': (2, 3, 4)}, 'window'), ({'convolution': 3}, 'rows'), ({'convolution': 0}, 'rows')],
)
def test_a_state_of_other_options_is_refused(other, name):
  values = {'layers': 1, 'heads': 1, 'rows': 11, 'width': 2, 'convolution': 2}
  state = NGramMemory(NGramMemoryConfig(**(values | other)), 5, 8, block=1).empty_state(1)
  memory = NGramMemory(NGramMemoryConfig(**values), 5, 8, block=1)
  context = Context(jnp.zeros((1, 2), jnp.int32))
  with pytest.raises(ValueError, match=rf"has '{name}' of the shape .* but its options need"):
    memory.init(jax.random.key(0), np.zeros((1, 2, 8), 'float32'), context, state)
