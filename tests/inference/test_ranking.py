"""Scores of choices equal those of a full forward pass over the prefix and each choice."""

import dataclasses

import jax
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.layers.attention import fused
from ngrammer_jax.models import language_model, transformer
from tests.checks import random_variables
from tests.inference import reference

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
  'zeros before a stream': {
    'ngram': None,
    'norm': 'post_skip',
    'final_norm': False,
    'memory': model_config.MemoryConfig(20, first='zeros', across_documents=True),
  },
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
  # Change of the config, bidirectional prefixes, layers, length of the longest prefix.
  pytest.param('primer, scanned', True, 2, 16, marks=SLOW),
  pytest.param('zeros before a stream', False, 1, 16),
  *(pytest.param(change, False, 2, 40, marks=SLOW) for change in CHANGES),
  *(
    pytest.param(change, True, 2, 40, marks=SLOW)
    for change in ('n-grams', 'primer, scanned', 'spans, later keys')
  ),
]


@pytest.mark.parametrize('change, bidirectional, layers, max_prefix', CASES)
def test_scores_match_full_forward(x64, change, bidirectional, layers, max_prefix):
  config = dataclasses.replace(BASE, layers=layers, **CHANGES[change])
  config.check()
  model = transformer.TransformerLM(config, V)
  empty = language_model.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 2), np.int32), empty, dtype='float64')
  rng = np.random.default_rng(0)
  draw = lambda low, high: rng.integers(2, V, rng.integers(low, high)).astype(np.int32)
  prefixes = [
    np.insert(draw(1, max_prefix), 0, START) for _ in range(7)
  ]  # not a multiple of the rows
  min_choices = 1 if max_prefix > 16 else 3
  choices = [[draw(1, 6) for _ in range(rng.integers(min_choices, 5))] for _ in prefixes]

  @jax.jit
  def compute_scores(tokens, prefix):
    starts = np.broadcast_to(np.arange(tokens.shape[1] - 1) == 0, prefix.shape)
    memory = language_model.empty_memory(config, len(tokens))
    prefix = prefix if bidirectional else None
    hidden, _, _ = model.apply(
      variables, tokens[:, :-1], memory, starts_BxT=starts, prefix_BxT=prefix
    )
    scores = model.apply(variables, hidden, tokens[:, 1:], method='scores')
    return scores.nll_BxT, scores.correct_BxT

  # All choices with their prefixes; padding at the end does not affect earlier tokens.
  pairs = [(i, choice) for i, example in enumerate(choices) for choice in example]
  texts = [np.concatenate([prefixes[i], choice]) for i, choice in pairs]
  length = max(map(len, texts))
  tokens = np.stack([np.pad(ids, (0, length - len(ids))) for ids in texts])
  is_prefix = np.stack([np.arange(length - 1) < len(prefixes[i]) for i, _ in pairs])
  nll, is_best = map(np.asarray, compute_scores(tokens, is_prefix))
  expected = [[] for _ in prefixes]
  for (i, _), ids, row, is_best_T in zip(pairs, texts, nll, is_best, strict=True):
    choice = slice(len(prefixes[i]) - 1, len(ids) - 1)
    expected[i].append((-row[choice].sum(), is_best_T[choice].all()))

  engine = inference.Engine(model, sharding.make_mesh(devices=jax.devices()[:2]))
  arrays = reference.record_results(engine, '_rank_choices')
  results = list(engine.rank(variables, prefixes, choices, 3, bidirectional))
  assert sorted(i for i, _, _ in results) == list(range(len(prefixes)))
  for i, *values in results:
    for value, expected_values in zip(values, zip(*expected[i], strict=True), strict=True):
      np.testing.assert_allclose(value, expected_values, rtol=1e-9)
  # Every host reads the scores of all rows.
  assert arrays and all(array.is_fully_replicated for pair in arrays for array in pair)


def test_examples_of_all_sizes_are_batched():
  """Every example is scored once, with its own choices, in arrays of a few shapes."""
  config = dataclasses.replace(BASE, dtype='float32')
  model = transformer.TransformerLM(config, V)
  engine = inference.Engine(model, sharding.make_mesh(devices=jax.devices()[:2]))
  assert engine.round_rows(3) == 4
  shapes = set()

  def checksum(ids, valid):
    """Returns a number that depends on every token, its index and the padding."""
    valid = np.asarray(valid)
    return (np.asarray(ids) * valid * np.arange(1, valid.shape[-1] + 1)).sum(axis=-1)

  def rank_choices(variables, prompt, choices_KxBxC, valid_KxBxC, choice_variables):
    shapes.add((*prompt.tokens_BxT.shape, *choices_KxBxC.shape))
    prompt_checksums_B = checksum(prompt.tokens_BxT, prompt.valid_BxT)
    scores_KxB = prompt_checksums_B * 1000 + checksum(choices_KxBxC, valid_KxBxC)
    return scores_KxB, scores_KxB % 2

  engine._rank_choices = rank_choices
  for seed in range(4):
    shapes.clear()
    rng = np.random.default_rng(seed)
    draw = lambda max_length, rng=rng: rng.integers(1, V, rng.integers(1, max_length))
    prefixes = [draw(70) for _ in range(30)]
    draw_count = (lambda rng=rng: rng.integers(1, 6)) if seed % 2 else lambda: 5
    choices = [[draw(60 if seed > 1 else 20) for _ in range(draw_count())] for _ in prefixes]
    results = list(engine.rank({}, prefixes, choices, 3))
    assert sorted(i for i, _, _ in results) == list(range(30)), f'seed {seed}'
    checksum_all = lambda ids: checksum(ids, np.ones_like(ids))
    for i, scores, is_odd in results:
      prefix = checksum_all(prefixes[i]) * 1000
      expected = [prefix + checksum_all(choice) for choice in choices[i]]
      assert scores.tolist() == expected, f'seed {seed}, example {i}'
      assert is_odd.tolist() == [score % 2 for score in expected], f'seed {seed}, example {i}'
    _, P, K, B, C = map(set, zip(*shapes, strict=True))
    assert B == {4} and P <= {16, 32, 64, 128} and C <= ({32, 64} if seed > 1 else {32}), shapes
    assert K <= ({1, 2, 4, 8} if seed % 2 else {5}), shapes


@pytest.mark.full
def test_prompts_have_the_same_scores_in_a_kernel(one_device, monkeypatch):
  """Of splash attention, interpreted; choices attend to the keys and values that it read."""
  attend, kernels = fused.attend, []
  monkeypatch.setattr(fused, 'attend', lambda *args: kernels.append(args[0]) or attend(*args))
  rng = np.random.default_rng(0)
  prefixes = [rng.integers(2, V, length).astype(np.int32) for length in (128, 100)]
  choices = [[rng.integers(2, V, 3).astype(np.int32) for _ in range(2)] for _ in prefixes]
  model = dataclasses.replace(BASE, layers=1, ngram=None, dtype='float32')
  scores = {}
  for kernel in ('xla', 'splash'):
    config = dataclasses.replace(model, kernel=kernel)
    built = transformer.TransformerLM(config, V)
    empty = language_model.empty_memory(config, 1)
    variables = random_variables(built, np.zeros((1, 2), np.int32), empty)
    engine = inference.Engine(built, sharding.make_mesh())
    ranked = {i: nats for i, nats, _ in engine.rank(variables, prefixes, choices, rows=2)}
    scores[kernel] = np.stack([ranked[i] for i in range(len(prefixes))])
  np.testing.assert_allclose(scores['splash'], scores['xla'], rtol=1e-4)
  assert kernels == ['splash']
