"""Time of a run by phase, over all its starts.

<workdir>/goodput.json   seconds by phase, and the number of starts
"""

import collections
from collections.abc import Iterator
import contextlib
import json
import logging
import pathlib
import time
from typing import Any, TypeVar

from ngrammer_jax.system import file_errors, files, hosts, json_files, progress

Item = TypeVar('Item')
FILE = 'goodput.json'
WRITE_INTERVAL = 10.0  # seconds
# Phases not named by the loop.
TRAINING = 'training'
DATA = 'data'
LOST = 'lost'


class Goodput:
  """Adds up the time of each phase, in this process and in earlier starts of the run.

  There is one phase at a time, initially `start`. When a run is killed, its training time after the
  last checkpoint moves to the phase `lost`.

  Args:
    workdir: run directory.
    start_time: time of this start, on the monotonic clock.
  """

  def __init__(self, workdir: pathlib.Path, start_time: float):
    self._path = workdir / FILE
    self._phase = 'start'
    self._phase_start = start_time
    self._last_write = 0.0
    previous = _read(self._path)
    lost = previous.get('unsaved', 0.0)
    self.starts = previous.get('starts', 0) + 1
    self.seconds = collections.Counter(previous.get('seconds', {}))
    self.seconds.update({LOST: lost, TRAINING: -lost})
    self._saved = self.seconds[TRAINING]
    self._lap_start = 0.0

  def switch(self, phase: str) -> str:
    """Starts a phase and returns the one before."""
    previous = self._phase
    now = time.monotonic()
    self.seconds[previous] += now - self._phase_start
    self._phase = phase
    self._phase_start = now
    return previous

  @contextlib.contextmanager
  def timed(self, phase: str) -> Iterator[None]:
    """Counts the time of the body as a phase."""
    previous = self.switch(phase)
    try:
      yield
    finally:
      self.switch(previous)

  def timed_items(self, items: Iterator[Item], phase: str) -> Iterator[Item]:
    """Yields the items; the time spent waiting for them counts as a phase."""
    while True:
      with self.timed(phase):
        item = next(items, None)
      if item is None:
        return
      yield item

  def mark_saved(self) -> None:
    """Marks the training time so far as saved in a checkpoint."""
    self.switch(self._phase)
    self._saved = self.seconds[TRAINING]

  def lap(self) -> float:
    """Returns the seconds of training and of waiting for data since the last call."""
    self.switch(self._phase)
    start = self._lap_start
    self._lap_start = self.seconds[TRAINING] + self.seconds[DATA]
    return self._lap_start - start

  def share(self) -> float:
    """Returns training time as a share of all time."""
    self.switch(self._phase)
    return self.seconds[TRAINING] / max(sum(self.seconds.values()), 1e-9)

  def write(self, force: bool = False) -> None:
    """Writes goodput.json in the primary process, at most every WRITE_INTERVAL unless forced."""
    self.switch(self._phase)
    is_due = force or self._phase_start - self._last_write > WRITE_INTERVAL
    if not hosts.is_primary() or not is_due:
      return
    self._last_write = self._phase_start
    unsaved = self.seconds[TRAINING] - self._saved
    content = {'starts': self.starts, 'seconds': dict(self.seconds), 'unsaved': unsaved}
    with contextlib.suppress(Exception):  # the storage library raises many classes
      files.write(self._path, json.dumps(content, indent=1) + '\n')

  def format_summary(self) -> str:
    """Formats the total time, the share of training and the time of the other phases."""
    share = self.share()
    total = sum(self.seconds.values())
    starts = f' in {self.starts} starts' if self.starts > 1 else ''
    parts = [f'training {share:.1%}']
    for phase, seconds in self.seconds.most_common():
      if phase != TRAINING and seconds >= 0.5:
        parts.append(f'{phase} {progress.format_duration(seconds)}')
    return f'{progress.format_duration(total)}{starts} ({", ".join(parts)})'

  def close(self) -> None:
    """Writes goodput.json and logs the summary."""
    self.write(force=True)
    logging.info('total %s', self.format_summary())


def training_seconds(workdir: pathlib.Path) -> float:
  """Returns the seconds of the training steps of a run over all its starts; 0 if unknown."""
  return _read(workdir / FILE).get('seconds', {}).get(TRAINING, 0.0)


def _read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of goodput.json; {} if it is missing or damaged."""
  with contextlib.suppress(*file_errors.DAMAGE_ERRORS):
    return json_files.read(path)
  return {}
