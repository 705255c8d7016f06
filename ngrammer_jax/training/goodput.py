"""Where the time of a run goes, over all its starts.

<workdir>/goodput.json   seconds by what they were spent on, and how often the run was started
"""

import collections
from collections.abc import Iterator
import contextlib
import json
import logging
import pathlib
import time
from typing import TypeVar

from ngrammer_jax import files, hosts, progress

Item = TypeVar('Item')
EVERY = 10.0  # seconds between what is written
TRAINING, LOST = 'training', 'lost'


class Goodput:
  """The time of this process, and of those before it.

  At any moment it is spent on one thing, at first on the `start`. What was trained after the last
  checkpoint of a run that was killed was `lost`.

  Args:
    workdir: of the run.
    began: when this start did, on the monotonic clock.
  """

  def __init__(self, workdir: pathlib.Path, began: float):
    self._path = workdir / 'goodput.json'
    self._kind, self._since, self._written = 'start', began, 0.0
    known = {'starts': 0, 'seconds': {}, 'unsaved': 0.0}
    with contextlib.suppress(OSError, ValueError, TypeError):  # it is not worth a run
      known |= json.loads(self._path.read_text(encoding='utf-8'))
    self.starts, self._unsaved = known['starts'] + 1, 0.0
    self.seconds = collections.Counter(known['seconds'])
    self.seconds[LOST] += known['unsaved']
    self.seconds[TRAINING] -= known['unsaved']

  def switch(self, kind: str) -> str:
    """From now on time is spent on this. Returns what it was spent on."""
    before, now = self._kind, time.monotonic()
    self.seconds[before] += now - self._since
    self._unsaved += (now - self._since) * (before == TRAINING)
    self._kind, self._since = kind, now
    return before

  @contextlib.contextmanager
  def spent_on(self, kind: str) -> Iterator[None]:
    """Meanwhile time is spent on this."""
    before = self.switch(kind)
    try:
      yield
    finally:
      self.switch(before)

  def waiting_for(self, items: Iterator[Item], kind: str) -> Iterator[Item]:
    """The items; the time until they come is spent on this."""
    while True:
      with self.spent_on(kind):
        item = next(items, None)
      if item is None:
        return
      yield item

  def saved(self) -> None:
    """What is trained so far is not lost any more."""
    self.switch(self._kind)
    self._unsaved = 0.0

  def share(self) -> float:
    """Of all time, that which trained and was not lost."""
    self.switch(self._kind)
    return self.seconds[TRAINING] / max(sum(self.seconds.values()), 1e-9)

  def write(self, now: bool = False) -> None:
    """Writes it down, now and then or now; the first of several processes does."""
    if not hosts.first() or not (now or time.monotonic() - self._written > EVERY):
      return
    self.switch(self._kind)
    self._written = time.monotonic()
    known = {'starts': self.starts, 'seconds': dict(self.seconds), 'unsaved': self._unsaved}
    with contextlib.suppress(Exception):  # each store has its own
      files.write(self._path, json.dumps(known, indent=1) + '\n')

  def said(self) -> str:
    """A line to read."""
    share, total = self.share(), sum(self.seconds.values())
    rest = [(kind, s) for kind, s in self.seconds.most_common() if kind != TRAINING and s >= 0.5]
    parts = [f'{kind} {progress.duration(seconds)}' for kind, seconds in rest]
    starts = f' in {self.starts} starts' if self.starts > 1 else ''
    return f'{progress.duration(total)}{starts}, {share:.1%} of it training; {", ".join(parts)}'

  def close(self) -> None:
    """Writes it down and says it."""
    self.write(now=True)
    logging.info('time: %s', self.said())
