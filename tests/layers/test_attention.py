import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import Attention, documents, position
from tests.checks import assert_close

B, T, D, N, H = 2, 6, 8, 2, 4

# Row 0 has a second document with a prefix of two tokens, row 1 a prefix and padding.
DOCUMENTS = np.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
PREFIX = np.array([[0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
VALID = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def visible(prefix=PREFIX):
  numbers = documents.with_padding(jnp.asarray(DOCUMENTS), jnp.asarray(VALID))
  return documents.visible(numbers, numbers, None if prefix is None else jnp.asarray(prefix))


def random_parameters(rng, bias=False, per_dim_scale=False):
  params = {name: {'kernel': rng.normal(size=(D, N, H))} for name in ('query', 'key', 'value')}
  params['out'] = {'kernel': rng.normal(size=(N, H, D))}
  if bias:
    for name, projection in params.items():
      projection['bias'] = rng.normal(size=D if name == 'out' else (N, H))
  if per_dim_scale:
    params['per_dim_scale'] = rng.normal(size=H)
  return params


def turned(x_H, place):
  """x rotated by its position, feature j together with j + H/2."""
  y = np.zeros(H)
  for j in range(H // 2):
    angle = place / 10_000 ** (2 * j / H)
    y[j] = x_H[j] * np.cos(angle) - x_H[j + H // 2] * np.sin(angle)
    y[j + H // 2] = x_H[j + H // 2] * np.cos(angle) + x_H[j] * np.sin(angle)
  return y


def slow_attention(x, params, rotated):
  """Attention over the documents, prefix and padding above, one query at a time."""
  project = lambda name, v, n: (
    v @ params[name]['kernel'][:, n] + params[name].get('bias', np.zeros((N, H)))[n]
  )
  scale_H = np.ones(H) / np.sqrt(H)
  if 'per_dim_scale' in params:
    scale_H *= 1.442695041 * np.log1p(np.exp(params['per_dim_scale']))
  out = np.zeros((B, T, D)) + params['out'].get('bias', 0)
  for b, t, n in np.ndindex(B, T, N):
    query = project('query', x[b, t], n)
    query = (turned(query, t) if rotated else query) * scale_H
    weights, values = [], []
    for s in range(T):
      same = DOCUMENTS[b, s] == DOCUMENTS[b, t] and VALID[b, s] == VALID[b, t]
      if same and (s <= t or PREFIX[b, s]):
        key = project('key', x[b, s], n)
        weights.append(np.exp(query @ (turned(key, s) if rotated else key)))
        values.append(project('value', x[b, s], n))
    context = np.array(weights) / sum(weights) @ np.array(values)
    out[b, t] += context @ params['out']['kernel'][n]
  return out


@pytest.mark.parametrize(
  'bias, per_dim_scale, rotated', [(False, False, False), (True, True, True)]
)
def test_equals_slow_loop(x64, bias, per_dim_scale, rotated):
  rng = np.random.default_rng(0)
  x, params = rng.normal(size=(B, T, D)), random_parameters(rng, bias, per_dim_scale)
  layer = Attention(heads=N, bias=bias, per_dim_scale=per_dim_scale, dtype=jnp.float64)
  rotation = position.rotation(jnp.arange(T), H, dtype=jnp.float64) if rotated else None
  y, _ = layer.apply({'params': params}, x, visible(), rotation)
  assert_close(y, slow_attention(x, params, rotated), 1e-12)


@pytest.mark.parametrize('prefix', [None, PREFIX])
def test_gradient_flows_from_exactly_the_visible_keys(prefix):
  x = jax.random.normal(jax.random.key(0), (B, T, D))
  layer, seen = Attention(heads=N), visible(prefix)
  variables = {'params': random_parameters(np.random.default_rng(1))}
  jacobian = jax.jit(jax.jacrev(lambda x: layer.apply(variables, x, seen)[0].sum(axis=-1)))(x)
  reached = jnp.abs(jacobian).sum(axis=-1) > 0  # [row, query, row, key]
  rows = jnp.arange(B)
  assert reached[rows, :, rows].tolist() == seen.tolist()
  assert not reached[0, :, 1].any() and not reached[1, :, 0].any()
  # The causal triangle, but for what a prefix lets through.
  later = np.triu(np.ones((T, T), bool), 1)
  assert bool((seen & later).any()) == (prefix is not None)
  assert bool(seen[0, 2, 3]) == (prefix is not None) and not seen[0, 2, 4]


def test_query_that_sees_nothing_stays_finite():
  x = jax.random.normal(jax.random.key(0), (1, 3, D))
  layer, seen = Attention(heads=N), jnp.zeros((1, 3, 3), bool)
  variables = {'params': random_parameters(np.random.default_rng(1))}
  loss = lambda x: jnp.square(layer.apply(variables, x, seen)[0]).sum()
  y, gradient = jax.jit(jax.value_and_grad(loss))(x)
  assert jnp.isfinite(y) and jnp.isfinite(gradient).all()


def test_bfloat16_keeps_the_softmax_in_float32():
  x = jax.random.normal(jax.random.key(0), (B, T, D), jnp.bfloat16)
  layer = Attention(heads=N, per_dim_scale=True, dtype=jnp.bfloat16)
  params = random_parameters(np.random.default_rng(1), per_dim_scale=True)
  (y, _), state = layer.apply({'params': params}, x, visible(), mutable=['intermediates'])
  (probs,) = state['intermediates']['probs']
  assert y.dtype == jnp.bfloat16 and probs.dtype == jnp.float32
  # bfloat16 would miss 1 by up to 2^-9 and hold few different numbers.
  assert_close(probs.sum(axis=-1), np.ones((B, N, T)), 1e-6)
  assert (probs != probs.astype(jnp.bfloat16)).any()


def test_bfloat16_scores_are_not_rounded():
  # The second key scores 1.001 times as much as the first: one number in bfloat16.
  x = jnp.asarray([[[1, 0], [1, 1 / 32]]], jnp.bfloat16)
  identity = jnp.eye(2)[:, None]
  params = {name: {'kernel': identity} for name in ('key', 'value')}
  params |= {'query': {'kernel': 16 * identity}, 'out': {'kernel': jnp.eye(2)[None]}}
  layer = Attention(heads=1, dtype=jnp.bfloat16)
  seen = jnp.ones((1, 2, 2), bool)
  _, state = layer.apply({'params': params}, x, seen, mutable=['intermediates'])
  (probs,) = state['intermediates']['probs']
  assert probs[0, 0, 1, 1] > probs[0, 0, 1, 0]
