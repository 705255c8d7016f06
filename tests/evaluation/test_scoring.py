"""Texts scored side by side are scored as if each were read alone."""

import jax
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.data import token_cache
from ngrammer_jax.evaluation import scoring
from ngrammer_jax.models import config as model_config
from tests.checks import assert_close
from tests.evaluation import by_hand

LENGTH, START = 8, 10


def test_documents_of_any_length():
  """In a model without a memory, where only n-grams look across the seam of two segments."""
  ngram = model_config.NGramConfig(clusters=8, vocabulary_size=64, dim=4, orders=(2, 3))
  config = model_config.ModelConfig(layers=1, width=16, heads=2, feed_forward_width=24, ngram=ngram)
  reader = by_hand.Reader(config, 11, LENGTH)
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 10, n) for n in (3, 17, 8, 0, 1)]  # no multiple of the rows
  scorer = scoring.Scorer(reader.model, sharding.make_mesh(devices=jax.devices()[:1]), 2)
  given = reader.variables['params'], reader.variables['codebook'], texts, START, LENGTH
  found = list(scorer.documents(*given))
  assert [len(nats) for nats in found] == [len(text) for text in texts]
  for text, nats in zip(texts, found, strict=True):
    assert nats.dtype == np.float64
    if not len(text):
      continue
    alone = token_cache.TokenSplit(text, np.array([0]), None, START)
    ends = [(first, min(first + LENGTH, len(text))) for first in range(0, len(text), LENGTH)]
    assert_close(nats, reader(alone, ends)[0], 1e-5)
