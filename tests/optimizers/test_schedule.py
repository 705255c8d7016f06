"""Warm-up, stable, decay: official arrays, and what a change of the decay may alter."""

import json

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.optimizers import schedule


@pytest.fixture
def official(reference):
  arrays = reference('vp_schedules')
  return json.loads(str(arrays['config'])), arrays


@pytest.mark.parametrize('shape', ['linear', 'cosine', '1-sqrt'])
@pytest.mark.parametrize('has_start', [True, False])
def test_wsd_equals_transformers_after_its_warm_up(official, shape, has_start):
  settings, arrays = official
  wsd = settings['wsd']
  start = wsd['warmup'] + wsd['stable']
  config = experiment.OptimizerConfig(
    schedule='wsd',
    warmup_steps=wsd['warmup'],
    decay_steps=wsd['decay'],
    decay_from=start if has_start else None,
    decay_shape=shape,
    final_fraction=wsd['min'],
  )
  expected = arrays[f'wsd/{shape}']
  # Ours begins with 1 / warm-up, theirs with 0.
  expected[: wsd['warmup']] += 1 / wsd['warmup']
  with jax.enable_x64(True):
    fractions = schedule.make(config, start + wsd['decay'])(np.arange(len(expected)))
  np.testing.assert_allclose(fractions, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('warmup', [40, 300])
def test_wsd_equals_nanochat(official, warmup):
  settings, arrays = official
  steps = settings['iterations']
  decay_steps = round(settings['warmdown'] * steps)
  config = experiment.OptimizerConfig(
    schedule='wsd',
    warmup_steps=warmup,
    decay_steps=decay_steps,
    final_fraction=settings['final'],
  )
  t = np.arange(steps + 1)
  expected = arrays['lr'].copy()
  expected[:warmup] = (t[:warmup] + 1) / warmup  # it comes before the decay
  with jax.enable_x64(True):
    fractions = schedule.make(config, steps)(t)
  np.testing.assert_allclose(fractions, expected, rtol=0, atol=1e-12)
