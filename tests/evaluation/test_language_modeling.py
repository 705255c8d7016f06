"""Every token scored once, and the same result however it is computed."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.data import streams as streams_module
from ngrammer_jax.data import token_cache
from ngrammer_jax.evaluation import language_modeling
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.checks import bad_input, random_variables
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


def evaluate(
  model_and_variables, split, mesh=(1, 1, 1), streams=3, length=8, rows=2, how=(), **given
):
  model, variables = model_and_variables
  evaluator = language_modeling.Evaluator(model, mesh_of(mesh), streams, length, rows, *how)
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
  for length in (2, 0):
    shorter = dataclasses.replace(config, memory=model_config.MemoryConfig(length=length))
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


def nll_of(model_and_variables, tokens, start):
  """Nats of every token after the input `start`, in one pass from an empty memory."""
  model, variables = model_and_variables
  inputs, memory = np.array([start, *tokens[:-1]])[None], transformer.empty_memory(model.config, 1)
  hidden, _, _ = model.apply(variables, inputs.astype('int32'), memory)
  log_probs = model.apply(variables, hidden, method='log_probs')[0]
  return -np.asarray(log_probs, np.float64)[np.arange(len(tokens)), tokens]


def one_document(n):
  tokens = np.random.RandomState(1).randint(0, 10, n).astype(np.uint16)
  return token_cache.TokenSplit(tokens, np.array([0]), text_bytes=n, document_start=10)


@pytest.mark.parametrize('protocol, counted', [('transformer_xl', 15), ('adaptive_span', 8)])
def test_protocols_of_the_official_codes(model_and_variables, protocol, counted):
  """50 tokens in 3 streams of 16: the first of each is no target, a rest of 8 may be left out."""
  split, expected = one_document(50), []
  for row in range(3):
    stream = split.tokens[16 * row : 16 * (row + 1)]
    for begin in range(1, 1 + counted, 8):
      part = stream[begin : min(begin + 8, 1 + counted)]
      expected.append((stream[begin - 1], part))
  result = evaluate(model_and_variables, split, how=(protocol,))
  assert result['tokens'] == 3 * counted
  assert result['protocol']['name'] == protocol
  model, variables = model_and_variables
  plain = dataclasses.replace(model, config=dataclasses.replace(model.config, ngram=None))
  alone = evaluate((plain, variables), split, how=(protocol,))
  nats = np.concatenate([nll_of((plain, variables), part, start) for start, part in expected])
  assert alone['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)


def test_published_counts_of_the_protocols():
  """enwik8 as Transformer-XL reads it, and as the adaptive-span code does."""
  of = lambda n, *how: (
    streams_module.EvaluationStreams(
      token_cache.TokenSplit(np.zeros(n, np.uint8), np.zeros(1, int), None, 0), *how
    ).tokens
  )
  assert of(4_943_417, 10, 80, 0, 'transformer_xl') == 4_943_400
  assert of(5_000_001, 8, 512, 0, 'adaptive_span') == 4_997_120


def test_every_token_from_a_window_of_its_own(model_and_variables):
  split, expected = one_document(21), []
  for last in range(21):
    first = max(last - 7, 0)
    before = split.tokens[first - 1] if first else 10
    expected.append(nll_of(model_and_variables, split.tokens[first : last + 1], before)[-1])
  result = evaluate(model_and_variables, split, rows=4, how=('sliding_window',))
  assert result['tokens'] == 21
  assert result['nll_nats_per_token'] == pytest.approx(np.mean(expected), rel=1e-5)


def test_the_ends_of_lines_are_counted_apart(model_and_variables):
  split = one_document(40)
  result = evaluate(model_and_variables, split, streams=1, length=40, how=('streams', 3))
  nats = nll_of(model_and_variables, split.tokens, 10)
  inside = split.tokens != 3
  assert result['line_ends'] == (~inside).sum() > 0
  assert result['perplexity_without_line_ends'] == pytest.approx(
    np.exp(nats[inside].mean()), rel=1e-4
  )
  assert result['perplexity'] == pytest.approx(np.exp(nats.mean()), rel=1e-4)


def test_a_split_too_small_for_the_protocol(model_and_variables):
  with bad_input(
    "evaluation.protocol='adaptive_span': 20 tokens in 3 streams fill no segment of 8"
  ):
    evaluate(model_and_variables, one_document(20), how=('adaptive_span',))
