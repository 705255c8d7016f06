"""Sampling frequencies match the formulas."""

import functools

import jax
import numpy as np
import pytest

from ngrammer_jax.inference import sampling
from tests.checks import bad_input

V, SAMPLES = 6, 20_000
LOGITS = np.array([0.1, 2.0, 2.0, -1.0, 0.5, 1.0])


def expected_probabilities(temperature, top_k, top_p, min_p=0):
  """Computes probabilities with a loop over the tokens, sorted by probability, then by id."""
  probs = np.exp(LOGITS / temperature)
  order = sorted(range(V), key=lambda i: (-probs[i], i))[:top_k]
  probs = {i: probs[i] / sum(probs[j] for j in order) for i in order}
  nucleus, total = {}, 0.0
  for i in order:
    if top_p is None or total < top_p:
      nucleus[i] = probs[i]
    total += probs[i]
  nucleus = {i: prob for i, prob in nucleus.items() if prob >= min_p * max(nucleus.values())}
  return np.array([nucleus.get(i, 0) / sum(nucleus.values()) for i in range(V)])


@functools.cache
def compiled_sampler():
  """Returns one compiled program for all tests."""

  @jax.jit
  def sample_tokens(log_probs_BxV, sampler, key):
    keys_B = jax.random.split(jax.random.wrap_key_data(key), SAMPLES)
    return sampling.sample_tokens(log_probs_BxV, sampler, keys_B)

  return sample_tokens


def log_softmax(logits):
  logits = np.asarray(logits, np.float32)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True), dtype=np.float32)


def samples(config, logits=LOGITS, rows=SAMPLES):
  """Returns the samples of the first rows; all rows have the same logits."""
  log_probs_BxV = np.tile(log_softmax(logits), (SAMPLES, 1))
  sampler, key = sampling.SamplerParams.from_config(config, V), np.zeros(2, np.uint32)
  return np.asarray(compiled_sampler()(log_probs_BxV, sampler, key))[:rows]


@pytest.mark.parametrize(
  'temperature, top_k, top_p, min_p',
  [(1, None, None, 0), (0.5, None, None, 0), (2, 3, None, 0), (1, 1, None, 0), (1, None, 0.6, 0)]
  + [(1, 2, None, 0), (1.5, 4, 0.7, 0), (1, None, 1e-9, 0), (0.7, 100, 1.0, 0)]
  # Min-p of 0.3 keeps 3 tokens at temperature 1 and 5 at 2. Before top-p, it would leave 3 of 4.
  + [(1, None, None, 0.3), (2, None, None, 0.3), (2, None, 0.72, 0.3), (1, 5, None, 1.0)],
)
def test_frequencies(temperature, top_k, top_p, min_p):
  config = sampling.SamplingConfig(temperature, top_k, top_p, min_p=min_p)
  tokens = samples(config)
  frequencies = np.bincount(tokens, minlength=V) / SAMPLES
  probs = expected_probabilities(temperature, top_k or V, top_p, min_p)
  assert frequencies[probs == 0].sum() == 0
  # Five standard deviations of a frequency.
  np.testing.assert_allclose(frequencies, probs, atol=5 * 0.5 / SAMPLES**0.5)


def test_other_values_compile_no_other_program():
  for config in (sampling.SamplingConfig(min_p=0.1), sampling.SamplingConfig(0, 0, 1, 1)):
    samples(config)
  assert compiled_sampler()._cache_size() == 1


def test_greedy_selects_the_lowest_of_equally_likely_ids():
  assert set(samples(sampling.SamplingConfig(0), rows=5)) == {1}
  assert set(samples(sampling.SamplingConfig(0, top_k=2, top_p=0.1), rows=5)) == {1}


def test_top_k_keeps_exactly_k_of_equally_likely_tokens():
  assert set(samples(sampling.SamplingConfig(top_k=3), np.zeros(V), 500)) == {0, 1, 2}


