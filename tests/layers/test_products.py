import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers import products
from tests import jaxprs
from tests.checks import assert_close

INDICES = 'btch,bsch->bcts'


def random_case(dtype):
  rng = np.random.default_rng(0)
  a, b = (jnp.asarray(rng.normal(size=(2, length, 2, 8)), dtype) for length in (3, 5))
  return a, b, jnp.asarray(rng.normal(size=(2, 2, 3, 5)), 'float32')


def test_the_gradient_in_bfloat16_is_that_of_the_rounded_gradient_of_the_product():
  """Which has half of the rounding error that bfloat16 operands and results may have together."""
  a, b, dy = random_case(jnp.bfloat16)
  y, pull_back = jax.vjp(lambda a, b: products.wide_einsum(INDICES, a, b), a, b)
  assert y.dtype == jnp.float32
  gradients = pull_back(dy)
  assert {gradient.dtype.name for gradient in gradients} == {'bfloat16'}
  a, b, dy = (np.asarray(array, 'float64') for array in (a, b, dy))
  for actual, expected in zip(
    gradients,
    (np.einsum('bcts,bsch->btch', dy, b), np.einsum('bcts,btch->bsch', dy, a)),
    strict=True,
  ):
    assert_close(np.asarray(actual, 'float64'), expected, 2**-8)


def test_products_in_float32_are_those_of_einsum():
  """Also of arrays of two dtypes; and forward mode remains."""
  a, b, _ = random_case(jnp.float32)
  for other in (b, b.astype(jnp.bfloat16)):
    ours = jax.make_jaxpr(lambda a, b: products.wide_einsum(INDICES, a, b))(a, other)
    assert 'custom_vjp_call' not in str(ours)
  jax.jvp(lambda a: products.wide_einsum(INDICES, a, b), (a,), (a,))


def test_all_products_of_a_bfloat16_gradient_have_bfloat16_operands():
  a, b, dy = random_case(jnp.bfloat16)

  def gradient(a, b, dy):
    return jax.vjp(lambda a, b: products.wide_einsum(INDICES, a, b), a, b)[1](dy)

  assert jaxprs.operand_dtypes(gradient, a, b, dy) == [{'bfloat16'}] * 2
