import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from ngrammer_jax.layers import LayerNorm
from tests.checks import assert_close


def slow_layer_norm(x, scale, bias, epsilon=1e-6):
  """Of every vector x[..., :], in NumPy."""
  mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
  return scale * (x - mean) / np.sqrt(variance + epsilon) + bias


@pytest.mark.parametrize('per_head, shape', [(False, (5,)), (True, (3, 5))])
def test_equals_formula(x64, per_head, shape):
  rng = np.random.default_rng(0)
  # Tokens of very different size: for the smallest, epsilon is most of the variance.
  x = rng.normal(size=(2, 4, 3, 5)) * 10.0 ** np.arange(-4, 0)[:, None, None]
  params = {'scale': rng.normal(size=shape), 'bias': rng.normal(size=shape)}
  for epsilon in (1e-6, 1e-2):
    layer = LayerNorm(per_head=per_head, epsilon=epsilon, dtype=jnp.float64)
    y = layer.apply({'params': params}, x)
    assert_close(y, slow_layer_norm(x, **params, epsilon=epsilon), 1e-12)


@pytest.mark.parametrize('per_head, shape', [(False, (5,)), (True, (3, 5))])
def test_the_written_gradient_is_that_of_finite_differences(x64, per_head, shape):
  rng = np.random.default_rng(1)
  x, weight = rng.normal(size=(2, 2, 4, 3, 5))
  params = {'scale': rng.normal(size=shape), 'bias': rng.normal(size=shape)}
  layer = LayerNorm(per_head=per_head, epsilon=1e-2, dtype=jnp.float64)
  of = lambda params, x: (weight * layer.apply({'params': params}, x)).sum()
  check_grads(of, (params, x), order=1, modes=['rev'], atol=1e-6, rtol=1e-6)


def test_constant_vector_becomes_the_bias_with_a_finite_gradient():
  layer = LayerNorm()
  params = {'scale': jnp.full(4, 2.0), 'bias': jnp.arange(4.0)}
  constant = jnp.full((1, 4), 0.75)
  assert layer.apply({'params': params}, constant).tolist() == [[0, 1, 2, 3]]
  gradient = jax.grad(lambda x: layer.apply({'params': params}, x)[0, 0])(constant)
  # scale / sqrt(epsilon) * (delta - 1/4)
  assert_close(gradient, np.array([[1500, -500, -500, -500]]), 1e-5)


def test_statistics_of_bfloat16_are_taken_in_float32():
  x = jnp.asarray([[256.0, 258.0, 260.0, 262.0]], jnp.bfloat16)  # exact; 259 is not
  params = {'scale': jnp.ones(4), 'bias': jnp.zeros(4)}
  y = LayerNorm().apply({'params': params}, x)
  assert_close(y, slow_layer_norm(np.asarray(x, 'float64'), 1, 0), 1e-6)
  assert LayerNorm(dtype=jnp.bfloat16).apply({'params': params}, x).dtype == jnp.bfloat16
