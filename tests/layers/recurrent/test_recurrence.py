"""Gradients of a recurrent layer, which are written by hand, are those of a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers.recurrent import recurrence
from tests.checks import assert_close
from tests.layers.programs import assert_gradient

B, T, D, K = 3, 6, 4, 5


def random_case(cell):
  """Parameters, inputs and a state; documents start and padding lies within."""
  rng = np.random.default_rng(0)
  G = recurrence.CELLS[cell]
  shapes = {'input_kernel': (D, G, K), 'recurrent_kernel': (K, G, K), 'bias': (G, K)}
  params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
  parts = recurrence.empty_state(B, K, cell, jnp.float32)
  state = {name: rng.normal(size=part.shape) for name, part in parts.items()}
  starts, valid = np.zeros((B, T), bool), np.ones((B, T), np.float32)
  starts[0, 0] = starts[1, [2, 3]] = starts[2, T - 1] = True
  valid[0, 4:] = valid[2, [1, 2]] = 0
  return params, rng.normal(size=(B, T, D)), state, starts, valid


def loop(cell, params, x, state, starts, valid):
  """All outputs and the last state, a token at a time."""
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  outputs = []
  for t in range(T):
    before = {name: np.where(starts[:, t, None], 0, part) for name, part in state.items()}
    project = lambda name, inputs: np.tensordot(inputs, params[name], axes=1)
    gates = (
      project('input_kernel', x[:, t]) + project('recurrent_kernel', before['h']) + params['bias']
    )
    if cell == 'rnn':
      after = {'h': np.tanh(gates[:, 0])}
    else:
      i, f, g, o = (gates[:, gate] for gate in range(4))
      c = sigmoid(f) * before['c'] + sigmoid(i) * np.tanh(g)
      after = {'h': sigmoid(o) * np.tanh(c), 'c': c}
    is_valid = valid[:, t, None] > 0
    state = {name: np.where(is_valid, after[name], state[name]) for name in state}
    outputs.append(state['h'])
  return np.stack(outputs, axis=1), state


def weighted(results):
  """A sum of all results, each number of another weight."""
  weights = [np.random.default_rng(i).normal(size=a.shape) for i, a in enumerate(results)]
  return sum((a * w).sum() for a, w in zip(results, weights, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def gradients(layer, params, x, state, starts, valid):
  def total(params, x, state):
    results = layer.apply({'params': params}, x, state, starts_BxT=starts, valid_BxT=valid)
    return weighted(jax.tree.leaves(results)), results

  return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(params, x, state)


@pytest.mark.parametrize(
  'cell, padded',
  [('lstm', True), ('rnn', False)]
  + [pytest.param(*each, marks=pytest.mark.slow) for each in (('lstm', False), ('rnn', True))],
)
def test_gradients_equal_a_loop(x64, cell, padded):
  *args, starts, valid = random_case(cell)
  if not padded:
    valid = np.ones_like(valid)
  layer = recurrence.Recurrence(K, cell, dtype=jnp.float64)
  gradient, results = gradients(layer, *args, starts, valid if padded else None)
  same = lambda a, b: assert_close(a, b, 1e-12)
  jax.tree.map(same, results, loop(cell, *args, starts, valid))
  slow = lambda args: weighted(jax.tree.leaves(loop(cell, *args, starts, valid)))
  assert_gradient(gradient, slow, tuple(args))


@pytest.mark.full
@pytest.mark.parametrize('cell', ['lstm', pytest.param('rnn', marks=pytest.mark.slow)])
def test_gradients_in_bfloat16_are_near_those_in_float32(cell):
  params, x, state, starts, valid = random_case(cell)
  params, x = jax.tree.map(lambda a: a.astype('float32'), (params, x))

  def run(dtype):
    layer = recurrence.Recurrence(K, cell, dtype=dtype)
    narrow = jax.eval_shape(lambda: recurrence.empty_state(B, K, cell, dtype))
    args = jax.tree.map(lambda part, like: part.astype(like.dtype), state, narrow)
    gradient, _ = jax.device_get(gradients(layer, params, x, args, starts, valid))
    return gradient[0], gradient[2]

  def near(narrow, wide):
    assert np.abs(narrow.astype(np.float32) - wide).max() < 0.05 * np.abs(wide).max()

  jax.tree.map(near, run(jnp.bfloat16), run(jnp.float32))
