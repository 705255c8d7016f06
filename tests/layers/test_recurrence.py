"""Gradients of a recurrent layer, which are written by hand, are those of a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import recurrence
from tests.checks import assert_close

B, T, D, K = 3, 6, 4, 5
CELLS = list(recurrence.CELLS)


def random_case(cell, dtype):
  """Parameters, inputs and a state; documents start and padding lies within."""
  rng = np.random.default_rng(0)
  G = recurrence.CELLS[cell]
  shapes = {'input_kernel': (D, G, K), 'recurrent_kernel': (K, G, K), 'bias': (G, K)}
  random = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)
  params = {name: random(shape) for name, shape in shapes.items()}
  empty = recurrence.empty_state(B, K, cell, dtype)
  state = {name: random(part.shape).astype(part.dtype) for name, part in empty.items()}
  starts, valid = np.zeros((B, T), bool), np.ones((B, T), np.float32)
  starts[0, 0] = starts[1, [2, 3]] = starts[2, T - 1] = True
  valid[0, 4:] = valid[2, [1, 2]] = 0
  return params, random((B, T, D)), state, starts, valid


def loop(cell, params, x, state, starts, valid):
  """All outputs and the last state, a token at a time."""
  sigmoid = lambda x: 1 / (1 + jnp.exp(-x))
  outputs = []
  for t in range(T):
    before = {name: jnp.where(starts[:, t, None], 0, part) for name, part in state.items()}
    of = lambda name, inputs: jnp.tensordot(inputs, params[name], axes=1)
    gates = of('input_kernel', x[:, t]) + of('recurrent_kernel', before['h']) + params['bias']
    if cell == 'rnn':
      after = {'h': jnp.tanh(gates[:, 0])}
    else:
      i, f, g, o = (gates[:, gate] for gate in range(4))
      c = sigmoid(f) * before['c'] + sigmoid(i) * jnp.tanh(g)
      after = {'h': sigmoid(o) * jnp.tanh(c), 'c': c}
    kept = valid[:, t, None] > 0
    state = {name: jnp.where(kept, after[name], state[name]) for name in state}
    outputs.append(state['h'])
  return jnp.stack(outputs, axis=1), state


def gradients(of, *arrays):
  """Of a sum of all results, each of another weight, by all arrays."""

  def total(*arrays):
    results = jax.tree.leaves(of(*arrays))
    weights = [np.random.default_rng(i).normal(size=a.shape) for i, a in enumerate(results)]
    return sum((a * w).sum() for a, w in zip(results, weights, strict=True))

  return jax.jit(jax.grad(total, argnums=tuple(range(len(arrays)))))(*arrays)


@pytest.mark.parametrize('padded', [True, False])
@pytest.mark.parametrize('cell', CELLS)
def test_gradients_equal_a_loop(x64, cell, padded):
  params, x, state, starts, valid = random_case(cell, jnp.float64)
  if not padded:
    valid = np.ones_like(valid)
  layer = recurrence.Recurrence(K, cell, dtype=jnp.float64)
  given = {'starts_BxT': starts, 'valid_BxT': valid if padded else None}
  ours = lambda params, x, state: layer.apply({'params': params}, x, state, **given)
  slow = lambda *arrays: loop(cell, *arrays, starts, valid)
  same = lambda a, b: assert_close(a, b, 1e-12)
  jax.tree.map(same, ours(params, x, state), slow(params, x, state))
  jax.tree.map(same, gradients(ours, params, x, state), gradients(slow, params, x, state))


@pytest.mark.parametrize('cell', CELLS)
def test_gradients_in_bfloat16_are_near_those_in_float32(cell):
  params, x, state, starts, valid = random_case(cell, jnp.float32)

  def of_dtype(dtype):
    layer = recurrence.Recurrence(K, cell, dtype=dtype)
    narrow = recurrence.empty_state(B, K, cell, dtype)
    given = jax.tree.map(lambda part, like: part.astype(like.dtype), state, narrow)
    of = lambda params, state: layer.apply(
      {'params': params}, x, state, starts_BxT=starts, valid_BxT=valid
    )
    return gradients(of, params, given)

  def near(narrow, wide):
    assert np.abs(narrow.astype(np.float32) - wide).max() < 0.05 * np.abs(wide).max()

  jax.tree.map(near, of_dtype(jnp.bfloat16), of_dtype(jnp.float32))
