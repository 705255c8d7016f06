import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import mesh_axes
from ngrammer_jax.layers.normalization import LayerNorm, RMSNorm
from tests.checks import assert_close
from tests.layers.programs import apply, assert_gradient


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
    y = apply(layer, {'params': params}, x)
    assert_close(y, slow_layer_norm(x, **params, epsilon=epsilon), 1e-12)


@pytest.mark.parametrize('per_head, shape', [(False, (5,)), (True, (3, 5))])
def test_the_written_gradient_is_that_of_finite_differences(x64, per_head, shape):
  rng = np.random.default_rng(1)
  x, weight = rng.normal(size=(2, 2, 4, 3, 5))
  params = {'scale': rng.normal(size=shape), 'bias': rng.normal(size=shape)}
  layer = LayerNorm(per_head=per_head, epsilon=1e-2, dtype=jnp.float64)
  weighted_sum = lambda params, x: (weight * layer.apply({'params': params}, x)).sum()
  slow = lambda args: (weight * slow_layer_norm(args[1], **args[0], epsilon=1e-2)).sum()
  assert_gradient(jax.jit(jax.grad(weighted_sum, (0, 1)))(params, x), slow, (params, x))


def test_constant_vector_becomes_the_bias_with_a_finite_gradient():
  layer = LayerNorm()
  params = {'scale': np.full(4, 2, 'float32'), 'bias': np.arange(4, dtype='float32')}
  constant = np.full((1, 4), 0.75, 'float32')

  def first(x):
    y = layer.apply({'params': params}, x)
    return y[0, 0], y

  gradient, y = jax.jit(jax.grad(first, has_aux=True))(constant)
  assert y.tolist() == [[0, 1, 2, 3]]
  # scale / sqrt(epsilon) * (delta - 1/4)
  assert_close(gradient, np.array([[1500, -500, -500, -500]]), 1e-5)


def test_one_pass_on_accelerators_is_as_good(monkeypatch):
  """Also of a constant vector, whose mean square may round below its squared mean."""
  monkeypatch.setattr(mesh_axes, 'device', lambda: ('tpu', ''))
  rng = np.random.default_rng(2)
  params = {'scale': np.ones(1000, 'float32'), 'bias': np.zeros(1000, 'float32')}
  for mean in (0, 1, 10):
    x = (mean + rng.normal(size=(16, 1000))).astype(jnp.bfloat16)
    y = LayerNorm().apply({'params': params}, x)
    assert_close(y, slow_layer_norm(np.asarray(x, 'float64'), 1, 0), 1e-4)
  constant = np.repeat(rng.normal(size=(64, 1)).astype(jnp.bfloat16) * 100, 1000, axis=1)
  y = jax.jit(LayerNorm().apply)({'params': params}, constant)
  assert np.abs(y).max() < 1


def test_statistics_of_bfloat16_are_taken_in_float32():
  x = np.array([[256.0, 258.0, 260.0, 262.0]], jnp.bfloat16)  # exact; 259 is not
  params = {'scale': np.ones(4, 'float32'), 'bias': np.zeros(4, 'float32')}
  y = apply(LayerNorm(), {'params': params}, x)
  assert_close(y, slow_layer_norm(np.asarray(x, 'float64'), 1, 0), 1e-6)
  narrow = LayerNorm(dtype=jnp.bfloat16)
  assert jax.eval_shape(lambda: narrow.apply({'params': params}, x)).dtype == jnp.bfloat16


def test_root_mean_square_equals_formula():
  rng = np.random.default_rng(0)
  x, scale = rng.normal(size=(2, 3, 4)), rng.normal(size=(3, 4))
  with jax.enable_x64(True):
    for epsilon, is_offset in ((0.1, False), (None, True)):
      layer = RMSNorm(2, epsilon, is_offset, dtype=np.dtype('float64'))
      y = layer.apply({'params': {'scale': scale}}, x)
      eps = np.finfo('float64').eps if epsilon is None else epsilon
      expected = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * (is_offset + scale)
      np.testing.assert_allclose(y, expected, rtol=1e-12)
