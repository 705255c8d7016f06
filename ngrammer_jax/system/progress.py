"""Progress of long-running work: a bar on a terminal, lines with the time left in a log."""

from collections.abc import Iterable, Iterator
import contextlib
import logging
import sys
import time

from ngrammer_jax.system import hosts

FIRST_LOG = 5.0  # seconds before the first log line
LOG_INTERVAL = 10.0  # seconds between log lines


def format_duration(seconds: float) -> str:
  """Formats a duration with its two largest units: 42s, 3m05s, 2h10m, 5d03h."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f'{days}d{hours:02d}h'
  if hours:
    return f'{hours}h{minutes:02d}m'
  if minutes:
    return f'{minutes}m{seconds:02d}s'
  return f'{seconds}s'


def ignore(units: int) -> None:
  """Reports no progress."""
  del units


class LogHandler(logging.Handler):
  """Writes log lines above a progress bar, not into it."""

  def emit(self, record: logging.LogRecord) -> None:
    import tqdm

    with contextlib.suppress(OSError):  # a closed standard error must not stop the work
      tqdm.tqdm.write(self.format(record), file=sys.stderr)


class Progress:
  """Counts units of work up to a total. Use as a context manager.

  The rate and the time left are measured from the first call of `advance` on, because the first
  units often wait for a compilation. Until the second call they are unknown.

  Args:
    description: name of the work, at the beginning of every line.
    total: total number of units; None: unknown.
    unit: name of a unit, such as "tokens".
    initial: number of units finished before this run.
    log_lines: whether to log lines without a terminal.
    leave_bar: whether the finished bar stays on the terminal.
  """

  def __init__(
    self,
    description: str,
    total: int | None,
    unit: str,
    initial: int = 0,
    log_lines: bool = True,
    leave_bar: bool = True,
  ):
    self._description = description
    self._total = total
    self._unit = unit
    self._done = initial
    self._has_bar = sys.stderr.isatty() and hosts.is_primary()
    self._log_lines = log_lines and not self._has_bar
    self._next_log_time = time.monotonic() + FIRST_LOG
    self._measured_from: tuple[float, int] | None = None  # time and finished units
    import tqdm  # slow, and not every command shows progress

    self._bar = tqdm.tqdm(
      desc=description,
      total=total,
      initial=initial,
      unit=f' {unit}',
      unit_scale=total is None or total > 10_000,
      disable=not self._has_bar,
      dynamic_ncols=True,
      leave=leave_bar,
      smoothing=0.1,
    )

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *exception) -> None:
    self._bar.close()

  def advance(self, units: int, note: str = '') -> None:
    """Adds finished units; the note is shown after the bar."""
    self._done += units
    if note:
      self._bar.set_postfix_str(note, refresh=False)
    now = time.monotonic()
    # A first number of units alone, often after a compilation, says nothing without a total.
    can_log = self._log_lines and (self._total is not None or self._measured_from is not None)
    if self._measured_from is None:
      self._measured_from = now, self._done
      self._bar.reset()  # restarts its clock
      self._bar.n = self._bar.initial = self._bar.last_print_n = self._done
      self._bar.refresh()
    else:
      self._bar.update(units)
    if can_log and now >= self._next_log_time:
      self._next_log_time = now + LOG_INTERVAL
      logging.info('%s: %s', self._description, self.format_status())

  def count_bytes(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the chunks of a text; each adds its bytes to the finished units."""
    for chunk in chunks:
      self.advance(len(chunk))
      yield chunk

  def log(self, line: str) -> None:
    """Logs a line, unless the bar on a terminal shows the same."""
    if not self._has_bar:
      logging.info(line)

  def format_status(self) -> str:
    """Formats the finished share and, if known, the rate and the time left."""
    if self._total is None:
      status = f'{self._done:,} {self._unit}'
    else:
      status = f'{self._done / max(self._total, 1):.0%} of {self._total:,} {self._unit}'
    now = time.monotonic()
    start_time, initial = self._measured_from or (now, self._done)
    if self._done == initial or now == start_time:
      return status
    rate = (self._done - initial) / (now - start_time)
    if self._total is None:
      return f'{status}, {rate:,.0f} {self._unit}/s'
    left = format_duration(max(self._total - self._done, 0) / rate)
    return f'{status}, {rate:,.0f} {self._unit}/s, {left} left'