def test_each_row_depends_on_its_own_logits_and_key_alone():
  """Other rows have no influence, and rows with equal logits are sampled independently."""
  config = sampling.SamplingConfig(0.8, 5, 0.95)
  tokens, sampler = samples(config), sampling.SamplerParams.from_config(config, V)
  assert len(set(tokens[:50])) > 1
  other_rows = log_softmax(np.random.default_rng(0).normal(size=(SAMPLES, V)))
  other_rows[:50] = log_softmax(LOGITS)
  other_tokens = np.asarray(compiled_sampler()(other_rows, sampler, np.zeros(2, np.uint32)))
  assert (other_tokens[:50] == tokens[:50]).all() and (other_tokens != tokens).any()
  other_key = compiled_sampler()(other_rows, sampler, np.ones(2, np.uint32))
  assert (np.asarray(other_key)[:50] != tokens[:50]).any()


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'temperature': -0.5}, 'temperature=-0.5 must be at least 0: 0 selects greedy decoding'),
    ({'temperature': float('nan')}, 'temperature=nan must be finite'),
    ({'top_k': -1}, 'top_k=-1 must be at least 0, or None: 0 is no limit'),
    ({'min_p': 1.5}, 'min_p=1.5 must be from 0 to 1, or None'),
    ({'top_p': 0.0}, 'top_p=0.0 must be above 0 and at most 1, or None'),
    ({'repetition_penalty': 0.9}, 'repetition_penalty=0.9 must be at least 1: 1 is no penalty'),
    ({'top_p': 1.5}, 'top_p=1.5 must be above 0 and at most 1, or None'),
  ],
)
def test_values_out_of_range_raise_bad_input(fields, message):
  with bad_input(message):
    sampling.SamplingConfig(**fields).check_values()


@pytest.mark.full
def test_greedy_compares_in_model_precision(x64):
  @jax.jit
  def sample_tokens(log_probs_BxV, sampler):
    return sampling.sample_tokens(log_probs_BxV, sampler, jax.random.split(jax.random.key(0), 1))

  log_probs_BxV = np.array([[-1.0, -1.0 + 1e-12]])
  sampler = sampling.SamplerParams.from_config(sampling.SamplingConfig(0), 2)
  assert sample_tokens(log_probs_BxV, sampler) == 1


def test_a_tiny_temperature_is_greedy():
  logits = [-5.0, -4.0, -4.5, -4.5, -5.0, -9.0]
  assert set(samples(sampling.SamplingConfig(1e-38), logits, 20)) == {1}


def test_penalty_of_used_tokens_equals_a_loop():
  rng = np.random.default_rng(0)
  logits_BxV, is_used_BxV = rng.normal(size=(3, V)), rng.integers(0, 2, (3, V)) > 0
  expected = logits_BxV.astype(np.float32)
  for b in range(3):
    for v in range(V):
      if is_used_BxV[b, v]:
        expected[b, v] = expected[b, v] / 1.5 if expected[b, v] > 0 else expected[b, v] * 1.5
  logits_BxV = logits_BxV.astype(np.float32)
  penalized = sampling.penalize(logits_BxV, is_used_BxV, np.float32(1.5))
  np.testing.assert_allclose(penalized, expected, rtol=1e-6)
  assert (expected[is_used_BxV] < logits_BxV[is_used_BxV]).all()


def test_used_tokens_are_those_that_count():
  is_used_BxV = np.zeros((2, V), bool)
  is_used_BxV[0, 5] = True
  tokens_BxT, counts_BxT = np.array([[1, 2, 1], [3, 3, 0]]), np.array([[1, 0, 0], [0, 1, 0]]) > 0
  marked = np.asarray(sampling.mark_tokens(jax.numpy.array(is_used_BxV), tokens_BxT, counts_BxT))
  assert [np.flatnonzero(row).tolist() for row in marked] == [[1, 5], [3]]
