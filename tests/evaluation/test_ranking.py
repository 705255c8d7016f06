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


@pytest.mark.parametrize('bidirectional', [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize('change', CHANGES)
def test_as_if_each_choice_were_read_with_its_prefix(x64, change, bidirectional):
  config = dataclasses.replace(BASE, **CHANGES[change])
  config.check()
  if bidirectional and config.position in model_config.BACKWARD_POSITIONS:
    pytest.skip('nothing is known of later tokens')
  model = transformer.TransformerLM(config, V)
  empty = transformer.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 2), np.int32), empty, dtype='float64')
  params, codebook = variables['params'], variables['codebook']
  rng = np.random.default_rng(0)
  draw = lambda low, high: rng.integers(2, V, rng.integers(low, high)).astype(np.int32)
  prefixes = [np.insert(draw(1, 40), 0, START) for _ in range(11)]
  choices = [[draw(1, 6) for _ in range(rng.integers(1, 5))] for _ in prefixes]

  @jax.jit
  def scores(tokens, targets, prefix):
    starts = np.arange(tokens.shape[1])[None] == 0
    memory = transformer.empty_memory(config, 1)
    how = {'starts_BxT': starts, 'prefix_BxT': prefix}
    hidden, _, _ = model.apply(variables, tokens, memory, **how)
    return model.apply(variables, hidden, targets, method='scores').nll_BxT

  rank = ranking.Ranker(model, sharding.make_mesh(), 8, bidirectional)
  found = dict(rank(params, codebook, prefixes, choices))
  assert sorted(found) == list(range(len(prefixes)))
  for i, prefix in enumerate(prefixes):
    assert len(found[i]) == len(choices[i])
    for score, choice in zip(found[i], choices[i], strict=True):
      both = np.concatenate([prefix, choice])[None]
      seen = np.arange(both.shape[1] - 1)[None] < len(prefix) if bidirectional else None
      nll = scores(both[:, :-1], both[:, 1:], seen)
      np.testing.assert_allclose(score, -nll[0, len(prefix) - 1 :].sum(), rtol=1e-9)
