"""Time is accounted for, over all starts of a run."""

import json
import logging
import re
import time

import pytest

from ngrammer_jax.training import loop
from ngrammer_jax.training.records import goodput
from tests.training import toy


@pytest.fixture
def clock(monkeypatch):
  """A clock that is moved by hand."""
  now = [100.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])

  def wait(seconds):
    now[0] += seconds

  return wait


def test_every_second_is_spent_on_one_thing(tmp_path, clock):
  spent = goodput.Goodput(tmp_path, time.monotonic() - 3)
  clock(2)
  spent.switch('training')
  clock(10)
  with spent.timed('evaluation'):
    clock(4)

  def slow():
    clock(1)
    yield 'batch'

  for batch in spent.timed_items(slow(), 'data'):
    assert batch == 'batch'
    clock(5)
  assert spent.share() == 15 / 25
  nonzero = {kind: seconds for kind, seconds in spent.seconds.items() if seconds}
  assert nonzero == {'start': 5, 'training': 15, 'evaluation': 4, 'data': 1}
  assert spent.format_summary() == ('25s (training 60.0%, start 5s, evaluation 4s, data 1s)')


def test_a_lap_leaves_out_what_is_not_training(tmp_path, clock):
  measured = goodput.Goodput(tmp_path, time.monotonic() - 3)
  measured.switch('training')
  measured.lap()
  clock(2)
  with measured.timed('evaluation'):
    clock(48)
  with measured.timed('data'):
    clock(1)
  clock(1)
  assert measured.lap() == 4
  clock(3)  # what was before does not count again
  assert measured.lap() == 3


def test_what_was_trained_after_the_last_checkpoint_is_lost_with_a_kill(tmp_path, clock):
  spent = goodput.Goodput(tmp_path, time.monotonic())
  spent.switch('training')
  clock(10)
  spent.mark_saved()
  clock(6)
  spent.write(force=True)
  restarted = goodput.Goodput(tmp_path, time.monotonic())
  assert (
    restarted.seconds['training'] == 10 and restarted.seconds['lost'] == 6 and restarted.starts == 2
  )
  assert restarted.format_summary() == '16s in 2 starts (training 62.5%, lost 6s)'
  restarted.mark_saved()
  restarted.write(force=True)
  assert goodput.Goodput(tmp_path, time.monotonic()).seconds['lost'] == 6


def test_a_damaged_account_begins_anew(tmp_path, clock):
  (tmp_path / 'goodput.json').write_text('{"sta')
  assert goodput.Goodput(tmp_path, time.monotonic()).starts == 1


@pytest.mark.full
def test_a_run_says_where_its_time_went(tiny, tmp_path, caplog, monkeypatch):
  toy.install(monkeypatch.setattr)
  caplog.set_level(logging.INFO)
  start = time.monotonic()
  assert loop.train(tiny(), tmp_path / 'run')
  content = json.loads((tmp_path / 'run' / 'goodput.json').read_text())
  kinds = {'start', 'compilation', 'data', 'training', 'evaluation', 'checkpoints'}
  assert kinds <= set(content['seconds']) and content['unsaved'] < 0.1
  assert sum(content['seconds'].values()) <= time.monotonic() - start
  assert min(content['seconds'].values()) >= 0
  assert any(re.match(r'total \w+ \(training [\d.]+%', m) for m in caplog.messages)
