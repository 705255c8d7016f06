import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers.linear import Linear
from tests.checks import assert_close, random_variables

SHAPES = [((5,), 1, 'btnh,hf->btnf'), ((2, 3), 1, 'btnh,hfg->btnfg'), ((5,), 2, 'btnh,nhf->btf')]


def test_equals_formula(x64):
  x = np.random.default_rng(1).normal(size=(2, 3, 4, 6))
  cases = []
  for features, contract, formula in SHAPES:
    for bias in (True, False):
      layer = Linear(features, ('embed',) * (contract + len(features)), contract, bias, jnp.float64)
      cases.append((layer, random_variables(layer, x, dtype='float64'), formula))
  found = jax.jit(lambda x: [layer.apply(variables, x) for layer, variables, _ in cases])(x)
  for (layer, variables, formula), y in zip(cases, found, strict=True):
    params = jax.device_get(variables['params'])
    assert ('bias' in params) == layer.bias
    assert_close(y, np.einsum(formula, x, params['kernel']) + params.get('bias', 0), 1e-12)


def test_initial_kernel_is_a_truncated_normal_of_the_inverse_root_of_its_inputs():
  layer = Linear((50,), ('heads', 'kv', 'embed'), contract=2, bias=True)
  params = jax.jit(layer.init)(jax.random.key(0), np.zeros((1, 10, 20), 'float32'))['params']
  kernel = np.asarray(params['kernel'].value)
  assert abs(kernel.std() * 200**0.5 - 1) < 0.02
  assert np.abs(kernel).max() * 200**0.5 <= 2 / 0.8796
  assert (np.asarray(params['bias'].value) == 0).all()


def test_float32_parameters_compute_in_bfloat16():
  layer = Linear((5,), ('embed', 'mlp'), bias=True, dtype=jnp.bfloat16)
  y, variables = jax.eval_shape(
    layer.init_with_output, jax.random.key(0), jax.ShapeDtypeStruct((2, 4), jnp.float32)
  )
  assert y.dtype == jnp.bfloat16
  assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {'float32'}
