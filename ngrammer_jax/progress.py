"""Progress of long work: a bar on a terminal, plain lines with time left in a log."""

import contextlib
import logging
import sys
import time

import tqdm

from ngrammer_jax import hosts

LINE_EVERY = 10.0  # seconds between plain lines


def duration(seconds: float) -> str:
  """A duration as people write it: 42s, 3m05s, 2h10m, 5d03h."""
  seconds = int(round(seconds))
  for unit, small, size, part in (
    ('d', 'h', 86_400, 3600),
    ('h', 'm', 3600, 60),
    ('m', 's', 60, 1),
  ):
    if seconds >= size:
      return f'{seconds // size}{unit}{seconds % size // part:02d}{small}'
  return f'{seconds}s'


class LogHandler(logging.Handler):
  """Writes log lines above a progress bar, not into it."""

  def emit(self, record: logging.LogRecord) -> None:
    with contextlib.suppress(OSError):  # a reader that is gone must not end the work
      tqdm.tqdm.write(self.format(record), file=sys.stderr)


class Progress:
  """Counts units of work up to a total. Use as a context manager.

  Args:
    what: what is being done, the first words of every line.
    total: units of the whole work.
    unit: name of a unit, as in "tokens".
    done: units finished before this run.
    lines: also write plain lines where there is no terminal.
  """

  def __init__(self, what: str, total: int, unit: str, done: int = 0, lines: bool = True):
    self._what, self._total, self._unit, self._done = what, total, unit, done
    self._terminal = sys.stderr.isatty() and hosts.first()
    self._lines = lines and not self._terminal
    self._began = self._last_line = time.monotonic()
    self._first = done
    self._bar = tqdm.tqdm(
      desc=what,
      total=total,
      initial=done,
      unit=f' {unit}',
      unit_scale=total > 10_000,
      disable=not self._terminal,
      dynamic_ncols=True,
      smoothing=0.1,
    )

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *exception) -> None:
    self._bar.close()

  def advance(self, units: int, note: str = '') -> None:
    """Reports that `units` more are done."""
    self._done += units
    if note:
      self._bar.set_postfix_str(note, refresh=False)
    self._bar.update(units)
    now = time.monotonic()
    if self._lines and now - self._last_line >= LINE_EVERY:
      self._last_line = now
      logging.info('%s: %s', self._what, self.line())

  def say(self, line: str) -> None:
    """Writes a line to the log; on a terminal the bar says it all."""
    if not self._terminal:
      logging.info(line)

  def seconds_left(self) -> float:
    """Time left at the mean rate of this run."""
    made = max(self._done - self._first, 1)
    return (time.monotonic() - self._began) / made * max(self._total - self._done, 0)

  def line(self) -> str:
    """Share done, rate and time left."""
    rate = (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)
    share = self._done / max(self._total, 1)
    left = duration(self.seconds_left())
    return f'{share:.0%} of {self._total:,} {self._unit}, {rate:,.0f} {self._unit}/s, {left} left'
