import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.layers.dense import dense_general, dot_general
from tests import jaxprs
from tests.checks import assert_close, random_variables

SHAPES = [
  ((6,), (5,), 'btnh,hf->btnf'),
  ((6,), (2, 3), 'btnh,hfg->btnfg'),
  ((4, 6), (5,), 'btnh,nhf->btf'),
]


def test_equals_formula(x64):
  x = np.random.default_rng(1).normal(size=(2, 3, 4, 6))
  cases = []
  for inputs, features, formula in SHAPES:
    for bias in (True, False):
      names = ('embed',) * len((*inputs, *features))
      layer = dense_general(inputs, features, names, use_bias=bias, dtype=jnp.float64)
      cases.append((layer, random_variables(layer, x, dtype='float64'), formula))
  outputs = jax.jit(lambda x: [layer.apply(variables, x) for layer, variables, _ in cases])(x)
  for (layer, variables, formula), y in zip(cases, outputs, strict=True):
    params = jax.device_get(variables['params'])
    assert ('bias' in params) == layer.use_bias
    assert_close(y, np.einsum(formula, x, params['kernel']) + params.get('bias', 0), 1e-12)


def test_gradients_equal_einsum(x64):
  """Of wide and narrow inputs, as each transposes the narrower operand; also of one row."""
  random = np.random.default_rng(2)
  cases, arrays = [], []
  for rows in ((2, 3), (5,), ()):
    for inputs, features in (((4, 6), (5,)), ((6,), (2, 4)), ((3,), (3,))):
      names = ('embed',) * len((*inputs, *features))
      layer = dense_general(inputs, features, names, dtype=jnp.float64)
      x, dy = random.normal(size=(*rows, *inputs)), random.normal(size=(*rows, *features))
      cases.append((layer, np.prod(inputs), np.prod(features)))
      arrays.append((random_variables(layer, x, dtype='float64'), x, dy))

  @jax.jit
  def backward(arrays):
    """The gradients of all cases, in one program."""
    gradients = []
    for (layer, *_), (variables, x, dy) in zip(cases, arrays, strict=True):
      _, of_layer = jax.vjp(layer.apply, variables, x)
      gradients.append(of_layer(dy))
    return gradients

  gradients = backward(arrays)
  for (_, inputs, outputs), (variables, x, dy), (d_variables, dx) in zip(
    cases, arrays, gradients, strict=True
  ):
    flat_x, flat_dy = x.reshape(-1, inputs), dy.reshape(-1, outputs)
    kernel = np.asarray(variables['params']['kernel'])
    d_params = d_variables['params']
    assert_close(d_params['kernel'], (flat_x.T @ flat_dy).reshape(kernel.shape), 1e-12)
    assert_close(d_params['bias'], flat_dy.sum(axis=0).reshape(d_params['bias'].shape), 1e-12)
    assert_close(dx, (flat_dy @ kernel.reshape(inputs, outputs).T).reshape(x.shape), 1e-12)


@pytest.mark.parametrize('inputs, features', [((4, 6), (5,)), ((6,), (2, 4)), ((6, 2), (3, 3))])
def test_the_gradient_of_a_kernel_transposes_the_narrower_operand(inputs, features):
  """And, if it is the gradient of the output, the small gradient of the kernel."""
  rows, names = 100, ('embed',) * len((*inputs, *features))
  layer, x = dense_general(inputs, features, names), jnp.zeros((rows, *inputs))
  variables = random_variables(layer, x)
  loss = lambda variables: layer.apply(variables, x).sum()
  program = jax.make_jaxpr(jax.grad(loss))(variables).jaxpr
  sizes = {
    math.prod(equation.outvars[0].aval.shape)
    for equation in jaxprs.equations(program)
    if equation.primitive.name == 'transpose'
  }
  widths = math.prod(inputs), math.prod(features)
  kernel = {math.prod(widths)} if widths[1] < widths[0] else set()
  assert sizes == {rows * min(widths)} | kernel


