"""Choices scored after one reading of the prefix are scored as if each were read with it."""

import dataclasses

import jax
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.evaluation import ranking
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.checks import random_variables
from tests.evaluation import by_hand

V, START = 13, 1
NGRAM = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)
BASE = model_config.ModelConfig(
  layers=2,
  width=16,
  heads=2,
  feed_forward_width=24,
  scan_layers=False,
  dtype='float64',
  ngram=NGRAM,
)
CHANGES = {
  'n-grams': {},
  'primer, scanned': {'convolution': 3, 'scan_layers': True},
  'memory': {
    'position': 'relative',
    'memory': model_config.MemoryConfig(6, same_length='memory_and_self'),
  },
  'spans, later keys': {
    'memory': model_config.MemoryConfig(8, same_length='memory_alone'),
    'span': model_config.SpanConfig(limit=8, ramp=2, initial=0.5),
  },
  'spans': {
    'position': 'table',
    'positional': model_config.PositionalConfig(max_length=8),
    'memory': model_config.MemoryConfig(8, same_length='memory_alone'),
    'span': model_config.SpanConfig(limit=8, ramp=2, initial=0.5),
  },
}
SLOW = pytest.mark.slow
CASES = [
  # Change, whether prefixes see all of themselves, layers, the longest prefix.
  pytest.param('primer, scanned', True, 2, 16),
  pytest.param('spans', False, 1, 16),
  *(pytest.param(change, False, 2, 40, marks=SLOW) for change in CHANGES),
  *(
    pytest.param(change, True, 2, 40, marks=SLOW)
    for change in ('n-grams', 'primer, scanned', 'spans, later keys')
  ),
]


@pytest.mark.parametrize('change, bidirectional, layers, longest', CASES)
def test_as_if_each_choice_were_read_with_its_prefix(x64, change, bidirectional, layers, longest):
  config = dataclasses.replace(BASE, layers=layers, **CHANGES[change])
  config.check()
  model = transformer.TransformerLM(config, V)
  empty = transformer.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 2), np.int32), empty, dtype='float64')
  rng = np.random.default_rng(0)
  draw = lambda low, high: rng.integers(2, V, rng.integers(low, high)).astype(np.int32)
  prefixes = [np.insert(draw(1, longest), 0, START) for _ in range(7)]  # no multiple of the rows
  fewest = 1 if longest > 16 else 3
  choices = [[draw(1, 6) for _ in range(rng.integers(fewest, 5))] for _ in prefixes]

  @jax.jit
  def scores(tokens, prefix):
    starts = np.broadcast_to(np.arange(tokens.shape[1] - 1) == 0, prefix.shape)
    memory = transformer.empty_memory(config, len(tokens))
    how = {'starts_BxT': starts, 'prefix_BxT': prefix if bidirectional else None}
    hidden, _, _ = model.apply(variables, tokens[:, :-1], memory, **how)
    return model.apply(variables, hidden, tokens[:, 1:], method='scores').nll_BxT

  # All choices with their prefixes, padded: what comes later changes nothing.
  places = [(i, choice) for i, some in enumerate(choices) for choice in some]
  both = [np.concatenate([prefixes[i], choice]) for i, choice in places]
  length = max(map(len, both))
  whole = np.stack([np.pad(ids, (0, length - len(ids))) for ids in both])
  seen = np.stack([np.arange(length - 1) < len(prefixes[i]) for i, _ in places])
  nll = np.asarray(scores(whole, seen))
  expected = [[] for _ in prefixes]
  for (i, _), ids, row in zip(places, both, nll, strict=True):
    expected[i].append(-row[len(prefixes[i]) - 1 : len(ids) - 1].sum())

  rank = ranking.Ranker(model, sharding.make_mesh(devices=jax.devices()[:2]), 3, bidirectional)
  looked_at = by_hand.watched(rank, '_score')
  found = dict(rank(variables['params'], variables['codebook'], prefixes, choices))
  assert sorted(found) == list(range(len(prefixes)))
  for i in found:
    np.testing.assert_allclose(found[i], expected[i], rtol=1e-9)
  # By all hosts.
  assert looked_at and all(array.is_fully_replicated for array in looked_at)


def test_examples_of_all_sizes_are_put_together():
  """Every example is scored once, with its own choices, in arrays of few shapes."""
  config = dataclasses.replace(BASE, dtype='float32')
  model = transformer.TransformerLM(config, V)
  rank = ranking.Ranker(model, sharding.make_mesh(devices=jax.devices()[:2]), 3)
  assert rank.rows == 4
  shapes = set()

  def weighted(ids, valid):
    """A number that any other token, or place, or token counted as padding would change."""
    valid = np.asarray(valid)
    return (np.asarray(ids) * valid * np.arange(1, valid.shape[-1] + 1)).sum(axis=-1)

  def score(params, codebook, prefix_BxP, valid_BxP, choices_KxBxC, valid_KxBxC):
    shapes.add((*prefix_BxP.shape, *choices_KxBxC.shape))
    return weighted(prefix_BxP, valid_BxP) * 1000 + weighted(choices_KxBxC, valid_KxBxC)

  rank._score = score
  for seed in range(4):
    shapes.clear()
    rng = np.random.default_rng(seed)
    draw = lambda longest, rng=rng: rng.integers(1, V, rng.integers(1, longest))
    prefixes = [draw(70) for _ in range(30)]
    number = (lambda rng=rng: rng.integers(1, 6)) if seed % 2 else lambda: 5
    choices = [[draw(60 if seed > 1 else 20) for _ in range(number())] for _ in prefixes]
    found = list(rank({}, {}, prefixes, choices))
    assert sorted(i for i, _ in found) == list(range(30)), f'seed {seed}'
    ones = lambda ids: weighted(ids, np.ones_like(ids))
    for i, scores in found:
      expected = [ones(prefixes[i]) * 1000 + ones(choice) for choice in choices[i]]
      assert scores.tolist() == expected, f'seed {seed}, example {i}'
    _, P, K, B, C = map(set, zip(*shapes, strict=True))
    assert B == {4} and P <= {16, 32, 64, 128} and C <= ({32, 64} if seed > 1 else {32}), shapes
    assert K <= ({1, 2, 4, 8} if seed % 2 else {5}), shapes
