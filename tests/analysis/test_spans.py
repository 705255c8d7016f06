"""Spans and persistent vectors of a run, and the verb."""

import json

import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import spans
from ngrammer_jax.models import config as model_config
from ngrammer_jax.training import loop
from tests.checks import bad_input

MEMORY = model_config.MemoryConfig(64, same_length='memory_and_self')


def trained(tiny, tmp_path, **model):
  loop.train(tiny({'memory': MEMORY} | model), tmp_path / 'run')
  return tmp_path / 'run'


def test_adaptive_spans_and_the_share_of_persistent_vectors(tiny, tmp_path, capsys):
  workdir = trained(
    tiny,
    tmp_path,
    span=model_config.SpanConfig(limit=64, ramp=8, initial=0.25),
    persistent=model_config.PersistentConfig(32),
    feed_forward_width=0,
  )
  assert analyze.main(['spans', f'--workdir={workdir}']) == 0
  printed, result = capsys.readouterr().out, json.loads((workdir / 'spans.json').read_text())
  assert (workdir / 'spans.png').stat().st_size > 1000
  assert 'share of attention on persistent vectors' in printed and 'head 1' in printed
  params = runs.load_run(workdir).state.params
  for layer, row in enumerate(result['spans']):
    share = np.asarray(params[f'layer_{layer}']['attention']['span']['span'])
    assert row == pytest.approx(np.minimum(64 * share + 8, 64))
  assert np.shape(result['persistent']) == (2, 2) and result['along'] is None
  assert (0 < np.array(result['persistent'])).all() and (np.array(result['persistent']) < 1).all()


def test_dynamic_spans_along_a_text(tiny, tmp_path):
  workdir = trained(
    tiny, tmp_path, span=model_config.SpanConfig(kind='dynamic', limit=64, ramp=8, initial=0.0)
  )
  result = spans.analyse(runs.load_run(workdir))
  along = result['along']
  assert len(along['texts']) == len(along['spans']) == result['tokens'] == 8 * 16
  assert len(set(along['spans'])) > 10 and result['persistent'] is None
  assert np.mean(along['spans']) == pytest.approx(np.mean(result['spans']), rel=1e-5)
  assert 8 < min(along['spans']) and max(along['spans']) <= 64


def test_a_run_that_has_neither(tiny, tmp_path):
  workdir = trained(tiny, tmp_path)
  with bad_input(
    f'--workdir={workdir} has no spans, and no persistent vectors that share a softmax: it needs '
    f'model.span or model.persistent'
  ):
    spans.analyse(runs.load_run(workdir))
