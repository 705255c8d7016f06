"""The gated look-up equals the official codes of Engram, DeepSeek-V4.1 and Qwen, and a slow loop."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers.ngram import gate
from tests.checks import assert_close, random_variables

PRECISIONS = [('float64', 1e-9), pytest.param('float32', 2e-5, marks=pytest.mark.slow)]


def outputs_and_gradients(layer, params, h, e, cotangent):
  """Output, and gradients of its product with the cotangent by parameters, h and e."""
  position = np.broadcast_to(np.arange(h.shape[1]), h.shape[:2])

  @jax.jit
  def gradients(params, h, e):
    def loss(params, h, e):
      y, _ = layer.apply({'params': params}, h, e, position)
      return (y * cotangent).sum(), y

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(params, h, e)

  (d_params, d_h, d_e), y = gradients(params, h, e)
  return y, d_params, d_h, d_e


def stacked(f, pattern, G):
  """The arrays of all branches."""
  return np.stack([f[pattern.format(g)] for g in range(G)])


def demo_params(f, path, G):
  """The parameters in the names of the official demo, or their gradients."""
  D, W = len(f[f'{path}/value_proj.bias']), f[f'{path}/short_conv.conv.weight'].shape[-1]
  taps = f[f'{path}/short_conv.conv.weight'][:, 0].T[::-1].reshape(W, G, D)
  key = stacked(f, path + '/key_projs.{}.weight', G)
  return {
    'key': {'kernel': key.transpose(2, 0, 1), 'bias': stacked(f, path + '/key_projs.{}.bias', G)},
    'value': {'kernel': f[f'{path}/value_proj.weight'].T, 'bias': f[f'{path}/value_proj.bias']},
    'key_norm': {'scale': stacked(f, path + '/norm1.{}.weight', G)},
    'query_norm': {'scale': stacked(f, path + '/norm2.{}.weight', G)},
    'convolution_norm': {'scale': stacked(f, path + '/short_conv.norms.{}.weight', G)},
    'convolution': {'taps': taps},
  }


def cast(tree, dtype):
  return jax.tree.map(lambda array: jnp.asarray(array, dtype), tree)


def compare(actual, expected, tolerance):
  jax.tree.map(lambda a, e: assert_close(a, e, tolerance), actual, expected)


@pytest.mark.parametrize('dtype, tolerance', PRECISIONS)
@pytest.mark.parametrize('name', ['engram_o2_h1', 'engram_o23_h8', 'engram_o23_h2_zero'])
def test_equals_the_demo_of_engram(reference, name, dtype, tolerance):
  f = reference(name)
  config = json.loads(str(f['config']))
  G, D = config['hc_mult'], config['width']
  with jax.enable_x64(dtype == 'float64'):
    convolution = gate.Convolution(config['kernel_size'], config['dilation'])
    # The official code has the machine epsilon of its dtype, which was float64.
    layer = gate.Gate(convolution, epsilon=config['qk_norm_eps'], dtype=jnp.dtype(dtype))
    for number in config['layer_ids']:
      path = f'layer{number}'
      e = f[f'{path}/embeddings']
      e, h, cotangent = cast(
        (e.reshape(*e.shape[:2], -1), f['hidden_states'], f[f'{path}/cotangent']), dtype
      )
      params = cast(demo_params(f, f'{path}/weights', G), dtype)
      y, d_params, d_h, d_e = outputs_and_gradients(layer, params, h, e, cotangent)
      assert y.shape == (*e.shape[:2], G, D)
      assert_close(y, f[f'{path}/output'], tolerance)
      assert_close(d_h, f[f'{path}/grad/hidden_states'], tolerance)
      compare(d_params, demo_params(f, f'{path}/grad', G), tolerance)
      # The gradient of a row of the table is the sum over the places that read it.
      weight = f'{path}/grad/multi_head_embedding.embedding.weight'
      rows = f[f'{path}/hashes'] + f[f'{path}/weights/multi_head_embedding.offsets']
      table = np.zeros(f[weight].shape)
      np.add.at(table, rows, np.asarray(d_e).reshape(*rows.shape, -1))
      assert_close(table, f[weight], tolerance)
      gates = layer.apply({'params': params}, h, e, np.zeros(h.shape[:2], int), mutable=True)[1]
      assert_close(gates['intermediates']['gate'][0], f[f'{path}/gates'], tolerance)


def test_equals_the_gate_of_deepseek_v41(reference):
  f = reference('engram_v41_gate')
  G, D = f['hidden_states'].shape[1:]
  with jax.enable_x64(True):
    layer = gate.Gate(None, bias=False, epsilon=1e-6, zero_score='positive', dtype=jnp.float64)
    params_of = lambda path: {
      'key': {'kernel': f[f'{path}/wkv'][: G * D].reshape(G, D, -1).transpose(2, 0, 1)},
      'value': {'kernel': f[f'{path}/wkv'][G * D :].T},
      'key_norm': {'scale': f[f'{path}/k_weight']},
      'query_norm': {'scale': f[f'{path}/q_weight']},
    }
    e = f['weights/embed'][f['hash_ids']].reshape(1, len(f['hash_ids']), -1)
    y, d_params, d_h, _ = outputs_and_gradients(
      layer, cast(params_of('weights'), float), f['hidden_states'][None], e, f['cotangent'][None]
    )
    assert_close(f['hidden_states'] + y[0], f['output'], 1e-9)
    assert_close(f['cotangent'] + d_h[0], f['grad/hidden_states'], 1e-9)
    compare(d_params, params_of('grad'), 1e-9)


@pytest.mark.parametrize('name', ['qwen_ple_n4_h1_hc1', 'qwen_ple_n2_h4_hc2_short'])
def test_equals_the_layer_of_qwen(reference, name):
  f = reference(name)
  config = json.loads(str(f['config']))
  G, D, W = config['hc_count'], config['width'], config['kernel']
  branches = lambda array: array.reshape(*array.shape[:-1], G, D)

  def params_of(path):
    norm = lambda name: {'scale': branches(f[f'{path}/norm_{name}.weight'])}
    return {
      'key': {'kernel': branches(f[f'{path}/key_proj.weight'].T)},
      'value': {'kernel': f[f'{path}/value_proj.weight'].T},
      'key_norm': norm('key'),
      'query_norm': norm('query'),
      'convolution_norm': norm('conv'),
      'convolution': {'taps': branches(f[f'{path}/conv1d.weight'][:, 0].T[::-1])},
    }

  with jax.enable_x64(True):
    eps = config['eps']
    convolution = gate.Convolution(W, config['ngram_size'], eps)
    layer = gate.Gate(convolution, bias=False, epsilon=eps, is_offset=True, dtype=jnp.float64)
    table = f['weights/ple_embedding.ngram_embedding.weight']
    e = table[f['rows']]
    y, d_params, d_h, d_e = outputs_and_gradients(
      *(layer, cast(params_of('weights'), float), branches(f['hidden_states'])),
      *(e.reshape(*e.shape[:2], -1), branches(f['cotangent'])),
    )
    assert_close(y.reshape(*y.shape[:2], -1), f['output'], 1e-9)
    assert_close(d_h.reshape(*d_h.shape[:2], -1), f['grad/hidden_states'], 1e-9)
    compare(d_params, params_of('grad'), 1e-9)
    gradient = np.zeros_like(table)
    np.add.at(gradient, f['rows'], np.asarray(d_e).reshape(e.shape))
    assert_close(gradient, f['grad/ple_embedding.ngram_embedding.weight'], 1e-9)


def test_equals_a_slow_loop():
  rng = np.random.default_rng(0)
  B, T, G, D, M, W, dilation = 2, 6, 2, 4, 3, 3, 2
  h, e = rng.normal(size=(B, T, G, D)), rng.normal(size=(B, T, M))
  position = np.array([[0, 1, 2, 3, 4, 5], [3, 4, 0, 1, 2, 3]])
  before = rng.normal(size=(B, (W - 1) * dilation, G, D))
  with jax.enable_x64(True):
    layer = gate.Gate(gate.Convolution(W, dilation, 1e-3), epsilon=1e-2, dtype=jnp.float64)
    params = random_variables(layer, h, e, position, dtype='float64')['params']
    params = jax.tree.map(np.asarray, params)
    y, c = layer.apply({'params': params}, h, e, position, before)
  rms = lambda x, eps: x / np.sqrt((x**2).mean() + eps)
  expected = np.zeros((B, T, G, D))
  past = np.concatenate([before, np.asarray(c)], axis=1)
  for b in range(B):
    for t in range(T):
      value = e[b, t] @ params['value']['kernel'] + params['value']['bias']
      for g in range(G):
        key = e[b, t] @ params['key']['kernel'][:, g] + params['key']['bias'][g]
        key = rms(key, 1e-2) * params['key_norm']['scale'][g]
        query = rms(h[b, t, g], 1e-2) * params['query_norm']['scale'][g]
        s = key @ query / np.sqrt(D)
        u = value / (1 + np.exp(-np.sign(s) * np.sqrt(max(abs(s), 1e-6))))
        scale = params['convolution_norm']['scale'][g]
        np.testing.assert_allclose(c[b, t, g], rms(u, 1e-3) * scale, rtol=1e-10)
        total = np.zeros(D)
        for i in range(W):
          if position[b, t] >= i * dilation:
            row = past[b, t + (W - 1) * dilation - i * dilation, g]
            total += params['convolution']['taps'][i, g] * row
        expected[b, t, g] = u + total / (1 + np.exp(-total))
  assert_close(y, expected, 1e-10)


def test_a_gate_of_one_half_ignores_the_stream():
  layer = gate.Gate(None, bias=False, kind='half')
  e = np.random.default_rng(0).normal(size=(1, 2, 3)).astype('float32')
  params = {'value': {'kernel': np.ones((3, 4), 'float32')}}
  for h in (np.zeros((1, 2, 1, 4), 'float32'), np.ones((1, 2, 1, 4), 'float32')):
    y, _ = layer.apply({'params': params}, h, e, None)
    assert_close(y[:, :, 0], 0.5 * e.sum(axis=-1, keepdims=True) * np.ones(4), 1e-6)
