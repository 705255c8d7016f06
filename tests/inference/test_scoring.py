"""Documents scored in a batch have the same scores as documents scored one by one."""

import jax
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import token_cache
from ngrammer_jax.inference import engine as inference
from tests.checks import assert_close
from tests.inference import reference

LENGTH, START = 8, 10


def test_documents_of_any_length_match_the_reference():
  """The model has no memory: only n-grams cross the boundary of two segments."""
  ngram = model_config.NGramConfig(clusters=8, vocabulary_size=64, dim=4, orders=(2, 3))
  config = model_config.ModelConfig(layers=1, width=16, heads=2, feed_forward_width=24, ngram=ngram)
  reader = reference.SegmentReader(config, 11, LENGTH)
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 10, n) for n in (3, 17, 8, 0, 1)]  # not a multiple of the rows
  engine = inference.Engine(reader.model, sharding.make_mesh(devices=jax.devices()[:1]))
  results = list(engine.score_documents(reader.variables, texts, START, LENGTH, max_rows=2))
  assert [len(nats) for nats in results] == [len(text) for text in texts]
  for text, nats in zip(texts, results, strict=True):
    assert nats.dtype == np.float64
    if not len(text):
      continue
    split = token_cache.TokenSplit(text, np.array([0]), None, START)
    segments = [(first, min(first + LENGTH, len(text))) for first in range(0, len(text), LENGTH)]
    assert_close(nats, reader(split, segments)[0], 1e-5)
