"""The gated look-up equals the code of DeepSeek-V4.1 and a slow loop; others are in test_memory."""

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers.ngram import gate
from tests.checks import assert_close, random_variables


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
    params = jax.tree.map(jnp.asarray, params_of('weights'))

    @jax.jit
    def gradients(params, h):
      def loss(params, h):
        y, _ = layer.apply({'params': params}, h, e, np.zeros(h.shape[:2], int))
        return (y * f['cotangent'][None]).sum(), y

      return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, h)

    (d_params, d_h), y = gradients(params, f['hidden_states'][None])
    assert_close(f['hidden_states'] + y[0], f['output'], 1e-9)
    assert_close(f['cotangent'] + d_h[0], f['grad/hidden_states'], 1e-9)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-9), d_params, params_of('grad'))


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
