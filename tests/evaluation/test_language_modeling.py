"""Every token scored once, and the same result however it is computed."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.data import token_cache
from ngrammer_jax.evaluation import language_modeling
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.conftest import random_variables
from tests.training.test_devices import mesh_of


@pytest.fixture
def model_and_variables(tiny):
  config = tiny()
  model = transformer.TransformerLM(config.model, 11)
  memory = transformer.empty_memory(config.model, 1)
  variables = model.init(jax.random.key(0), np.zeros((1, 1), np.int32), memory)
  return model, jax.device_get(jax.tree.map(lambda x: x, sharding.nn.unbox(variables)))


def split_of(n):
  tokens = np.random.RandomState(1).randint(0, 10, n).astype(np.uint16)
  return token_cache.TokenSplit(tokens, np.array([0, n // 3]), text_bytes=2 * n, document_start=10)


def evaluate(model_and_variables, split, mesh=(1, 1, 1), streams=3, length=8, rows=2, **given):
  model, variables = model_and_variables
  evaluator = language_modeling.Evaluator(model, mesh_of(mesh), streams, length, rows)
  return evaluator(variables['params'], variables['codebook'], split, **given)


def by_hand(model_and_variables, split, streams, length):
  """One stream after the other, one segment after the other, one token at a time to sum."""
  model, variables = model_and_variables
  n = len(split.tokens)
  share = math.ceil(n / streams)
  nll, correct = [], []
  for first in range(0, n, share):
    memory = transformer.empty_memory(model.config, 1)
    for begin in range(first, min(first + share, n), length):
      end = min(begin + length, first + share, n)
      inputs, targets, starts = split.window(begin, end - begin)
      hidden, memory, _ = model.apply(variables, inputs[None], memory, starts_BxT=starts[None])
      logits = np.asarray(model.apply(variables, hidden, method='logits')[0], np.float64)
      for row, target in zip(logits, targets, strict=True):
        nll.append(np.log(np.exp(row).sum()) - row[target])
        correct.append(row.argmax() == target)
  return len(nll), np.mean(nll), np.mean(correct)


def test_with_a_memory_equals_a_loop_that_computes_the_past_again(tiny):
  """Of the inputs of the layers, as in training; evaluation keeps keys and values."""
  memory = model_config.MemoryConfig(length=12)
  config = tiny(model={'position': 'relative', 'memory': memory}).model
  model = transformer.TransformerLM(config, 11)
  tokens, empty = np.zeros((1, 1), np.int32), transformer.empty_memory(config, 1)
  variables = random_variables(model, tokens, empty)
  split = split_of(61)
  result = evaluate((model, variables), split)
  tokens, nll, accuracy = by_hand((model, variables), split, 3, 8)
  assert result['nll_nats_per_token'] == pytest.approx(nll, rel=1e-5)
  assert result['top1_accuracy'] == pytest.approx(accuracy)
  assert result['protocol']['memory_length'] == 12
  shorter = dataclasses.replace(config, memory=model_config.MemoryConfig(length=2))
  other = evaluate((transformer.TransformerLM(shorter, 11), variables), split)
  assert other['nll_nats_per_token'] != pytest.approx(nll, rel=1e-3)


def test_equals_a_loop_by_hand(model_and_variables):
  split = split_of(61)
  result = evaluate(model_and_variables, split)
  tokens, nll, accuracy = by_hand(model_and_variables, split, 3, 8)
  assert result['tokens'] == tokens == 61
  assert result['nll_nats_per_token'] == pytest.approx(nll, rel=1e-5)
  assert result['perplexity'] == pytest.approx(math.exp(nll), rel=1e-4)
  assert result['bits_per_byte'] == pytest.approx(nll / math.log(2) / 2, rel=1e-5)
  assert result['top1_accuracy'] == pytest.approx(accuracy)


@pytest.mark.parametrize(
  'mesh, rows', [((1, 1, 1), 1), ((1, 1, 1), 5), ((8, 1, 1), 3), ((2, 1, 2), 4)]
)
def test_rows_at_a_time_and_devices_do_not_matter(model_and_variables, mesh, rows):
  split = split_of(203)
  expected = evaluate(model_and_variables, split, streams=5, rows=5)
  result = evaluate(model_and_variables, split, mesh, streams=5, rows=rows)
  assert result['tokens'] == expected['tokens'] == 203
  assert result['nll_nats_per_token'] == pytest.approx(expected['nll_nats_per_token'], rel=1e-6)
  assert result['top1_accuracy'] == expected['top1_accuracy']
  assert result['protocol'] == expected['protocol']


def test_a_capped_evaluation_has_no_bits_per_byte(model_and_variables):
  result = evaluate(model_and_variables, split_of(61), max_tokens=20)
  assert result['tokens'] == 20
  assert result['bits_per_byte'] is None
  assert not result['protocol']['whole_split']


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(model_and_variables):
  model, variables = model_and_variables
  zeros = jax.tree.map(np.zeros_like, variables['params'])
  result = evaluate((model, {**variables, 'params': zeros}), split_of(61))
  assert result['perplexity'] == pytest.approx(11, rel=1e-6)
