"""Windows follow the spans, and training does not notice."""

import dataclasses
import json
import logging
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors, runs
from ngrammer_jax.models import config as model_config
from ngrammer_jax.training import loop, manifest, windows

SPAN = model_config.SpanConfig(limit=256, ramp=4, penalty=0.01, initial=0.9, reserve=8)
MODEL = {
  'position': 'table',
  'positional': model_config.PositionalConfig(max_length=256),
  'memory': model_config.MemoryConfig(256, same_length='memory_alone'),
  'span': SPAN,
}
CONFIG = model_config.ModelConfig(layers=1, width=16, heads=4, feed_forward_width=0, **MODEL)


def chosen(*spans, **given):
  return windows.chosen(CONFIG, np.array([spans], float), **given)[0]


def test_a_window_holds_span_ramp_and_reserve_in_powers_of_two():
  # 64 tokens hold 51 + 4 and the key at the end, and 8.
  assert chosen(0, 51, 52, 200) == (64, 64, 128, 256)
  assert chosen(0, 59, 60, 200, reserve=0) == (64, 64, 128, 256)


def test_a_window_is_not_changed_to_and_fro():
  before = ((128, 128, 128, 128),)
  # It shrinks where there are two reserves left, and grows where there is not one.
  assert chosen(43, 44, 115, 116, before=before) == (64, 128, 128, 256)


def test_after_many_changes_windows_only_grow():
  before = ((128, 128, 128, 64),)
  assert chosen(0, 60, 120, 60, before=before, changes=windows.CHANGES) == (128, 128, 256, 256)


@pytest.mark.parametrize('span, window', [(0.0, 64), (59.9, 64), (60.0, 128), (123.9, 128)])
def test_the_device_knows_which_windows_hold_a_span(span, window):
  params = {'layer_0': {'attention': {'span': {'span': jnp.array([span, 0, 0, 0]) / 256}}}}
  for size in (64, 128, 256):
    fits = windows.fit(CONFIG, params, ((size, 64, 64, 64),))
    assert bool(fits) == (size >= window)
  # And those that are chosen hold it, however it is rounded.
  assert windows.fit(CONFIG, params, windows.chosen(CONFIG, windows.spans(CONFIG, params)))


def test_a_loss_that_is_not_finite_ends_a_run_whose_spans_are_fitted(tiny, tmp_path):
  span = dataclasses.replace(SPAN, initial=0.0)
  optimizer = {'learning_rate': 1e30, 'clip_norm': None}
  config = tiny(MODEL | {'span': span}, optimizer, {'span_check_every': 12})
  with pytest.raises(errors.BadInput, match='training diverged at step'):
    loop.train(config, tmp_path / 'run')


def records(workdir):
  lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  return [{k: v for k, v in line.items() if k != 'tokens_per_second'} for line in lines]


def config_of(tiny, **model):
  training = {'span_check_every': 2, 'checkpoint_every': 2, 'keep_checkpoints': 9}
  optimizer = {'learning_rate': 0.1}
  return tiny(MODEL | model, optimizer, training)


def test_programs_are_exchanged_and_a_resume_is_exact(tiny, tmp_path, caplog, monkeypatch):
  caplog.set_level(logging.INFO)
  whole = tmp_path / 'whole'
  assert loop.train(config_of(tiny), whole)
  sizes = [manifest.read(whole / 'checkpoints' / str(step)).windows for step in range(2, 13, 2)]
  assert sizes[0] == [[256, 256]] * 2 and sizes[-1] != sizes[0]
  assert 'windows, heads x tokens: ' in caplog.text and '(program 2)' in caplog.text
  logged = [record for record in records(whole) if 'loss' in record]
  assert logged[-1]['flops_per_token'] < logged[0]['flops_per_token']
  assert logged[-1]['span/average'] < logged[0]['span/average']

  for last in (4, 8):  # before and after a change
    run = tmp_path / f'run_{last}'
    shutil.copytree(whole, run)
    for step in range(last + 2, 13, 2):
      shutil.rmtree(run / 'checkpoints' / str(step))
    assert loop.train(config_of(tiny), run)
    leaves = [manifest.verify(path / 'checkpoints' / '12').leaves for path in (run, whole)]
    assert leaves[0] == leaves[1] and records(run) == records(whole)

  # And the same but for rounding without any windows.
  monkeypatch.setattr(windows, 'learned', lambda config: False)
  assert loop.train(config_of(tiny), tmp_path / 'unfitted')
  unfitted = [record for record in records(tmp_path / 'unfitted') if 'loss' in record]
  for one, other in zip(logged, unfitted, strict=True):
    assert one['loss'] == pytest.approx(other['loss'], abs=1e-4)


def test_a_span_that_outgrows_its_window_is_noticed_at_that_step(
  tiny, tmp_path, monkeypatch, caplog
):
  """In the middle of a call, between two checks; and the memory holds what it then looks at."""
  caplog.set_level(logging.INFO)
  span = dataclasses.replace(SPAN, penalty=0.0, initial=0.17, reserve=1)
  optimizer = {'learning_rate': 0.02, 'schedule': 'constant', 'warmup_steps': 12}
  every = {'log_every': 4, 'evaluate_every': 0, 'span_check_every': 24}
  training = {'steps': 24, 'segments_per_call': 4, 'checkpoint_every': 4, 'keep_checkpoints': 9}
  config = tiny(MODEL | {'span': span}, optimizer, training | every)
  whole = tmp_path / 'whole'
  assert loop.train(config, whole)
  sizes = {step: manifest.read(whole / 'checkpoints' / str(step)).windows for step in (4, 12, 24)}
  assert sizes[4] == [[64, 64]] * 2 and max(sum(sizes[24], [])) > 64
  changed = re.findall(r'step (\d+)  windows', caplog.text)
  assert any(int(step) % 4 for step in changed)

  run = tmp_path / 'run'  # killed before the last of the changes
  shutil.copytree(whole, run)
  before = max(step for step in range(4, int(changed[-1]), 4))
  for later in range(before + 4, 25, 4):
    shutil.rmtree(run / 'checkpoints' / str(later))
  assert loop.train(config, run)
  leaves = [manifest.verify(path / 'checkpoints' / '24').leaves for path in (run, whole)]
  assert leaves[0] == leaves[1] and records(run) == records(whole)

  monkeypatch.setattr(windows, 'learned', lambda config: False)
  assert loop.train(config, tmp_path / 'unfitted')
  pairs = zip(records(whole), records(tmp_path / 'unfitted'), strict=True)
  for one, other in (pair for pair in pairs if 'loss' in pair[0]):
    assert one['loss'] == pytest.approx(other['loss'], abs=1e-5)
    assert one['gradient_norm/dense'] == pytest.approx(other['gradient_norm/dense'], rel=1e-3)


def test_a_trained_run_evaluates_and_writes(tiny, tmp_path):
  run = tmp_path / 'run'
  loop.train(config_of(tiny, persistent=model_config.PersistentConfig(4)), run)
  loaded = runs.load_run(run)
  assert loaded.evaluated.windows is not None
  assert max(map(max, loaded.evaluated.windows)) < 256
  whole = runs.load_run(run)
  object.__setattr__(whole, 'evaluated', loaded.evaluated.clone(windows=None))
  nats = [each.evaluate('validation')['nll_nats_per_token'] for each in (loaded, whole)]
  assert nats[0] == pytest.approx(nats[1], abs=1e-5)
  prompts = ['the union ', 'states']
  texts = [[made.text for made in each.generate(prompts, 40, 0)] for each in (loaded, whole)]
  assert texts[0] == texts[1]
