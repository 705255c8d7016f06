import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import FeedForward, activations, mesh_axes
from tests.checks import assert_close, random_variables

FORMULAS = {
  'gelu': lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
  'gelu_erf': lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
  'relu': lambda x: np.where(x > 0, x, 0),
  'silu': lambda x: x / (1 + np.exp(-x)),
  'squared_relu': lambda x: np.where(x > 0, x**2, 0),
  'softmax': lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
}
CASES = [(activation, is_gated, is_gated) for activation in FORMULAS for is_gated in (True, False)]
CASES += [('silu', True, False), ('silu', False, True)]


def random_dense(rng, inputs, outputs):
  return {'kernel': rng.normal(size=(inputs, outputs)), 'bias': rng.normal(size=outputs)}


def test_equals_formula(x64):
  """All pairs of activations, gates and biases, in one program."""
  rng = np.random.default_rng(0)
  x, valid = rng.normal(size=(2, 3, 4)), np.array([[1, 1, 0], [1, 0, 0]])
  all_maps = {
    'in': random_dense(rng, 4, 6),
    'gate': random_dense(rng, 4, 6),
    'out': random_dense(rng, 6, 4),
  }

  def used(gated, bias):
    names = ('in', 'gate', 'out') if gated else ('in', 'out')
    parts = ('kernel', 'bias') if bias else ('kernel',)
    return {name: {part: all_maps[name][part] for part in parts} for name in names}

  @jax.jit
  def run_all(x, valid):
    results = {}
    for case in CASES:
      layer = FeedForward(6, *case, dtype=jnp.float64)
      variables = {'params': used(*case[1:])}
      results[case] = layer.apply(variables, x), layer.apply(variables, x, valid)
    return results

  for (activation, gated, bias), (y, padded) in jax.device_get(run_all(x, valid)).items():
    maps = used(gated, bias)
    linear = lambda name, x, maps=maps: x @ maps[name]['kernel'] + maps[name].get('bias', 0)
    act = FORMULAS[activation]
    inner = act(linear('gate', x)) * linear('in', x) if gated else act(linear('in', x))
    assert_close(y, linear('out', inner), 1e-12)
    np.testing.assert_array_equal(padded, np.where(valid[..., None], y, 0))


@pytest.mark.parametrize(
  'gated, activation',
  [
    (True, 'silu'),
    *(pytest.param(False, name, marks=pytest.mark.slow) for name in ('gelu', 'relu')),
  ],
)
def test_a_padded_width_computes_the_same(x64, monkeypatch, gated, activation):
  """In a program whose products have 128 inner features on a TPU, 104 on a GPU, not 100."""
  layer = FeedForward(100, activation, gated, dtype=jnp.float64)
  x = np.random.default_rng(0).normal(size=(2, 3, 8))
  variables = random_variables(layer, x, dtype='float64')
  results = {}
  for platform, width in (('cpu', 100), ('gpu', 104), ('tpu', 128)):
    monkeypatch.setattr(mesh_axes, 'device', lambda platform=platform: (platform, ''))
    loss = lambda variables, x: (layer.apply(variables, x) ** 2).sum()  # not traced before
    assert f'f64[2,3,{width}]' in str(jax.make_jaxpr(loss)(variables, x))
    results[platform] = jax.jit(jax.grad(loss, (0, 1)))(variables, x)
    jax.tree.map(lambda *pair: assert_close(*pair, 1e-12), results[platform], results['cpu'])
  # Not where the width has a meaning, or is sharded.
  for options in ({'bias': True}, {'activation': 'softmax'}):
    other = FeedForward(100, **{'activation': activation} | options)
    program = jax.make_jaxpr(other.apply)(random_variables(other, x), x)
    assert ',128]' not in str(program)


def test_every_activation_has_a_formula():
  assert set(activations.ACTIVATIONS) == set(FORMULAS)
