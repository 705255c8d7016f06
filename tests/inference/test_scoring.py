"""Documents scored in a batch have the same scores as documents scored one by one."""

import dataclasses

import jax
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.models import spans
from tests.checks import assert_close
from tests.inference import reference

LENGTH, START = 8, 10


@pytest.mark.full
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
    split = token_split.TokenSplit(text, np.array([0]), None, START)
    segments = [(first, min(first + LENGTH, len(text))) for first in range(0, len(text), LENGTH)]
    assert_close(nats, reader(split, segments)[0], 1e-5)
  # Without a document start, as texts whose first token is the start of their document.
  for text, nats in zip(
    texts, engine.score_documents(reader.variables, texts, None, LENGTH, max_rows=2), strict=True
  ):
    assert len(nats) == max(len(text) - 1, 0)
    if len(nats):
      (same,) = engine.score_documents(reader.variables, [text[1:]], text[0], LENGTH, max_rows=2)
      assert_close(nats, same, 1e-6)


SPANS = model_config.ModelConfig(
  layers=2,
  width=16,
  heads=2,
  feed_forward_width=24,
  position='table',
  positional=model_config.PositionalConfig(max_length=256),
  memory=model_config.MemoryConfig(256, same_length='memory_alone'),
  span=model_config.SpanConfig(limit=256, ramp=4),
)


def params_with_spans(params, tokens):
  """Parameters whose longest span is so many tokens."""
  spans = {'layer_0': [0, tokens], 'layer_1': [tokens / 2, 0]}
  for layer, of_heads in spans.items():
    attention = params[layer]['attention']
    attention = attention | {'span': {'span': np.array(of_heads, np.float32) / 256}}
    params = params | {layer: params[layer] | {'attention': attention}}
  return params


def test_the_cache_has_as_many_slots_as_the_longest_span_needs():
  params = {f'layer_{i}': {'attention': {}} for i in range(2)}
  slots = lambda tokens, config=SPANS: spans.cache_slots(config, params_with_spans(params, tokens))
  # The ramp of 4 tokens is added, and one.
  assert [slots(tokens) for tokens in (0, 59, 60, 123, 124, 256)] == [64, 64, 128, 128, 256, 256]
  assert slots(np.nan) == 64  # the loss says what is wrong
  shorter = dataclasses.replace(SPANS, memory=dataclasses.replace(SPANS.memory, length=40))
  assert slots(0, shorter) == 40
  for change in ({'kind': 'dynamic'}, {'renormalize': False}):
    all_slots = dataclasses.replace(SPANS, span=dataclasses.replace(SPANS.span, **change))
    assert slots(0, all_slots) == 256
  assert spans.cache_slots(dataclasses.replace(SPANS, span=None), params) == 256


@pytest.mark.slow
def test_a_cache_as_long_as_the_spans_scores_as_the_whole_one(monkeypatch):
  reader = reference.SegmentReader(SPANS, 11, LENGTH)
  params = params_with_spans(reader.variables['params'], 59)
  variables = reader.variables | {'params': params}
  text = np.random.default_rng(0).integers(0, 10, 200)
  device, lengths = sharding.make_mesh(devices=jax.devices()[:1]), []

  def nats():
    engine = inference.Engine(reader.model, device)
    lengths.append(spans.cache_slots(SPANS, params))
    return next(engine.score_documents(variables, [text], START, 32, max_rows=1))

  trimmed = nats()
  monkeypatch.setattr(spans, 'cache_slots', lambda *_: 256)
  whole = nats()
  assert lengths == [64, 256]
  assert_close(trimmed, whole, 1e-5)
  # And a cache that is too short for them is told apart.
  monkeypatch.setattr(spans, 'cache_slots', lambda *_: 16)
  assert np.abs(nats() - whole).max() > 1e-3
