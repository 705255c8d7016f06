"""The causal convolution of Primer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import convolution
from tests.checks import assert_close
from tests.layers.programs import apply


@pytest.mark.parametrize(
  'dtype, tolerance', [('float64', 1e-9), pytest.param('float32', 2e-5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('taps', [1, 3, 4])
def test_equals_praxis(reference, taps, dtype, tolerance):
  f = reference('primer_dconv')
  with jax.enable_x64(dtype == 'float64'):
    layer = convolution.CausalConvolution(taps, jnp.dtype(dtype))
    x, w = f['x'].astype(dtype), f[f'k{taps}/w'].astype(dtype)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradients(w, x, position):
      y = layer.apply({'params': {'taps': w}}, x, position)
      return (y * f['cot']).sum(), y

    plain = np.tile(np.arange(x.shape[1]), (x.shape[0], 1))
    for case, position in (('plain', plain), ('seg', f['segment_pos'])):
      (d_w, d_x), y = gradients(w, x, position)
      assert_close(y, f[f'k{taps}/y/{case}'], tolerance)
      assert_close(d_w, f[f'k{taps}/grad_w/{case}'], tolerance)
      assert_close(d_x, f[f'k{taps}/grad_x/{case}'], tolerance)


def test_starts_as_praxis_does(reference):
  f = reference('primer_dconv')
  x = f['x'].astype('float32')
  init = lambda W: convolution.CausalConvolution(W).init(
    jax.random.key(0), x, np.zeros(x.shape[:2], int)
  )
  for taps, variables in jax.jit(lambda: {W: init(W) for W in (1, 3, 4)})().items():
    assert_close(variables['params']['taps'].value, f[f'k{taps}/init'], 1e-7)


def test_goes_on_from_what_came_before():
  rng, W = np.random.default_rng(0), 3
  x = rng.normal(size=(2, 8, 2, 4)).astype('float32')
  position = np.array([[0, 1, 2, 3, 0, 1, 2, 3], range(8)])
  layer = convolution.CausalConvolution(W)
  variables = {'params': {'taps': rng.normal(size=(W, 2, 4)).astype('float32')}}
  full = apply(layer, variables, x, position)
  everything = np.concatenate([np.full((2, W - 1, 2, 4), 9, 'float32'), x], axis=1)
  for length in (1, 4):
    parts = [
      apply(
        layer,
        variables,
        x[:, t : t + length],
        position[:, t : t + length],
        everything[:, t : t + W - 1],
      )
      for t in range(0, 8, length)
    ]
    assert_close(np.concatenate(parts, axis=1), full, 1e-6)
