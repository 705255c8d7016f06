import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import FeedForward, feed_forward
from tests.checks import assert_close

FORMULAS = {
  'gelu': lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
  'relu': lambda x: np.where(x > 0, x, 0),
  'silu': lambda x: x / (1 + np.exp(-x)),
  'squared_relu': lambda x: np.where(x > 0, x**2, 0),
  'softmax': lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
}


def random_dense(rng, inputs, outputs):
  return {'kernel': rng.normal(size=(inputs, outputs)), 'bias': rng.normal(size=outputs)}


@pytest.mark.parametrize('activation', FORMULAS)
@pytest.mark.parametrize('gated', [True, False])
@pytest.mark.parametrize('bias', [True, False])
def test_equals_formula(x64, activation, gated, bias):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 4))
  maps = {
    'in': random_dense(rng, 4, 6),
    'gate': random_dense(rng, 4, 6),
    'out': random_dense(rng, 6, 4),
  }
  if not gated:
    del maps['gate']
  if not bias:
    maps = {name: {'kernel': dense['kernel']} for name, dense in maps.items()}
  layer = FeedForward(6, activation, gated, bias, dtype=jnp.float64)
  y = layer.apply({'params': maps}, x)

  linear = lambda name, x: x @ maps[name]['kernel'] + maps[name].get('bias', 0)
  act = FORMULAS[activation]
  inner = act(linear('gate', x)) * linear('in', x) if gated else act(linear('in', x))
  assert_close(y, linear('out', inner), 1e-12)
  valid = np.array([[1, 1, 0], [1, 0, 0]])
  padded = layer.apply({'params': maps}, x, valid)
  np.testing.assert_array_equal(padded, np.where(valid[..., None], y, 0))


def test_every_activation_has_a_formula():
  assert set(feed_forward.ACTIVATIONS) == set(FORMULAS)
