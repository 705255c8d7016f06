"""The time left of a run counts the pauses that are to come."""

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.training import recorder

T = experiment.TrainingConfig(
  steps=100, batch_size=2, segment_length=5, evaluate_every=30, checkpoint_every=20
)


@pytest.fixture
def running(tmp_path, monkeypatch):
  """A recorder of a run with 20 tokens/s, and a clock that its pauses turn forward."""
  config = experiment.Config(training=T)
  record = recorder.Recorder(config, None, tmp_path, 0, 0.0, str)
  record._rate, record._rates_measured = 20.0, 2
  now = [0.0]
  monkeypatch.setattr(recorder.time, 'monotonic', lambda: now[0])
  yield record, now
  record._writer.close()


def pause(running, phase, seconds):
  record, now = running
  with record.timed(phase):
    now[0] += seconds


def test_pauses_that_are_to_come_count_in_the_time_left(running):
  record, _ = running
  assert record._seconds_left(40) == 60 * 10 / 20
  pause(running, 'compilation', 1000.0)
  pause(running, 'evaluation', 500.0)  # which compiled too
  pause(running, 'evaluation', 7.0)
  pause(running, 'checkpoints', 2.0)
  # Evaluations at 60, 90 and 100; checkpoints at 40, 60, 80 and 100.
  assert record._seconds_left(40) == 30 + 3 * 7 + 4 * 2
  assert record._seconds_left(41) == 29.5 + 3 * 7 + 3 * 2
  assert record._seconds_left(100) == 7 + 2


def test_without_an_interval_an_event_is_at_the_last_step():
  assert T.count_due(1, 0) == T.count_due(100, 0) == 1
  for every in (1, 7, 20, 100, 101):
    steps = [step for step in range(1, 101) if step % every == 0 or step == 100]
    for first in (1, 7, 20, 99, 100):
      assert T.count_due(first, every) == sum(step >= first for step in steps), (every, first)
