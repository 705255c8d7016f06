"""Compares layers and models with arrays of praxis, in float64 and float32."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.interop import praxis
from ngrammer_jax.layers import Attention, NGrammer
from ngrammer_jax.layers.attention import attention, position
from ngrammer_jax.layers.context import Context, Keys, Positions
from ngrammer_jax.models import language_model, transformer
from tests.checks import assert_close, assert_same_arrays, bad_input, missing_arrays, with_scan

pytestmark = pytest.mark.usefixtures('all_shown')

PRECISIONS = [('float64', 1e-9), ('float32', 2e-5)]


def praxis_layer_arrays(f, dtype):
  """Returns the stacked arrays of a reference file under their praxis names."""
  arrays = {'non_trainable/vq_layer/means': f['means'].astype(dtype)}
  for i in range(4):
    for name, praxis_name in (('emb_ln', 'emb_layer_norm'), ('ngram_ln', 'ngram_layer_norm')):
      for part in ('scale', 'bias'):
        path = f'params/ngram_layer/{praxis_name}_{i}/{part}'
        arrays[path] = f[f'param/{name}_{part}'][i].astype(dtype)
    arrays[f'params/ngram_layer/ngram_table_{i}/emb_var'] = f['param/table'][i].astype(dtype)
  return arrays


FLOAT64_AND_SLOW_FLOAT32 = [PRECISIONS[0], pytest.param(*PRECISIONS[1], marks=pytest.mark.slow)]


@pytest.mark.full
@pytest.mark.parametrize('dtype, tolerance', FLOAT64_AND_SLOW_FLOAT32)
def test_ngrammer_layer(reference, dtype, tolerance):
  f = reference('ng_layer_concat_E4')
  with jax.enable_x64(dtype == 'float64'):
    layer = NGrammer(
      heads=4,
      clusters=16,
      vocabulary_size=100,
      dim=4,
      dtype=jnp.dtype(dtype),
      prenormalize=bool(f['cfg/prenorm']),
    )
    variables = praxis.load_ngrammer(praxis_layer_arrays(f, dtype), layer, width=32)
    if dtype == 'float64':
      arrays = praxis_layer_arrays(f, dtype)
      assert_same_arrays(praxis.export_ngrammer(variables, layer, 32), arrays, 1e-15)
    x = f['x'].astype(dtype)

    def weighted_sum(params, x, documents, valid):
      (y, _), state = layer.apply(
        {**variables, 'params': params},
        x,
        mutable=['codebook'],
        documents_BxT=documents,
        valid_BxT=valid,
      )
      return (y * f['cot'].astype(dtype)).sum(), (y, state)

    compute_gradients = jax.jit(jax.grad(weighted_sum, argnums=(0, 1), has_aux=True))
    for case in ('plain', 'pad', 'seg', 'padseg'):
      starts, valid = f['segment_pos'] == 0, 1 - f['paddings'].astype(dtype)
      documents = np.cumsum(starts if 'seg' in case else 0 * starts, axis=1)
      valid = valid if 'pad' in case else np.ones_like(valid)
      gradients, (y, state) = jax.device_get(
        compute_gradients(variables['params'], x, documents, valid)
      )
      assert_close(y, f[f'out/{case}'], tolerance)
      centroids = state['codebook']['quantizer']['centroids']
      assert_close(centroids, f[f'means_after/{case}'], tolerance)
      assert_close(gradients[1], f[f'grad/{case}/x'], tolerance)
      table = gradients[0]['table'].reshape(4, 100, 4)
      assert_close(table, f[f'grad/{case}/table'], tolerance)
      for name, reference_name in (('unigram_norm', 'emb_ln'), ('ngram_norm', 'ngram_ln')):
        for part in ('scale', 'bias'):
          expected = f[f'grad/{case}/{reference_name}_{part}']
          assert_close(gradients[0][name][part], expected, tolerance)
      if case == 'plain':  # rows that were not looked up get no gradient
        is_used = np.zeros((4, 100), bool)
        for head in range(4):
          is_used[head, f['row/plain'][..., head].reshape(-1)] = True
        assert (np.abs(table).sum(axis=-1) > 0).tolist() == is_used.tolist()


LM_CONFIG = {
  'layers': 2,
  'width': 16,
  'heads': 2,
  'feed_forward_width': 24,
  'bias': True,
  'per_dim_scale': True,
  'scan_layers': False,
}


@pytest.mark.parametrize('dtype, tolerance, scan', with_scan(PRECISIONS))
def test_language_model(reference, dtype, tolerance, scan):
  f = reference('lm_plain')
  with jax.enable_x64(dtype == 'float64'):
    config = model_config.ModelConfig(**LM_CONFIG | {'dtype': dtype, 'scan_layers': scan})
    model = transformer.TransformerLM(config, vocabulary_size=23)
    arrays = {k: v.astype(dtype) for k, v in f.items() if k.startswith('param/')}
    variables = praxis.load_language_model(arrays, config, 23)
    memory = jax.jit(lambda: language_model.empty_memory(config, 3))()

    def loss(params, weights, valid, starts):
      (hidden, _, _), captured = model.apply(
        {'params': params},
        f['ids'],
        memory,
        mutable=['intermediates'],
        capture_intermediates=True,
        valid_BxT=valid,
        starts_BxT=starts,
      )
      scores = model.apply({'params': params}, hidden, f['labels'], method='scores')
      logits = model.apply({'params': params}, hidden, method='logits')
      total = (scores.nll_BxT * weights).sum()
      return total / (weights.sum() + 1e-6), (hidden, logits, scores.nll_BxT, captured)

    compute_gradient = jax.jit(jax.grad(loss, has_aux=True))
    for case in ('plain', 'pad', 'packed'):
      weights, shape = f[f'{case}/weights'].astype(dtype), f['ids'].shape
      valid = np.ones(shape) if case == 'plain' else 1 - f[f'{case}/paddings']
      starts = f['packed/segment_pos'] == 0 if case == 'packed' else np.zeros(shape, bool)
      gradient, (hidden, logits, nll, captured) = jax.device_get(
        compute_gradient(variables['params'], weights, valid.astype(dtype), starts)
      )
      has_weight = weights > 0
      for output, name in ((hidden, 'final_ln'), (logits, 'logits'), (nll, 'xent')):
        assert_close(output[has_weight], f[f'{case}/{name}'][has_weight], tolerance)
      for i in range(0 if scan else 2):
        layer = captured['intermediates'][f'layer_{i}']
        ((block, *_),), ((attended, _),) = layer['__call__'], layer['attention']['__call__']
        (probs,) = layer['attention']['probs']
        # At padding too: praxis trains the codebooks after attention with it.
        assert_close(block, f[f'{case}/layer_out/{i}'], tolerance)
        assert_close(attended, f[f'{case}/attn_out/{i}'], tolerance)
        expected = f[f'{case}/probs/{i}'].swapaxes(1, 2)[has_weight]
        assert_close(probs.swapaxes(1, 2)[has_weight], expected, tolerance)
      if case != 'plain':
        arrays = {k.split('/grad/')[1]: v for k, v in f.items() if f'{case}/grad/' in k}
        # Gradients have the shapes of parameters. The loader adds 1 to each scale; undo that.
        expected = jax.device_get(praxis.load_language_model(arrays, config, 23)['params'])
        expected = jax.tree_util.tree_map_with_path(
          lambda path, g: g - 1 if path[-1].key == 'scale' else g, expected
        )
        jax.tree.map(lambda a, b: assert_close(a, b, tolerance), gradient, expected)


def test_all_mismatches_are_listed(reference):
  f = reference('lm_plain')
  arrays = {k: v for k, v in f.items() if k.startswith('param/')}
  arrays['param/surplus'] = np.zeros(3)
  del arrays['param/final_ln/bias']
  arrays['param/final_ln/scale'] = np.zeros(15)
  with pytest.raises(errors.BadInput) as error:
    praxis.load_language_model(arrays, model_config.ModelConfig(**LM_CONFIG), 23)
  assert str(error.value) == (
    '3 arrays do not match a praxis language model. Check the config against the arrays.\n'
    '  missing: final_ln/bias (16,)\n'
    '  extra: surplus (3,)\n'
    '  wrong shape: final_ln/scale is (15,), expected (16,)'
  )


def random_arrays(shapes):
  draw = np.random.RandomState(0).normal
  return {name: draw(size=shape) for name, shape in shapes.items()}


def ngrammer_shapes(prefix, heads=2, H=8, V=50, E=8):
  shapes = {}
  for i in range(heads):
    for part in ('scale', 'bias'):
      shapes[f'{prefix}emb_layer_norm_{i}/{part}'] = (H,)
      shapes[f'{prefix}ngram_layer_norm_{i}/{part}'] = (E,)
    shapes[f'{prefix}ngram_table_{i}/emb_var'] = (V, E)
  return shapes


@pytest.mark.full
@pytest.mark.parametrize('prefix', ['', 'params/ngram_layer/'])
def test_layer_without_clusters_is_loaded(prefix):
  """Names of an Ngrammer and of the Ngrammer inside a VQNgrammer."""
  layer = NGrammer(heads=2, clusters=None, vocabulary_size=50, dim=8, id_vocabulary=23)
  arrays = random_arrays(ngrammer_shapes(prefix))
  variables = praxis.load_ngrammer(arrays, layer, width=16)
  x, ids = np.ones((1, 5, 16), 'float32'), np.arange(5)[None]
  y, _ = jax.jit(layer.apply)(variables, x, ids=ids)
  assert y.shape == (1, 5, 16) and np.isfinite(y).all()
  params = jax.device_get(variables['params'])
  second_head = arrays[f'{prefix}ngram_table_1/emb_var'].astype(np.float32)
  np.testing.assert_array_equal(params['table'][50:], second_head)
  gamma = 1 + arrays[f'{prefix}emb_layer_norm_1/scale'].astype(np.float32)
  np.testing.assert_allclose(params['unigram_norm']['scale'][1], gamma, rtol=1e-6)


@pytest.mark.full
def test_untied_language_model_with_ngram_layer(x64):
  """Compares with NumPy code: sinusoids, ReLU without gate, no biases except in the softmax."""
  ngram = model_config.NGramConfig(clusters=8, vocabulary_size=50, dim=8, combine='add')
  config = model_config.ModelConfig(
    **LM_CONFIG
    | {'layers': 1, 'bias': False, 'gated': False, 'activation': 'relu', 'position': 'sinusoid'}
    | {'tie_embeddings': False, 'scale_embeddings': False, 'dtype': 'float64', 'ngram': ngram}
  )
  attention, feed = (f'param/transformer/x_layers_0/{n}/' for n in ('self_attention', 'ff_layer'))
  shapes = ngrammer_shapes('param/ngrammer/ngram_layer/')
  shapes |= {f'{attention}{name}/w': (16, 2, 8) for name in ('query', 'key', 'value', 'post')}
  shapes |= {
    'state/ngrammer/vq_layer/means': (2, 8, 8),
    'state/ngrammer/input_id_to_cluster_id_cache': (23, 2),
    'param/embedding_lookup/emb_var': (23, 16),
    'param/softmax/logits_ffn/linear/w': (16, 23),
    'param/softmax/logits_ffn/bias/b': (23,),
    f'{attention}per_dim_scale/per_dim_scale': (8,),
    f'{feed}ffn_layer1/linear/w': (16, 24),
    f'{feed}ffn_layer2/linear/w': (24, 16),
  }
  norms = ('param/final_ln', 'param/transformer/x_layers_0/layer_norm', f'{feed}layer_norm')
  shapes |= {f'{name}/{part}': (16,) for name in norms for part in ('scale', 'bias')}
  a = random_arrays(shapes)
  variables = praxis.load_language_model(a, config, 23)
  tokens = np.random.RandomState(1).randint(0, 23, (2, 7))
  model = transformer.TransformerLM(config, 23)

  @jax.jit
  def compute_logits(variables, memory):
    hidden, _, _ = model.apply(variables, tokens, memory)
    return model.apply(variables, hidden, method='logits')

  logits = compute_logits(variables, language_model.empty_memory(config, 2))

  def norm(x, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * (1 + a[f'{name}/scale']) + a[f'{name}/bias']

  layer = NGrammer(heads=2, clusters=8, vocabulary_size=50, dim=8, combine='add', dtype='float64')
  layer_arrays = {k.replace('ngrammer/', ''): v for k, v in a.items() if '/ngrammer/' in k}
  loaded = praxis.load_ngrammer(layer_arrays, layer, width=16)
  embedded = a['param/embedding_lookup/emb_var'][tokens]
  x = np.asarray(jax.jit(layer.apply)(loaded, embedded)[0])
  angle = np.arange(7)[:, None] * np.exp(-np.arange(8) * np.log(10_000) / 7)
  x = x + np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
  normed = norm(x, norms[1])
  q, k, v = (
    np.einsum('btd,dnh->btnh', normed, a[f'{attention}{n}/w']) for n in ('query', 'key', 'value')
  )
  scale = 1.442695041 / 8**0.5 * np.log1p(np.exp(a[f'{attention}per_dim_scale/per_dim_scale']))
  scores = np.einsum('btnh,bsnh->bnts', q * scale, k)
  scores = np.where(np.tril(np.ones((7, 7), bool)), scores, -np.inf)
  probs = np.exp(scores - scores.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  context = np.einsum('bnts,bsnh->btnh', probs, v)
  x = x + np.einsum('btnh,dnh->btd', context, a[f'{attention}post/w'])
  inner = np.maximum(norm(x, norms[2]) @ a[f'{feed}ffn_layer1/linear/w'], 0)
  x = x + inner @ a[f'{feed}ffn_layer2/linear/w']
  expected = norm(x, norms[0]) @ a['param/softmax/logits_ffn/linear/w']
  expected = expected + a['param/softmax/logits_ffn/bias/b']
  assert_close(logits, expected, 1e-9)


@pytest.mark.parametrize('place', ['begin', 'middle', 'end'])
def test_an_ngram_layer_between_blocks_has_the_names_of_one_at_the_input(place):
  def load(arrays, layer):
    ngram = model_config.NGramConfig(clusters=8, vocabulary_size=50, dim=4, layer=layer)
    config = model_config.ModelConfig(**LM_CONFIG | {'ngram': ngram})
    return praxis.load_language_model(arrays, config, 23)

  with pytest.raises(errors.BadInput) as error:
    load({}, 'input')
  arrays = missing_arrays(error.value)
  assert 'ngrammer/vq_layer/means' in arrays
  jax.tree.map(np.testing.assert_array_equal, load(arrays, place), load(arrays, 'input'))


@pytest.mark.full
def test_praxis_names_of_ngrammers_after_attention():
  ngram = model_config.NGramConfig(
    clusters=8, vocabulary_size=50, dim=4, layer='attention', pairing=('previous', 'attended')
  )
  config = model_config.ModelConfig(**LM_CONFIG | {'ngram': ngram})
  with pytest.raises(errors.BadInput) as error:
    praxis.load_language_model({}, config, 23)
  for i in range(2):
    prefix = f'transformer/x_layers_{i}/self_attention/ngrammer/'
    for name in (
      'vq_layer/means (2, 8, 8)',
      'ngram_layer/ngram_table_1/emb_var (50, 4)',
      'ngram_layer/emb_layer_norm_0/scale (8,)',
    ):
      assert f'missing: {prefix}{name}\n' in f'{error.value}\n'
  # The missing names are exactly those of the variables of the model, and of what is exported.
  arrays = missing_arrays(error.value)
  variables = praxis.load_language_model(arrays, config, 23)
  model = transformer.TransformerLM(config, 23)
  tokens, memory = np.zeros((1, 3), np.int32), language_model.empty_memory(config, 1)
  expected = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), tokens, memory)))
  get_shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
  assert get_shapes(variables) == get_shapes(expected)
  exported = praxis.export_language_model(variables, config, 23)
  collection = lambda name: 'non_trainable' if 'means' in name else 'params'
  assert_same_arrays(exported, {f'{collection(name)}/{name}': a for name, a in arrays.items()})
  means = arrays['transformer/x_layers_1/self_attention/ngrammer/vq_layer/means']
  loaded = variables['codebook']['layer_1']['ngrammer']['quantizer']['centroids']
  assert_close(loaded, means.astype('float32'), 1e-6)


def test_a_layer_that_does_not_fit_its_inputs_is_refused():
  layer = NGrammer(heads=2, clusters=4, vocabulary_size=50, dim=4, combine='add')
  with bad_input(
    'the layer does not fit inputs of width 16: combine "add" needs n-gram dim 4 to equal the head '
    'width 8'
  ):
    praxis.load_ngrammer({}, layer, width=16)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(reference, value):
  arrays = {k: v for k, v in reference('lm_plain').items() if k.startswith('param/')}
  arrays['param/final_ln/bias'] = np.full_like(arrays['param/final_ln/bias'], value)
  with bad_input(
    'a praxis language model has nan or infinite values, 16 in all, in final_ln/bias '
    '(16): the source is damaged, or its training diverged; load an earlier checkpoint'
  ):
    praxis.load_language_model(arrays, model_config.ModelConfig(**LM_CONFIG), 23)


def test_attention_alone(x64, reference):
  """The first attention of the language model, on the normed embeddings."""
  f, prefix = reference('lm_plain'), 'param/transformer/x_layers_0/self_attention/'
  arrays = {k.replace(prefix, 'params/'): v for k, v in f.items() if k.startswith(prefix)}
  projections = attention.Projections(bias=True, per_dim_scale=True)
  layer = Attention(heads=2, projections=projections, dtype=jnp.float64)
  variables = praxis.load_attention(arrays, layer, 16)
  norm = 'param/transformer/x_layers_0/layer_norm'
  x = f['plain/emb']
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  x, T = x * (1 + f[f'{norm}/scale']) + f[f'{norm}/bias'], x.shape[1]

  @jax.jit
  def run(x):
    rotation = position.rotation(jnp.arange(T), 8, dtype=jnp.float64)
    visible = jnp.broadcast_to(jnp.tri(T, dtype=bool), (len(x), T, T))
    return layer.apply(
      variables, x, Context(keys=Keys(visible), positions=Positions(rotation=rotation))
    )[0]

  assert_close(run(x), f['plain/attn_out/0'], 1e-9)
  assert_same_arrays(praxis.export_attention(variables, layer, 16), arrays, 0)
  layer = layer.clone(projections=attention.Projections(taps=2, shared_query_key=True))
  with bad_input('projections.shared_query_key=True must be False for these weights'):
    praxis.load_attention({}, layer, 16)
  layer = layer.clone(projections=attention.Projections(taps=2))
  with pytest.raises(errors.BadInput) as error:
    praxis.load_attention({}, layer, 16)
  arrays = missing_arrays(error.value)
  assert arrays['dconv_q/dconv_1'].shape == (2, 8) and len(arrays) == 4 + 3 * 2
  exported = praxis.export_attention(praxis.load_attention(arrays, layer, 16), layer, 16)
  assert_same_arrays(exported, {f'params/{name}': array for name, array in arrays.items()}, 0)


NGRAM = model_config.NGramConfig(clusters=8, vocabulary_size=50, dim=4)
LAYER = 'transformer/x_layers_0/'
TABLE = 'ngrammer/ngram_layer/ngram_table_0/emb_var'
# Other values of options, and how an array shows each.
OTHER_VALUES = [
  ({'layers': 3}, 'missing: transformer/x_layers_2/layer_norm/scale (16,)'),
  ({'width': 24}, 'wrong shape: final_ln/scale is (16,), expected (24,)'),
  ({'heads': 4}, f'wrong shape: {LAYER}self_attention/query/w is (16, 2, 8), expected (16, 4, 4)'),
  (
    {'feed_forward_width': 48},
    f'wrong shape: {LAYER}ff_layer/ffn_layer1/linear/w is (16, 24), expected (16, 48)',
  ),
  ({'gated': False}, f'extra: {LAYER}ff_layer/ffn_layer1_gate/linear/w (16, 24)'),
  ({'bias': False}, f'extra: {LAYER}self_attention/query/b (2, 8)'),
  ({'per_dim_scale': False}, f'extra: {LAYER}self_attention/per_dim_scale/per_dim_scale (8,)'),
  ({'convolution': 3}, f'missing: {LAYER}self_attention/dconv_q/dconv_2 (2, 8)'),
  ({'norm': 'hybrid'}, f'missing: {LAYER}pre_layer_norm/scale (16,)'),
  ({'tie_embeddings': False}, 'missing: embedding_lookup/emb_var (23, 16)'),
  ({'softmax_bias': False}, 'extra: softmax/logits_ffn/bias/b (23,)'),
  ({'ngram': None}, f'extra: {TABLE} (50, 4)'),
  ({'ngram': dataclasses.replace(NGRAM, layer='attention')}, f'extra: {TABLE} (50, 4)'),
  (
    {'ngram': dataclasses.replace(NGRAM, clusters=16)},
    'wrong shape: ngrammer/vq_layer/means is (2, 8, 8), expected (2, 16, 8)',
  ),
  (
    {'ngram': dataclasses.replace(NGRAM, vocabulary_size=60)},
    f'wrong shape: {TABLE} is (50, 4), expected (60, 4)',
  ),
  (
    {'ngram': dataclasses.replace(NGRAM, dim=2)},
    f'wrong shape: {TABLE} is (50, 4), expected (50, 2)',
  ),
  (
    {'ngram': dataclasses.replace(NGRAM, heads=4)},
    'missing: ngrammer/ngram_layer/ngram_table_2/emb_var (50, 4)',
  ),
]


@pytest.mark.parametrize('changes, line', OTHER_VALUES)
def test_arrays_of_another_option_are_refused_by_name(changes, line):
  load = lambda arrays, changes: praxis.load_language_model(
    arrays, model_config.ModelConfig(**LM_CONFIG | {'ngram': NGRAM} | changes), 23
  )
  with pytest.raises(errors.BadInput) as error:
    load({}, {})
  arrays = missing_arrays(error.value)
  with pytest.raises(errors.BadInput) as error:
    load(arrays, changes)
  assert f'  {line}' in str(error.value).splitlines()
