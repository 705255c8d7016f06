"""Scores by distance, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers.attention import relative
from ngrammer_jax.layers.context import Context, Keys, Positions
from tests import jaxprs
from tests.checks import random_variables

B, T, S, N, H, D = 2, 3, 7, 2, 4, 6
QUERIES = np.random.default_rng(0).normal(size=(B, T, N, H))
CONTEXT = Context(keys=Keys(key_documents_BxS=np.zeros((B, S), int)))


def in_order_and_shuffled(layer, variables, context=CONTEXT):
  """Scores of keys in order, and the same from keys in another order with their distances."""
  order = np.random.default_rng(1).permutation(S)
  distance = np.broadcast_to(np.arange(S - T, S)[:, None] - order, (B, T, S))

  def run_both():
    term = relative.DistanceTerm(QUERIES, *layer.apply(variables, context, N, H))
    return relative.scores(term), relative.scores(term, distance)

  ordered, shuffled = jax.device_get(jax.jit(run_both)())
  return ordered, shuffled[..., np.argsort(order)]


def visible():
  return ((b, n, t, j) for b, n, t, j in np.ndindex(B, N, T, S) if j <= t + S - T)


@pytest.mark.parametrize('clamp', [None, 2])
def test_sinusoids_equal_slow_loop_but_for_what_all_keys_share(x64, clamp):
  layer = relative.RelativePosition(D, clamp, dtype=jnp.float64)
  variables = random_variables(layer, CONTEXT, N, H, dtype='float64')
  kernel = np.asarray(variables['params']['position']['kernel'])

  def encoding(distance):
    distance = distance if clamp is None else min(distance, clamp)
    angles = [distance / 10_000 ** (2 * k / D) for k in range(D // 2)]
    return np.array([*np.sin(angles), *np.cos(angles)])

  for scores in in_order_and_shuffled(layer, variables):
    for b, n, t, j in visible():
      r, r_0 = (encoding(d) @ kernel[:, n] for d in (t + S - T - j, 0))
      expected = QUERIES[b, t, n] @ (r - r_0)
      assert abs(scores[b, n, t, j] - expected) < 1e-12


@pytest.mark.parametrize('max_length, clamp', [(9, None), (4, None), (9, 3)])
def test_learned_distances_equal_slow_loop(x64, max_length, clamp):
  layer = relative.ShawPosition(max_length, clamp, jnp.float64)
  variables = random_variables(layer, CONTEXT, N, H, dtype='float64')
  a, b_ = (np.asarray(variables['params'][f'distance_{k}']) for k in ('embedding', 'bias'))
  longest = min(max_length, clamp or max_length) - 1
  for scores in in_order_and_shuffled(layer, variables):
    for b, n, t, j in visible():
      row = max_length - 1 - min(t + S - T - j, longest)  # the last row is distance 0
      expected = QUERIES[b, t, n] @ a[row, n] + b_[row, n] / H**0.5
      assert abs(scores[b, n, t, j] - expected) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize('first, rows', [(0, 9), (1, 3)])
def test_a_table_of_all_heads_equals_slow_loop(x64, first, rows):
  """Beyond it the last row stands for all."""
  table = jnp.asarray(np.random.default_rng(2).normal(size=(rows, H)))
  layer = relative.TablePosition(jnp.float64)
  context = Context(
    keys=CONTEXT.keys.replace(sees_itself=not first), positions=Positions(params=(table,))
  )
  for scores in in_order_and_shuffled(layer, {}, context):
    for b, n, t, j in visible():
      row = min(max(t + S - T - j - first, 0), rows - 1)
      assert abs(scores[b, n, t, j] - QUERIES[b, t, n] @ table[row]) < 1e-12


def test_a_low_frequency_keeps_its_digits():
  """The last cosine of 1024 features is 1 - 5e-9 at distance 1, which float32 rounds to 1."""
  last = np.asarray(jax.jit(lambda: relative.encodings(2, 1024))())[0, -1]
  exact = np.cos(10_000 ** (-1022 / 1024)) - 1
  assert abs(last / exact - 1) < 1e-5


def test_distances_are_not_projected_pair_by_pair():
  """Time and memory are linear in the keys: no encoding for every query and key."""
  q = np.zeros((1, 64, 2, 4), 'float32')
  layer = relative.RelativePosition(width=8)
  args = Context(keys=Keys(key_documents_BxS=np.zeros((1, 128)))), 2, 4
  variables = random_variables(layer, *args)
  score = lambda q: relative.scores(relative.DistanceTerm(q, *layer.apply(variables, *args)))
  largest = jaxprs.largest_array(score, q)
  assert largest <= 2 * 64 * 129  # the scores, padded by one
