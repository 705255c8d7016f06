"""Every token scored once, and the same result however it is computed."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest

from ngrammer_jax.data import streams as streams_module
from ngrammer_jax.data import token_cache
from ngrammer_jax.evaluation import language_modeling, scoring
from ngrammer_jax.models import config as model_config
from tests.checks import bad_input, mesh_of
from tests.evaluation import by_hand

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
reader = functools.cache(lambda: by_hand.Reader(CONFIG, 11, LENGTH))
compiled = functools.cache(scoring.Scorer)


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
  """One program for all evaluations of the same shape."""
  monkeypatch.setattr(language_modeling.scoring, 'Scorer', compiled)


def split_of(n, *starts):
  tokens = np.random.default_rng(1).integers(0, 10, n).astype(np.uint16)
  return token_cache.TokenSplit(tokens, np.array([0, *starts]), 2 * n, document_start=START)


def evaluate(split, mesh=(1, 1, 1), streams=3, rows=ROWS, how=(), params=None, **given):
  model, variables = reader().model, reader().variables
  evaluator = language_modeling.Evaluator(model, mesh_of(*mesh), streams, LENGTH, rows, *how)
  return evaluator(params or variables['params'], variables['codebook'], split, **given)


def segments(first, end):
  return [(begin, min(begin + LENGTH, end)) for begin in range(first, end, LENGTH)]


def read(split, streams, carry=True):
  """By hand, streams of targets [first, end): nats of all of them, and whether they are right."""
  nats, right = zip(*(reader()(split, segments(*each), carry) for each in streams), strict=True)
  return np.concatenate(nats), np.concatenate(right)


def shares(n, streams):
  return list(itertools.pairwise([*range(0, n, math.ceil(n / streams)), n]))


def test_equals_a_loop_that_computes_the_past_again():
  split = split_of(61, 20)
  result = evaluate(split)
  nats, right = read(split, shares(61, 3))
  assert result['tokens'] == len(nats) == 61
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['bits_per_token'] == pytest.approx(nats.mean() / math.log(2), rel=1e-5)
  assert result['perplexity'] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
  assert result['bits_per_byte'] == pytest.approx(nats.sum() / math.log(2) / 122, rel=1e-5)
  assert result['top1_accuracy'] == pytest.approx(right.mean()) and 0 < right.mean() < 1
  protocol = result['protocol']
  assert protocol['memory_length'] == MEMORY and protocol['same_length'] == 'no'
  assert protocol['whole_split'] and (protocol['streams'], protocol['segment_length']) == (3, 8)
  forgetful, _ = read(split, shares(61, 3), carry=False)
  assert abs(forgetful.mean() - nats.mean()) > 1e-2


MESHES = [((1, 1, 1), 3), ((2, 1, 2), 4), ((1, 1, 1), 1), ((1, 1, 1), 5), ((8, 1, 1), 3)]
RARE = [pytest.param(*each, marks=pytest.mark.slow) for each in MESHES[2:]]


@pytest.mark.parametrize('mesh, rows', MESHES[:2] + RARE)
def test_rows_at_a_time_and_devices_do_not_matter(monkeypatch, mesh, rows):
  """Nor hosts: all of them look at the scores of all rows."""
  split, reports = split_of(61, 20), []
  scorer = compiled(reader().model, mesh_of(*mesh), min(rows, 5))
  monkeypatch.setattr(scorer, '_score', scorer._score)  # back at the end
  scores = by_hand.watched(scorer, '_score')
  result = evaluate(split, mesh, streams=5, rows=rows, report=reports.append)
  nats, right = read(split, shares(61, 5))
  assert result['tokens'] == sum(reports) == 61
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['top1_accuracy'] == right.mean()
  assert result['protocol'] | {'streams': 5, 'segment_length': LENGTH} == result['protocol']
  arrays = jax.tree.leaves([found for found, _ in scores])
  assert arrays and all(array.is_fully_replicated for array in arrays)
  assert all('cache' in memory for _, memory in scores)  # no past is computed again here


def test_a_capped_evaluation_has_no_bits_per_byte():
  split = split_of(61, 20)
  result = evaluate(split, max_tokens=20)
  nats, _ = read(split, shares(20, 3))
  assert result['tokens'] == 20
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['bits_per_byte'] is None
  assert not result['protocol']['whole_split']


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
  zeros = jax.tree.map(np.zeros_like, reader().variables['params'])
  assert evaluate(split_of(61), params=zeros)['perplexity'] == pytest.approx(11, rel=1e-6)


@pytest.mark.parametrize('protocol, counted', [('transformer_xl', 15), ('adaptive_span', 8)])
def test_protocols_of_the_official_codes(protocol, counted):
  """50 tokens in 3 streams of 16: the first of each is no target, a rest of 8 may be left out."""
  split = split_of(50)
  result = evaluate(split, how=(protocol,))
  nats, _ = read(split, [(16 * row + 1, 16 * row + 1 + counted) for row in range(3)])
  assert result['tokens'] == len(nats) == 3 * counted
  assert result['nll_nats_per_token'] == pytest.approx(nats.mean(), rel=1e-5)
  assert result['protocol']['name'] == protocol and not result['protocol']['whole_split']


def test_published_counts_of_the_protocols():
  """enwik8 as Transformer-XL reads it, and as the adaptive-span code does."""
  of = lambda n, *how: (
    streams_module.EvaluationStreams(
      token_cache.TokenSplit(np.zeros(n, np.uint8), np.zeros(1, int), None, 0), *how
    ).tokens
  )
  assert of(4_943_417, 10, 80, 0, 'transformer_xl') == 4_943_400
  assert of(5_000_001, 8, 512, 0, 'adaptive_span') == 4_997_120


def test_every_token_from_a_window_of_its_own():
  split = split_of(22)
  windows = [[(max(last + 1 - LENGTH, 0), last + 1)] for last in range(22)]
  nats = [reader()(split, window)[0][-1] for window in windows]
  result = evaluate(split, streams=1, how=('sliding_window',))
  assert result['tokens'] == 22
  assert result['nll_nats_per_token'] == pytest.approx(np.mean(nats), rel=1e-5)


def test_the_ends_of_lines_are_counted_apart():
  split = split_of(61, 20)
  result = evaluate(split, how=('streams', 3))
  nats, _ = read(split, shares(61, 3))
  inside = split.tokens != 3
  assert result['line_ends'] == (~inside).sum() > 0
  assert result['perplexity_without_line_ends'] == pytest.approx(
    np.exp(nats[inside].mean()), rel=1e-4
  )
  assert result['perplexity'] == pytest.approx(np.exp(nats.mean()), rel=1e-4)


def test_a_split_too_small_for_the_protocol():
  with bad_input(
    "evaluation.protocol='adaptive_span': 20 tokens in 3 streams fill no segment of 8"
  ):
    evaluate(split_of(20), how=('adaptive_span',))
