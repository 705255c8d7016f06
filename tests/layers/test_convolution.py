"""The causal convolution of Primer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import convolution
from tests.checks import assert_close


@pytest.mark.parametrize('taps', [1, 3, 4])
@pytest.mark.parametrize('case', ['plain', 'seg'])
@pytest.mark.parametrize('dtype, tolerance', [('float32', 2e-5), ('float64', 1e-9)])
def test_equals_praxis(reference, taps, case, dtype, tolerance):
  f = reference('primer_dconv')
  with jax.enable_x64(dtype == 'float64'):
    layer = convolution.CausalConvolution(taps, jnp.dtype(dtype))
    x, w = f['x'].astype(dtype), f[f'k{taps}/w'].astype(dtype)
    plain = np.tile(np.arange(x.shape[1]), (x.shape[0], 1))
    position = f['segment_pos'] if case == 'seg' else plain

    def weighted(w, x):
      y = layer.apply({'params': {'taps': w}}, x, position)
      return (y * f['cot']).sum(), y

    gradients, y = jax.grad(weighted, argnums=(0, 1), has_aux=True)(w, x)
    assert_close(y, f[f'k{taps}/y/{case}'], tolerance)
    assert_close(gradients[0], f[f'k{taps}/grad_w/{case}'], tolerance)
    assert_close(gradients[1], f[f'k{taps}/grad_x/{case}'], tolerance)


@pytest.mark.parametrize('taps', [1, 3, 4])
def test_starts_as_praxis_does(reference, taps):
  f = reference('primer_dconv')
  layer = convolution.CausalConvolution(taps)
  x = jnp.asarray(f['x'], 'float32')
  variables = layer.init(jax.random.key(0), x, jnp.zeros(x.shape[:2], int))
  assert_close(variables['params']['taps'].value, f[f'k{taps}/init'], 1e-7)


@pytest.mark.parametrize('split', [1, 2, 5])
def test_goes_on_from_what_came_before(split):
  rng = np.random.default_rng(0)
  x, position = rng.normal(size=(2, 8, 2, 4)), np.array([[0, 1, 2, 3, 0, 1, 2, 3], range(8)])
  layer = convolution.CausalConvolution(3)
  variables = {'params': {'taps': rng.normal(size=(3, 2, 4))}}
  whole = layer.apply(variables, x, position)
  before = np.concatenate([np.full((2, 2, 2, 4), 9.0), x[:, :split]], axis=1)[:, -2:]
  first = layer.apply(variables, x[:, :split], position[:, :split], np.full((2, 2, 2, 4), 9.0))
  rest = layer.apply(variables, x[:, split:], position[:, split:], before)
  assert_close(np.concatenate([first, rest], axis=1), whole, 1e-6)
