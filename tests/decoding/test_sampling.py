"""Tokens come out as often as the formula says."""

import functools

import jax
import numpy as np
import pytest

from ngrammer_jax.decoding import sampling
from tests.checks import bad_input

V, DRAWS = 6, 20_000
LOGITS = np.array([0.1, 2.0, 2.0, -1.0, 0.5, 1.0])


def expected(temperature, top_k, top_p):
  """Probabilities by a loop over the tokens, the most likely first, lower ids before higher."""
  probs = np.exp(LOGITS / temperature)
  order = sorted(range(V), key=lambda i: (-probs[i], i))[:top_k]
  probs = {i: probs[i] / sum(probs[j] for j in order) for i in order}
  kept, total = {}, 0.0
  for i in order:
    if top_p is None or total < top_p:
      kept[i] = probs[i]
    total += probs[i]
  return np.array([kept.get(i, 0) / sum(kept.values()) for i in range(V)])


@functools.cache
def compiled():
  """One program for all that is drawn."""

  @jax.jit
  def draw(log_probs_BxV, limits, first_key):
    keys_B = jax.random.split(jax.random.wrap_key_data(first_key), DRAWS)
    return sampling.draw(log_probs_BxV, limits, keys_B)

  return draw


def log_probs_of(logits):
  logits = np.asarray(logits, np.float32)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True), dtype=np.float32)


def draws(how, logits=LOGITS, rows=DRAWS):
  """What is drawn from the same logits by the first rows of all."""
  log_probs_BxV = np.tile(log_probs_of(logits), (DRAWS, 1))
  limits, key = sampling.Limits.of(how, V), np.zeros(2, np.uint32)
  return np.asarray(compiled()(log_probs_BxV, limits, key))[:rows]


@pytest.mark.parametrize(
  'temperature, top_k, top_p',
  [(1, None, None), (0.5, None, None), (2, 3, None), (1, 1, None), (1, None, 0.6), (1, 2, None)]
  + [(1.5, 4, 0.7), (1, None, 1e-9), (0.7, 100, 1.0)],
)
def test_frequencies(temperature, top_k, top_p):
  drawn = draws(sampling.Sampling(temperature, top_k, top_p))
  share = np.bincount(drawn, minlength=V) / DRAWS
  probs = expected(temperature, top_k, top_p)
  assert share[probs == 0].sum() == 0
  # Five standard deviations of a share.
  np.testing.assert_allclose(share, probs, atol=5 * 0.5 / DRAWS**0.5)


def test_greedy_takes_the_lowest_of_the_most_likely():
  assert set(draws(sampling.Sampling(0), rows=5)) == {1}
  assert set(draws(sampling.Sampling(0, top_k=2, top_p=0.1), rows=5)) == {1}


def test_of_equal_tokens_exactly_k_stay():
  assert set(draws(sampling.Sampling(top_k=3), np.zeros(V), 500)) == {0, 1, 2}


def test_each_row_draws_by_its_own_key_alone():
  """Whatever is drawn from in other rows, and by rows of the same logits each anew."""
  how = sampling.Sampling(0.8, 5, 0.95)
  together, limits = draws(how), sampling.Limits.of(how, V)
  assert len(set(together[:50])) > 1
  others = log_probs_of(np.random.default_rng(0).normal(size=(DRAWS, V)))
  others[:50] = log_probs_of(LOGITS)
  found = np.asarray(compiled()(others, limits, np.zeros(2, np.uint32)))
  assert (found[:50] == together[:50]).all() and (found != together).any()
  other_key = compiled()(others, limits, np.ones(2, np.uint32))
  assert (np.asarray(other_key)[:50] != together[:50]).any()


@pytest.mark.parametrize(
  'how, message',
  [
    ({'temperature': -0.5}, 'temperature=-0.5 must be at least 0 (0 takes the most likely token)'),
    (
      {'temperature': float('nan')},
      'temperature=nan must be at least 0 (0 takes the most likely token)',
    ),
    ({'top_k': 0}, 'top_k=0 must be at least 1; leave it out for all tokens'),
    ({'top_p': 0.0}, 'top_p=0.0 must be above 0 and at most 1'),
    ({'top_p': 1.5}, 'top_p=1.5 must be above 0 and at most 1'),
  ],
)
def test_what_cannot_be_drawn_from(how, message):
  with bad_input(message):
    sampling.Sampling(**how).check()


def test_greedy_decides_in_the_precision_of_the_model(x64):
  @jax.jit
  def draw(log_probs_BxV, limits):
    return sampling.draw(log_probs_BxV, limits, jax.random.split(jax.random.key(0), 1))

  log_probs_BxV = np.array([[-1.0, -1.0 + 1e-12]])
  assert draw(log_probs_BxV, sampling.Limits.of(sampling.Sampling(0), 2)) == 1


def test_a_tiny_temperature_is_greedy():
  assert set(draws(sampling.Sampling(1e-38), [-5.0, -4.0, -4.5, -4.5, -5.0, -9.0], 20)) == {1}