def test_a_policy_of_rematerialization_sees_the_product():
  """If products are saved, the gradient computes none of them again."""
  x, kernel = jnp.zeros((8, 4)), jnp.zeros((4, 6))
  product = lambda kernel: jnp.tanh(dot_general(x, kernel, (((1,), (0,)), ((), ())))).sum()

  def products(policy):
    gradient = jax.grad(jax.checkpoint(product, policy=policy))
    equations = jaxprs.equations(jax.make_jaxpr(gradient)(kernel).jaxpr)
    return sum(equation.primitive.name == 'dot_general' for equation in equations)

  policies = jax.checkpoint_policies
  saved = products(policies.everything_saveable)
  assert products(policies.dots_with_no_batch_dims_saveable) == saved
  assert products(policies.nothing_saveable) == saved + 1


def test_products_of_the_gradient_of_a_float32_result_have_bfloat16_operands():
  x, kernel = jnp.zeros((8, 4), jnp.bfloat16), jnp.zeros((4, 6), jnp.bfloat16)

  def gradient(x, kernel, dy):
    axes = ((1,), (0,)), ((), ())
    product = lambda *operands: dot_general(*operands, axes, preferred_element_type=jnp.float32)
    return jax.vjp(product, x, kernel)[1](dy)

  assert jaxprs.operand_dtypes(gradient, x, kernel, jnp.zeros((8, 6))) == [{'bfloat16'}] * 2


def test_a_kernel_may_be_summed_over_its_last_axis(x64):
  random = np.random.default_rng(3)
  x, kernel, dy = (random.normal(size=shape) for shape in ((2, 3, 4), (5, 4), (2, 3, 5)))
  _, backward = jax.vjp(
    lambda x, kernel: dot_general(x, kernel, (((2,), (1,)), ((), ()))), x, kernel
  )
  dx, d_kernel = backward(dy)
  assert_close(dx, dy @ kernel, 1e-12)
  assert_close(d_kernel, np.einsum('btv,btd->vd', dy, x), 1e-12)


def test_initial_kernel_is_a_truncated_normal_of_the_inverse_root_of_its_inputs():
  """On one device and on a mesh, where the names decide how it is sharded."""
  for inputs, features, names in (
    ((10, 20), (50,), ('heads', 'kv', 'embed')),
    ((200,), (10, 5), ('embed', 'heads', 'kv')),
  ):
    layer, x = dense_general(inputs, features, names), np.zeros((1, *inputs), 'float32')
    params = jax.jit(layer.init)(jax.random.key(0), x)['params']
    kernel = np.asarray(params['kernel'].value)
    assert abs(kernel.std() * 200**0.5 - 1) < 0.02
    assert np.abs(kernel).max() * 200**0.5 <= 2 / 0.8796
    assert (np.asarray(params['bias'].value) == 0).all()
    with sharding.use(sharding.make_mesh(1, 4, 2)):
      sharded = jax.jit(layer.init)(jax.random.key(0), x)['params']
    assert (sharded['kernel'].names, sharded['bias'].names) == (names, names[len(inputs) :])
    np.testing.assert_array_equal(sharded['kernel'].value, kernel)


def test_float32_parameters_compute_in_bfloat16():
  layer = dense_general((4,), (5,), ('embed', 'mlp'), dtype=jnp.bfloat16)
  y, variables = jax.eval_shape(
    layer.init_with_output, jax.random.key(0), jax.ShapeDtypeStruct((2, 4), jnp.float32)
  )
  assert y.dtype == jnp.bfloat16
  assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {'float32'}


@pytest.mark.full
def test_gradients_in_bfloat16_equal_those_of_lax():
  """The product has the same precision, and gradients have the dtypes of their operands."""
  random = np.random.default_rng(4)
  x, kernel, dy = (
    jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in ((64, 8), (8, 6), (64, 6))
  )
  axes = ((1,), (0,)), ((), ())
  both = [
    jax.vjp(lambda x, kernel, product=product: product(x, kernel, axes), x, kernel)[1](dy)
    for product in (dot_general, jax.lax.dot_general)
  ]
  assert {leaf.dtype.name for leaf in jax.tree.leaves(both)} == {'bfloat16'}
  for ours, lax in zip(*both, strict=True):
    assert_close(ours.astype(jnp.float32), lax.astype(jnp.float32), 0.02)
