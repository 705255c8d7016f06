"""Progress in a log: durations, rates and what is left."""

import io
import logging
import sys

import pytest

from ngrammer_jax.system import progress
from tests.loops import each


@each(
  'seconds, expected',
  [
    (0, '0s'),
    (0.4, '0s'),
    (42, '42s'),
    (59.4, '59s'),
    (59.6, '1m00s'),
    (185, '3m05s'),
    (3599, '59m59s'),
    (3599.6, '1h00m'),
    (7800, '2h10m'),
    (86_399, '23h59m'),
    (86_400, '1d00h'),
    (5 * 86_400 + 3 * 3600 + 59, '5d03h'),
    (1_000_000_000, '11574d01h'),
  ],
)
def test_duration(seconds, expected):
  assert progress.format_duration(seconds) == expected


class Clock:
  """A time that goes on when told."""

  now = 1000.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(progress.time, 'monotonic', clock)
  return clock


@pytest.fixture
def log(caplog):
  """What has been logged so far, on call."""
  caplog.set_level(logging.INFO)
  return lambda: caplog.messages


def test_line_tells_share_rate_and_time_left(clock):
  """The first units waited for a compilation of 100 seconds, which is not part of the rate."""
  with progress.Progress('training', 4000, 'tokens') as bar:
    clock.now += 100
    bar.advance(1000)
    assert bar.format_status() == '25% of 4,000 tokens'
    clock.now += 20
    assert bar.format_status() == '25% of 4,000 tokens'
    bar.advance(1000)
    assert bar.format_status() == '50% of 4,000 tokens, 50 tokens/s, 40s left'
    bar.advance(2000)
    assert bar.format_status() == '100% of 4,000 tokens, 150 tokens/s, 0s left'


def test_rate_is_of_this_run_alone(clock):
  with progress.Progress('training', 4000, 'tokens', initial=3000) as bar:
    bar.advance(0)
    clock.now += 10
    bar.advance(500)
    assert bar.format_status() == '88% of 4,000 tokens, 50 tokens/s, 10s left'


def test_beginning_and_empty_work_have_a_line(clock):
  assert progress.Progress('x', 10, 'steps').format_status() == '0% of 10 steps'
  assert progress.Progress('x', 0, 'steps').format_status() == '0% of 0 steps'


def test_more_than_all_is_nothing_left(clock):
  bar = progress.Progress('x', 10, 'steps')
  bar.advance(1)
  clock.now += 5
  bar.advance(20)
  assert bar.format_status() == '210% of 10 steps, 4 steps/s, 0s left'


def test_log_has_a_line_after_five_seconds_and_then_every_ten(clock, log):
  with progress.Progress('reading', 100, 'bytes') as bar:
    bar.advance(0)
    for _ in range(24):
      clock.now += 1
      bar.advance(1)
  assert log() == [
    'reading: 5% of 100 bytes, 1 bytes/s, 1m35s left',
    'reading: 15% of 100 bytes, 1 bytes/s, 1m25s left',
  ]


def test_chunks_of_a_text_are_counted_as_they_are_read(clock, log):
  bar = progress.Progress('reading', None, 'bytes')
  chunks = bar.count_bytes([b'abc', b'de'])
  assert next(chunks) == b'abc' and bar.format_status() == '3 bytes'
  clock.now += 5
  assert list(chunks) == [b'de'] and log() == ['reading: 5 bytes, 0 bytes/s']


def test_first_units_without_a_total_have_no_line(clock, log):
  with progress.Progress('validating', None, 'tokens') as bar:
    clock.now += 100  # of a compilation
    bar.advance(1000)
    assert log() == []
    clock.now += 1
    bar.advance(1000)
  assert log() == ['validating: 2,000 tokens, 1,000 tokens/s']


def test_log_can_be_left_to_others(clock, log):
  with progress.Progress('reading', 100, 'bytes', log_lines=False) as bar:
    clock.now += 100
    bar.advance(1)
    bar.log('step 1')
  assert log() == ['step 1']


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_terminal_has_a_bar_and_no_lines(monkeypatch, log):
  terminal = Terminal()
  monkeypatch.setattr(sys, 'stderr', terminal)
  monkeypatch.setattr(progress, 'FIRST_LOG', 0)
  with progress.Progress('reading', 100, 'bytes') as bar:
    bar.advance(40)
    assert '40%' in terminal.getvalue() and bar._bar.format_dict['rate'] is None
    bar.advance(60, note='loss 3.2')
    bar.log('step 1')
  assert log() == []
  shown = terminal.getvalue()
  assert 'reading' in shown and '100%' in shown and 'loss 3.2' in shown


@pytest.mark.parametrize('leave_bar', [True, False])
def test_a_finished_bar_stays_or_is_cleared(leave_bar, monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr(sys, 'stderr', terminal)
  with progress.Progress('reading', 100, 'bytes', leave_bar=leave_bar) as bar:
    bar.advance(100)
  assert (terminal.getvalue().rpartition('\r')[2] == '') != leave_bar


def test_log_has_no_bar(monkeypatch, log):
  file = io.StringIO()
  monkeypatch.setattr(sys, 'stderr', file)
  with progress.Progress('reading', 100, 'bytes') as bar:
    bar.advance(100)
  assert file.getvalue() == ''
