"""Interpolated Kneser-Ney equals a slow loop over dicts, and its probabilities sum to 1."""

import collections

import numpy as np
import pytest

from studies import kneser_ney

VOCABULARY = 5
ORDER = 3


def slow_probability(tokens, context, token, order, highest):
  """The formula, with counts of tuples."""
  if order == 0:
    return 1 / VOCABULARY
  grams = collections.Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))
  if order < highest:
    longer = {tuple(tokens[i : i + order + 1]) for i in range(len(tokens) - order)}
    grams = collections.Counter(gram[1:] for gram in longer)
  n1, n2, n3, n4 = (max(sum(c == n for c in grams.values()), 1) for n in (1, 2, 3, 4))
  y = n1 / (n1 + 2 * n2)
  discounts = [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
  discount = lambda c: float(np.clip(discounts[min(c, 3)], 0, min(c, 3)))
  context = tuple(context[len(context) - order + 1 :])
  lower = slow_probability(tokens, context[1:], token, order - 1, highest)
  same = {gram: c for gram, c in grams.items() if gram[:-1] == context and c}
  if not same:
    return lower
  total = sum(same.values())
  count = same.get((*context, token), 0)
  gamma = sum(discount(c) for c in same.values()) / total
  return max(count - discount(count), 0) / total + gamma * lower


@pytest.mark.parametrize('seed', range(3))
def test_probabilities_equal_the_formula(seed):
  rng = np.random.default_rng(seed)
  train = rng.choice(VOCABULARY, 60, p=[0.5, 0.2, 0.2, 0.1, 0.0])
  text = rng.choice(VOCABULARY, 30)
  model = kneser_ney.KneserNey(train, VOCABULARY, ORDER)
  expected = [
    slow_probability(train.tolist(), text[max(0, i - ORDER + 1) : i].tolist(), token, n, ORDER)
    for i, token in enumerate(text.tolist())
    for n in [min(i + 1, ORDER)]
  ]
  np.testing.assert_allclose(model.probabilities(text), expected, rtol=1e-12)


def test_probabilities_sum_to_1():
  rng = np.random.default_rng(0)
  train = rng.choice(VOCABULARY, 100)
  model = kneser_ney.KneserNey(train, VOCABULARY, ORDER)
  for context in ([0, 1], [4, 4], [2, 3]):
    last = [model.probabilities(np.array([*context, token]))[-1] for token in range(VOCABULARY)]
    assert sum(last) == pytest.approx(1, rel=1e-12)


def test_the_weight_of_a_mixture_has_the_lowest_loss():
  model, counts = np.array([0.5, 0.1, 0.5]), np.array([0.1, 0.5, 0.1])
  weight = kneser_ney.best_weight(model, counts)
  losses = [
    kneser_ney.mixture_nats(model, counts, w) for w in (weight - 0.01, weight, weight + 0.01)
  ]
  assert min(losses) == losses[1]
