import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers.linear import Linear
from tests.checks import assert_close, random_variables


@pytest.mark.parametrize(
  'features, contract, formula',
  [((5,), 1, 'btnh,hf->btnf'), ((2, 3), 1, 'btnh,hfg->btnfg'), ((5,), 2, 'btnh,nhf->btf')],
)
@pytest.mark.parametrize('bias', [True, False])
def test_equals_formula(x64, features, contract, formula, bias):
  x = np.random.default_rng(1).normal(size=(2, 3, 4, 6))
  names = ('embed',) * (contract + len(features))
  layer = Linear(features, names, contract, bias, jnp.float64)
  variables = random_variables(layer, x, dtype='float64')
  assert ('bias' in variables['params']) == bias
  expected = np.einsum(formula, x, variables['params']['kernel'])
  assert_close(layer.apply(variables, x), expected + variables['params'].get('bias', 0), 1e-12)


def test_initial_kernel_is_a_truncated_normal_of_the_inverse_root_of_its_inputs():
  layer = Linear((50,), ('heads', 'kv', 'embed'), contract=2, bias=True)
  params = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((1, 10, 20)))['params']
  kernel = np.asarray(params['kernel'].value)
  assert abs(kernel.std() * 200**0.5 - 1) < 0.02
  assert np.abs(kernel).max() * 200**0.5 <= 2 / 0.8796
  assert (params['bias'].value == 0).all()


def test_float32_parameters_compute_in_bfloat16():
  layer = Linear((5,), ('embed', 'mlp'), bias=True, dtype=jnp.bfloat16)
  y, variables = jax.eval_shape(
    layer.init_with_output, jax.random.key(0), jax.ShapeDtypeStruct((2, 4), jnp.float32)
  )
  assert y.dtype == jnp.bfloat16
  assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {'float32'}
