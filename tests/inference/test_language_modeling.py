"""Metrics of a split match a reference and do not depend on batch size, devices and hosts."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import evaluation_streams
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.system import hosts
from tests.checks import bad_input, full, mesh_of
from tests.inference import reference

LENGTH, ROWS, MEMORY, START = 8, 3, 12, 10
CONFIG = model_config.ModelConfig(
  layers=2,
  width=16,
  heads=2,
  feed_forward_width=24,
  position='relative',
  memory=model_config.MemoryConfig(MEMORY),
  ngram=model_config.NGramConfig(clusters=8, vocabulary_size=64, dim=4),
)
make_reader = functools.cache(lambda: reference.SegmentReader(CONFIG, 11, LENGTH))
# One engine compiles one program for all evaluations of the same shape.
make_engine = functools.cache(lambda mesh: inference.Engine(make_reader().model, mesh_of(*mesh)))


def make_split(n, *starts):
  tokens = np.random.default_rng(1).integers(0, 10, n).astype(np.uint16)
  return token_split.TokenSplit(tokens, np.array([0, *starts]), 2 * n, document_start=START)


def evaluate(
  split,
  mesh=(1, 1, 1),
  streams=3,
  rows=ROWS,
  params=None,
  line_end=None,
  report=None,
  train_length=128,
  length=LENGTH,
  **options,
):
  variables = make_reader().variables | ({'params': params} if params else {})
  config = experiment.Config(
    training=experiment.TrainingConfig(batch_size=rows, segment_length=train_length),
    evaluation=evaluation_config.EvaluationConfig(streams, length, **options),
  )
  report = {'report': report} if report else {}
  return language_modeling.evaluate(make_engine(mesh), variables, split, config, line_end, **report)


def divide_into_segments(first, end):
  return [(begin, min(begin + LENGTH, end)) for begin in range(first, end, LENGTH)]


def read_streams(split, streams, carry=True):
  """Returns nats and correctness of all targets of streams [first, end), by the reference."""
  reader = make_reader()
  results = (reader(split, divide_into_segments(*stream), carry) for stream in streams)
  nats, correct = zip(*results, strict=True)
  return np.concatenate(nats), np.concatenate(correct)


def divide_into_streams(n, streams):
  return list(itertools.pairwise([*range(0, n, math.ceil(n / streams)), n]))


def test_metrics_match_the_reference():
  split = make_split(61, 20)
  result = evaluate(split)
  nats, correct = read_streams(split, divide_into_streams(61, 3))
  assert result['tokens'] == len(nats) == 61
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['bits_per_token'] == pytest.approx(nats.mean() / math.log(2), rel=1e-5)
  assert result['perplexity'] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
  assert result['bits_per_byte'] == pytest.approx(nats.sum() / math.log(2) / 122, rel=1e-5)
  assert result['top1_accuracy'] == pytest.approx(correct.mean()) and 0 < correct.mean() < 1
  protocol = result['protocol']
  assert protocol['memory_length'] == MEMORY and protocol['same_length'] == 'no'
  assert protocol['whole_split'] and (protocol['streams'], protocol['segment_length']) == (3, 8)
  nats_without_memory, _ = read_streams(split, divide_into_streams(61, 3), carry=False)
  assert abs(nats_without_memory.mean() - nats.mean()) > 1e-2


MESHES = [((1, 1, 1), 3), ((2, 1, 2), 4), ((1, 1, 1), 1), ((1, 1, 1), 5), ((8, 1, 1), 3)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in MESHES[2:]]


@pytest.mark.parametrize('mesh, rows', [MESHES[0], full(*MESHES[1]), *SLOW])
def test_result_does_not_depend_on_rows_and_devices(monkeypatch, mesh, rows):
  """Hosts do not matter either: every host reads the scores of all rows."""
  split, reports = make_split(61, 20), []
  engine = make_engine(mesh)
  monkeypatch.setattr(engine, '_score_segment', engine._score_segment)  # restored after the test
  results = reference.record_results(engine, '_score_segment')
  result = evaluate(split, mesh, streams=5, rows=rows, report=reports.append)
  nats, correct = read_streams(split, divide_into_streams(61, 5))
  assert result['tokens'] == sum(reports) == 61
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['top1_accuracy'] == correct.mean()
  assert result['protocol'] | {'streams': 5, 'segment_length': LENGTH} == result['protocol']
  arrays = jax.tree.leaves([scores for scores, _ in results])
  assert arrays and all(array.is_fully_replicated for array in arrays)
  assert all('cache' in memory for _, memory in results)  # the KV cache is used


def test_evaluation_of_first_tokens_has_no_bits_per_byte():
  split = make_split(61, 20)
  result = evaluate(split, max_tokens=20)
  nats, _ = read_streams(split, divide_into_streams(20, 3))
  assert result['tokens'] == 20
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['bits_per_byte'] is None
  assert not result['protocol']['whole_split']


def test_only_tokens_that_count_are_scored():
  split = make_split(61, 20)
  counts = np.arange(61) % 3 == 1
  reported = []
  result = evaluate(dataclasses.replace(split, counts=counts), report=reported.append)
  nats, correct = read_streams(split, divide_into_streams(61, 3))
  assert result['tokens'] == counts.sum() == sum(reported)
  assert result['nll_nats_per_token'] == pytest.approx(nats[counts].mean(), rel=1e-5)
  assert result['top1_accuracy'] == pytest.approx(correct[counts].mean(), rel=1e-12)
  assert result['protocol']['whole_split']
  with bad_input(
    'no token of the first 1, which is evaluation.max_tokens, of the split to evaluate counts in '
    'the loss: with data.loss_on=assistant it needs messages of the assistant'
  ):
    evaluate(dataclasses.replace(split, counts=counts), max_tokens=1)


def test_bits_per_character_count_characters_alone():
  """The document start, which has the highest id, is scored but is no character."""
  tokens = make_split(20).tokens.copy()
  tokens[7] = START
  split = token_split.TokenSplit(tokens, np.array([0, 8]), None, START, num_characters=START)
  result = evaluate(split)
  expected = result['bits_per_token'] * 20 / 19
  assert result['bits_per_character'] == pytest.approx(expected, rel=1e-12)
  assert 'bits_per_character' not in evaluate(make_split(20))


def test_tables_of_a_result():
  result = {'tokens': 1000, 'nll_nats_per_token': 1.0, 'perplexity': math.e, 'bits_per_token': 1.5}
  result |= {'bits_per_byte': None, 'top1_accuracy': 0.5, 'step': 1000}
  result['protocol'] = {'name': 'streams', 'streams': 16, 'whole_split': False}
  columns, row = language_modeling.format_table({'test': result}).splitlines()
  assert columns.split() == 'split tokens nats/token perplexity bits/token bits/byte top-1'.split()
  assert row.split() == ['test', '1,000', '1.0000', '2.718', '1.5000', '-', '50.00%']
  result['bits_per_character'] = 1.25
  columns, row = language_modeling.format_table({'test': result}).splitlines()
  assert columns.endswith('bits/byte  bits/character   top-1')
  assert row.split()[5:] == ['-', '1.2500', '50.00%']
  columns, row = language_modeling.format_protocol(result).splitlines()
  assert columns.split() == 'step streams whole split protocol'.split()
  assert row.split() == ['1,000', '16', 'False', 'streams']


@pytest.mark.full
def test_a_segment_that_is_longer_than_the_text_is_a_warning(caplog):
  hosts.warn_once.cache_clear()
  for length, max_tokens in ((128, 48), (129, 48), (129, 48), (129, 130)):
    evaluate(make_split(131), streams=1, length=length, max_tokens=max_tokens)
  assert caplog.messages == [
    'a segment of 129 tokens is longer than the text of 48: lower evaluation.segment_length'
  ]


def test_perplexity_of_a_uniform_model_is_the_vocabulary_size():
  zeros = jax.tree.map(np.zeros_like, make_reader().variables['params'])
  assert evaluate(make_split(61), params=zeros)['perplexity'] == pytest.approx(11, rel=1e-6)


@pytest.mark.parametrize('protocol, counted', [('transformer_xl', 15), ('adaptive_span', 8)])
def test_protocols_of_official_implementations(protocol, counted):
  """50 tokens in 3 streams of 16: the first is not a target; adaptive_span skips the last 7."""
  split = make_split(50)
  result = evaluate(split, protocol=protocol)
  nats, _ = read_streams(split, [(16 * row + 1, 16 * row + 1 + counted) for row in range(3)])
  assert result['tokens'] == len(nats) == 3 * counted
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['protocol']['name'] == protocol and not result['protocol']['whole_split']


def test_token_counts_of_official_implementations():
  """Tokens that Transformer-XL and the adaptive-span code score of enwik8."""
  count = lambda n, *args: (
    evaluation_streams.EvaluationStreams(
      token_split.TokenSplit(np.zeros(n, np.uint8), np.zeros(1, int), None, 0), *args
    ).tokens
  )
  assert count(4_943_417, 10, 80, 0, 'transformer_xl') == 4_943_400
  assert count(5_000_001, 8, 512, 0, 'adaptive_span') == 4_997_120


@pytest.mark.parametrize('train_length', [3 * LENGTH, pytest.param(1, marks=pytest.mark.slow)])
def test_sliding_window_scores_each_token_in_its_own_window(monkeypatch, train_length):
  """In batches of the tokens of a training step, without the slots of a segment memory."""
  split, engine = make_split(22, 9), make_engine((1, 1, 1))
  read = [make_reader()(split, [(max(end - LENGTH, 0), end)]) for end in range(1, 23)]
  nats, correct = ([values[-1] for values in column] for column in zip(*read, strict=True))
  monkeypatch.setattr(engine, '_score_last_target', engine._score_last_target)
  results = reference.record_results(engine, '_score_last_target')
  options = {'rows': 1, 'train_length': train_length}
  result = evaluate(split, streams=1, protocol='sliding_window', **options)
  assert result['tokens'] == 22
  assert result['nll_nats_per_token'] == pytest.approx(np.mean(nats), rel=1e-5)
  assert result['top1_accuracy'] == pytest.approx(np.mean(correct))
  rows = max(train_length // LENGTH, 1)
  assert len(results) == math.ceil(22 / rows)
  for scores, memory in results:
    assert scores.nll_BxT.shape == (rows, 1) and memory['cache'].index.shape == (rows, 1)


def test_sliding_window_keeps_a_memory_of_visible_zeros():
  """Zeros that are attended to change the result; here nothing has a bias or a norm before it."""
  memory = model_config.MemoryConfig(MEMORY, first='zeros', across_documents=True)
  config = dataclasses.replace(
    CONFIG, layers=1, ngram=None, norm='post_skip', final_norm=False, memory=memory
  )
  reader, split = reference.SegmentReader(config, 11, LENGTH), make_split(5)
  nats = [reader(split, [(0, end)])[0][-1] for end in range(1, 6)]
  result = language_modeling.evaluate(
    inference.Engine(reader.model, mesh_of(1, 1, 1)),
    reader.variables,
    split,
    experiment.Config(
      training=experiment.TrainingConfig(batch_size=1, segment_length=5 * LENGTH),
      evaluation=evaluation_config.EvaluationConfig(1, LENGTH, protocol='sliding_window'),
    ),
  )
  assert result['nll_nats_per_token'] == pytest.approx(np.mean(nats), rel=1e-5)


def test_perplexity_without_line_ends():
  split = make_split(61, 20)
  result = evaluate(split, line_end=3)
  nats, _ = read_streams(split, divide_into_streams(61, 3))
  is_inside = split.tokens != 3
  assert result['line_ends'] == (~is_inside).sum() > 0
  assert result['perplexity_without_line_ends'] == pytest.approx(
    np.exp(nats[is_inside].mean()), rel=1e-4
  )
  assert result['perplexity'] == pytest.approx(np.exp(nats.mean()), rel=1e-4)


def test_split_too_small_for_the_protocol():
  with bad_input(
    "evaluation.protocol='adaptive_span': 20 tokens in 3 streams fill no segment of 8"
  ):
    evaluate(make_split(20), protocol='adaptive_span')


def test_results_of_a_mixture_are_combined_by_weight():
  part = lambda nats, whole: {
    'nll_nats_per_token': nats,
    'top1_accuracy': nats / 10,
    'tokens': 5,
    'protocol': {'name': 'streams', 'whole_split': whole},
  }
  parts = {'a': part(1.0, True), 'b': part(3.0, False), 'c': part(9.0, True)}
  result = language_modeling.combine(parts, (0.25, 0.75, 0.0))
  assert result['nll_nats_per_token'] == 2.5 and result['perplexity'] == math.exp(2.5)
  assert result['top1_accuracy'] == pytest.approx(0.25) and result['tokens'] == 15
  assert result['protocol'] == {'name': 'streams', 'whole_split': False}
