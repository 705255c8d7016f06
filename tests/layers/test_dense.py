import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.layers.dense import dense_general
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
