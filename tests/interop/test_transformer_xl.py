"""Equality with arrays computed by the PyTorch Transformer-XL, in float64 and float32."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.interop import transformer_xl
from ngrammer_jax.layers import relative
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.checks import assert_close

PRECISIONS = [('float64', 1e-9), ('float32', 1e-4)]


def test_shift_and_encodings(reference):
  f = reference('xl_rel_shift')
  shifted = np.asarray(jax.jit(relative.shift)(f['x'][None, None]))[0, 0]
  T, S = f['x'].shape
  seen = np.tril(np.ones((T, S), bool), S - T)
  assert_close(np.where(seen, shifted, 0), np.where(seen, f['shifted'], 0), 1e-6)
  f = reference('xl_sinusoid')
  assert f['pos'].tolist() == list(range(15, -1, -1))
  with jax.enable_x64(True):
    encodings = jax.jit(lambda: relative.encodings(16, 16, dtype=jnp.float64))()
    assert_close(encodings, f['emb'] - f['emb'][-1], 1e-12)


def config_of(f, dtype, **fields):
  memory = model_config.MemoryConfig(length=int(f['cfg/mem_len']))
  clamp = int(f['cfg/clamp_len'])
  sizes = {
    'layers': int(f['cfg/n_layer']),
    'width': int(f['cfg/d_model']),
    'heads': int(f['cfg/n_head']),
    'feed_forward_width': int(f['cfg/d_inner']),
    'positional': model_config.PositionalConfig(clamp_length=clamp if clamp > 0 else None),
  }
  switches = transformer_xl.SWITCHES | sizes | {'memory': memory, 'dtype': dtype} | fields
  return model_config.ModelConfig(**switches)


def parameters(f, prefix, dtype):
  return {k.removeprefix(prefix): v.astype(dtype) for k, v in f.items() if k.startswith(prefix)}


def segments_of_a_stream(f, dtype, tolerance, scan=False):
  with jax.enable_x64(dtype == 'float64'):
    config = config_of(f, dtype, scan_layers=scan)
    V = int(f['cfg/V'])
    model = transformer.TransformerLM(config, V)
    variables = transformer_xl.load_language_model(parameters(f, 'param/', dtype), config, V)
    memory = jax.jit(lambda: transformer.empty_memory(config, int(f['cfg/B'])))()

    def loss(params, memory, x, y):
      given = {'params': params}
      (hidden, memory, _), probed = model.apply(given, x, memory, mutable=['intermediates'])
      scores = model.apply(given, hidden, y, method='scores')
      log_probs = model.apply(given, hidden, method='log_probs')
      return scores.nll_BxT.mean(), (hidden, memory, scores.nll_BxT, log_probs, probed)

    program = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for s in range(int(f['cfg/n_seg'])):
      (value, (hidden, memory, nll, log_probs, probed)), gradient = jax.device_get(
        program(variables['params'], memory, f[f'x/{s}'].T, f[f'y/{s}'].T)
      )
      assert_close(value, f[f'loss/{s}'], tolerance)
      assert_close(hidden.swapaxes(0, 1), f[f'hidden/{s}'], tolerance)
      assert_close(nll.T, f[f'nll/{s}'], tolerance)
      assert_close(log_probs.swapaxes(0, 1), f[f'logprob/{s}'], tolerance)
      for i in range(config.layers):
        there = f[f'mems_out/{s}/{i}']
        assert_close(memory['layers'][i]['hidden'].swapaxes(0, 1)[-len(there) :], there, tolerance)
        if not scan:
          (probs,) = probed['intermediates'][f'layer_{i}']['attention']['probs']
          there = f[f'attn_prob/{s}/{i}']
          assert_close(probs.transpose(2, 3, 0, 1)[:, -there.shape[1] :], there, tolerance)
    expected = transformer_xl.load_language_model(parameters(f, 'grad/', dtype), config, V)
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance), gradient, expected['params'])


def test_segments_of_a_stream(reference):
  segments_of_a_stream(reference('xl_base'), *PRECISIONS[0])


@pytest.mark.slow
@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('dtype, tolerance', PRECISIONS)
def test_segments_of_a_stream_scanned_and_in_float32(reference, dtype, tolerance, scan):
  segments_of_a_stream(reference('xl_base'), dtype, tolerance, scan)


def names_of(config, V):
  """What a Transformer-XL of the config is made of, as the error for an empty one lists it."""
  with pytest.raises(errors.BadInput) as caught:
    transformer_xl.load_language_model({}, config, V)
  listed = [line.split(': ')[1] for line in str(caught.value).splitlines()[1:]]
  return {line.split(' ')[0]: eval(line.split(' ', 1)[1]) for line in listed}


VARIANTS = {
  'pre-norm': {'norm': 'pre'},
  'biases of each layer': {'positional': model_config.PositionalConfig(shared_biases=False)},
  'learned distances': {
    'position': 'shaw',
    'positional': model_config.PositionalConfig(max_length=8),
  },
  'sinusoids': {'position': 'segment_sinusoid', 'memory': None},
  'learned positions': {
    'position': 'learned',
    'positional': model_config.PositionalConfig(max_length=8),
    'memory': None,
  },
  'narrow embedding': {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig(embedding_width=8)},
  'adaptive': {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig((6, 12))},
  'adaptive, divided': {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig((6, 12), 2)},
  'adaptive, nothing tied': {
    'adaptive_softmax': model_config.AdaptiveSoftmaxConfig((6, 12), 2, tied_projections=(False,)),
    'tie_embeddings': False,
  },
}


@pytest.mark.parametrize('variant', VARIANTS)
def test_all_names_of_a_variant_make_all_variables(reference, variant):
  f = reference('xl_base') | {'cfg/clamp_len': -1}
  fields = {'positional': None} | VARIANTS[variant]
  config, V = config_of(f, 'float32', **fields), 23
  shapes, rng = names_of(config, V), np.random.default_rng(0)
  arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
  variables = transformer_xl.load_language_model(arrays, config, V)
  model, tokens = transformer.TransformerLM(config, V), np.zeros((1, 3), np.int32)
  memory = transformer.empty_memory(config, 1)
  wanted = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), tokens, memory)))
  of_shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
  assert of_shapes(variables) == of_shapes(wanted)
  joined = 'layers.1.dec_attn.kv_net.weight'
  if joined in arrays:  # keys first
    ours = variables['params']['layer_1']['attention']
    for name, theirs in zip(('key', 'value'), np.split(arrays[joined], 2), strict=True):
      assert_close(ours[name]['kernel'], theirs.T.reshape(ours[name]['kernel'].shape), 1e-6)
  assert (joined in arrays) == (config.position in model_config.SEGMENT_POSITIONS)
  if 'crit.cluster_weight' in arrays:  # theirs has the last tail first
    ours = variables['params']['adaptive_softmax']['cluster_weight']
    assert_close(ours, arrays['crit.cluster_weight'][::-1], 1e-6)


def test_everything_that_does_not_fit_is_listed_at_once(reference):
  f = reference('xl_base')
  arrays = parameters(f, 'param/', 'float32')
  arrays['r_w_bias'] = arrays['r_w_bias'][:1]
  arrays['r_x_bias'] = arrays.pop('r_r_bias')
  with pytest.raises(errors.BadInput) as caught:
    transformer_xl.load_language_model(arrays, config_of(f, 'float32'), 23)
  assert str(caught.value).splitlines() == [
    '3 arrays do not fit a Transformer-XL. Check the config against them.',
    '  missing: r_r_bias (2, 8)',
    '  extra: r_x_bias (2, 8)',
    '  misshapen: r_w_bias is (1, 8), expected (2, 8)',
  ]
  with pytest.raises(errors.BadInput, match="model.norm='hybrid': theirs has 'post_skip' or 'pre'"):
    config = config_of(f, 'float32', norm='hybrid')
    transformer_xl.load_language_model(parameters(f, 'param/', 'float32'), config, 23)


def test_untied_arrays_are_not_dropped_where_the_config_ties_them(reference):
  f = reference('xl_base')
  arrays, config = parameters(f, 'param/', 'float32'), config_of(f, 'float32')
  twin = 'crit.out_layers.0.weight'
  arrays[twin] = arrays['word_emb.emb_layers.0.weight']
  transformer_xl.load_language_model(arrays, config, 23)  # listed twice
  arrays[twin] = arrays[twin] + 1
  with pytest.raises(errors.BadInput, match=rf'extra: {twin}'):
    transformer_xl.load_language_model(arrays, config, 23)
  with pytest.raises(errors.BadInput, match='model.scale_embeddings=False: theirs has True'):
    other = config_of(f, 'float32', scale_embeddings=False)
    transformer_xl.load_language_model(parameters(f, 'param/', 'float32'), other, 23)
