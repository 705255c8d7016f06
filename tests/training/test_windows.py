"""Windows follow the spans, and training does not notice."""

import dataclasses
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ngrammer_jax import runs
from ngrammer_jax.models import config as model_config
from ngrammer_jax.training import loop, manifest, optimizers, windows

SPAN = model_config.SpanConfig(limit=256, ramp=4, penalty=0.01, initial=0.9)
MODEL = {
  'position': 'table',
  'positional': model_config.PositionalConfig(max_length=256),
  'memory': model_config.MemoryConfig(256, same_length='memory_alone'),
  'span': SPAN,
}
CONFIG = model_config.ModelConfig(layers=1, width=16, heads=4, feed_forward_width=0, **MODEL)


def chosen(*spans, growth=8.0, **given):
  return windows.chosen(CONFIG, np.array([spans], float), growth=growth, **given)[0]


def test_a_window_holds_span_ramp_and_growth_in_powers_of_two():
  # 64 tokens hold 51 + 4 and the key at the end, and 8.
  assert chosen(0, 51, 52, 200) == (64, 64, 128, 256)
  assert chosen(0, 59, 60, 200, growth=0.0) == (64, 64, 128, 256)
  assert chosen(51, 51, 51, 51, growth=np.array([[8, 8.9, 9, np.inf]])) == (64, 64, 128, 256)


def test_a_window_is_not_changed_to_and_fro():
  before = ((128, 128, 128, 128),)
  # It shrinks where there is room for twice the growth, and grows where there is not for all.
  assert chosen(43, 44, 115, 116, before=before) == (64, 128, 128, 256)


def test_after_many_changes_windows_only_grow():
  before = ((128, 128, 128, 64),)
  assert chosen(0, 60, 120, 60, before=before, changes=windows.CHANGES) == (128, 128, 256, 256)


@pytest.mark.parametrize('algorithm, rate', [('adam', 0.02), ('adagrad', 0.3), ('lamb', 0.1)])
def test_a_window_holds_what_any_gradients_make_of_a_span(tiny, algorithm, rate):
  """From check to check, 2 steps each, under gradients that all want longer spans."""
  fields = {'algorithm': algorithm, 'learning_rate': rate, 'warmup_steps': 4, 'clip_norm': 0.1}
  span = dataclasses.replace(SPAN, initial=0.02)
  config = tiny(MODEL | {'span': span}, fields, {'span_check_every': 2, 'steps': 60})
  params = {f'layer_{i}': {'attention': {'span': {'span': jnp.full(2, 0.02)}}} for i in (0, 1)}
  optimizer = optimizers.make(config.optimizer, 60)
  state, now, changed = optimizer.init(params), None, set()
  update = jax.jit(optimizer.update)
  for step in range(60):
    spans = windows.spans(config.model, params)
    if step % 2 == 0:
      now = windows.chosen(config.model, spans, now, 0, windows.growth(config, step, state))
      changed.add(now)
    assert (np.minimum(np.floor(spans + SPAN.ramp) + 1, SPAN.limit) <= now).all()
    wants = jax.tree.map(lambda p, size=step + 1.0: -size * jnp.ones_like(p), params)
    updates, state = update(wants, state, params)
    params = optax.apply_updates(params, updates)
  assert len(changed) > 1


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
  assert 'windows: ' in caplog.text and '(program 2)' in caplog.text
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
