"""Equality with arrays computed by the PyTorch Transformer-XL, in float64 and float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.interop import transformer_xl
from ngrammer_jax.layers import relative
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.conftest import assert_close

PRECISIONS = [('float64', 1e-9), ('float32', 1e-4)]


def test_shift_and_encodings(reference):
  f = reference('xl_rel_shift')
  shifted = relative.shift(jnp.asarray(f['x'])[None, None])[0, 0]
  T, S = f['x'].shape
  seen = np.tril(np.ones((T, S), bool), S - T)
  assert_close(np.where(seen, shifted, 0), np.where(seen, f['shifted'], 0), 1e-6)
  f = reference('xl_sinusoid')
  with jax.enable_x64(True):
    assert f['pos'].tolist() == list(range(15, -1, -1))
    assert_close(relative.encodings(16, 16, dtype=jnp.float64), f['emb'] - f['emb'][-1], 1e-12)


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


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('dtype, tolerance', PRECISIONS)
def test_segments_of_a_stream(reference, dtype, tolerance, scan):
  f = reference('xl_base')
  with jax.enable_x64(dtype == 'float64'):
    config = config_of(f, dtype, scan_layers=scan)
    V = int(f['cfg/V'])
    model = transformer.TransformerLM(config, V)
    variables = transformer_xl.load_language_model(parameters(f, 'param/', dtype), config, V)
    memory = transformer.empty_memory(config, int(f['cfg/B']))

    def loss(params, memory, s):
      given = {'params': params}
      (hidden, memory, _), probed = model.apply(
        given, f[f'x/{s}'].T, memory, mutable=['intermediates']
      )
      scores = model.apply(given, hidden, f[f'y/{s}'].T, method='scores')
      return scores.nll_BxT.mean(), (hidden, memory, scores.nll_BxT, probed)

    for s in range(int(f['cfg/n_seg'])):
      params = variables['params']
      (value, (hidden, memory, nll, probed)), gradient = jax.value_and_grad(loss, has_aux=True)(
        params, memory, s
      )
      assert_close(value, f[f'loss/{s}'], tolerance)
      assert_close(hidden.swapaxes(0, 1), f[f'hidden/{s}'], tolerance)
      assert_close(nll.T, f[f'nll/{s}'], tolerance)
      log_probs = model.apply(variables, hidden, method='log_probs')
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
