"""Runs of layers cover all layers in order, and a scan over a run applies each layer's own kind."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.attention import AttentionConfig
from ngrammer_jax.models import language_model, layer_runs
from tests.loops import each

KINDS = 'full', 'window', 'unrotated'
MOST_LAYERS = 8


def applied_kinds(kinds, runs):
  """Returns the number and the kind of each layer in the order in which the runs apply them."""
  applied = []
  for run in runs:
    period = kinds[run.first : run.first + run.period]
    for repetition in range(run.length // run.period):
      for index, kind in enumerate(period):
        applied.append((run.first + repetition * run.period + index, kind))
  return applied


@pytest.mark.parametrize('min_period', [1, 2, 3])
def test_runs_apply_the_layers_of_every_pattern(min_period):
  """Of up to eight layers of three kinds."""
  for count in range(1, MOST_LAYERS + 1):
    for kinds in itertools.product(KINDS, repeat=count):
      runs = layer_runs.find(kinds, (), min_period)
      assert applied_kinds(kinds, runs) == list(enumerate(kinds)), (kinds, runs)
      assert all(run.length % run.period == 0 for run in runs), (kinds, runs)
      # The smallest period: with a smaller one, kinds would be those of other layers.
      for run in runs:
        of_run = kinds[run.first :]
        for period in range(min_period, run.period):
          assert of_run[period:] != of_run[:-period], (kinds, run)


def test_splits_begin_runs():
  kinds = ('full',) * 4 + ('window', 'full') * 2
  runs = layer_runs.find(kinds, {2, 5}, 1)
  assert runs == [(0, 2, 1), (2, 5, 3), (5, 7, 2), (7, 8, 1)]
  assert applied_kinds(kinds, runs) == list(enumerate(kinds))


def test_layers_in_a_row_are_one_run_however_many_are_compiled():
  assert layer_runs.find(KINDS[:1] * 11, (), 4) == [(0, 8, 4), (8, 11, 3)]


def test_layers_in_a_scan():
  expected = {(None, 1): 0, (None, 32): 0, (None, 33): 1, (True, 2): 1, (False, 99): 0, (4, 8): 4}
  assert {case: layer_runs.layers_in_a_scan(*case) for case in expected} == expected


# Patterns of layers by their first letters. Those that begin with FU repeat after three layers or
# more, but their first layers alone after two.
PATTERNS = ('FUFFU', 'FWFFW', 'UFUUF', 'FUFF', 'WWFWWU', 'FFU', 'FWU', 'FFUUU', 'UFWUF', 'FUFUFF')
QUICK = 'FUFFU', 'UFWUF'


TOKENS = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)


def scanned_model(pattern):
  letters = {'F': 'full', 'W': 'window', 'U': 'unrotated'}
  layer_pattern = tuple(letters[letter] for letter in pattern)
  config = model_config.ModelConfig(
    layers=len(pattern),
    width=8,
    heads=2,
    feed_forward_width=8,
    dtype='float64',
    attention=AttentionConfig(window=3, layer_pattern=layer_pattern),
    scan_layers=True,
  )
  return language_model.build(config, 11)


@each('pattern', QUICK)
def test_the_layers_of_a_run_can_be_scanned(pattern, x64):
  model = scanned_model(pattern)
  memory = model.empty_memory(2)
  variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS, memory)
  hidden, *_ = jax.eval_shape(model.apply, variables, TOKENS, memory)
  assert hidden.shape == (2, 8, 8)


@pytest.mark.parametrize(
  'pattern',
  [
    pytest.param(name, marks=pytest.mark.full if name in QUICK else pytest.mark.slow)
    for name in PATTERNS
  ],
)
def test_scanned_layers_equal_unrolled_ones(pattern, x64):
  scanned = scanned_model(pattern)
  unrolled = scanned.clone(config=dataclasses.replace(scanned.config, scan_layers=False))
  memory = scanned.empty_memory(2)
  variables = jax.jit(scanned.init)(jax.random.key(0), TOKENS, memory)
  outputs = [jax.jit(model.apply)(variables, TOKENS, memory)[0] for model in (scanned, unrolled)]
  np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=1e-12)
