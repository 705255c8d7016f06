"""The log of each process, and where it stands when it makes no progress.

<workdir>/logs/process_0.log   everything that process 0 says, with the time
"""

import contextlib
import faulthandler
import logging
import pathlib
import sys

from ngrammer_jax import files, hosts

MINUTES = 10.0


class _Log(logging.FileHandler):
  """A log that a full disk only makes shorter: others say that the disk is full."""

  def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name of logging
    pass


class Watchdog:
  """Writes the stacks of all threads into the log when nothing was heard for a while.

  Of several processes that wait for each other, the one that is not in a collective is the one
  that the others wait for. A context manager.

  Args:
    workdir: of the run.
    minutes: without a `beat`. 0: nothing is written.
  """

  def __init__(self, workdir: pathlib.Path, minutes: float = MINUTES):
    self._folder, self._name = workdir / 'logs', f'process_{hosts.number()}.log'
    self._seconds = 60 * minutes

  def __enter__(self) -> 'Watchdog':
    self._growing = files.Growing(self._folder, self._name)
    path = self._growing.folder / self._name
    with files.full_disk(lambda: f'{path} cannot be written: No space left on device'):
      path.parent.mkdir(parents=True, exist_ok=True)
      self._handler = _Log(path, encoding='utf-8')
    self._handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
    logging.getLogger().addHandler(self._handler)
    self.beat()
    return self

  def beat(self) -> None:
    """Something was done."""
    if self._seconds:
      stream = self._handler.stream or sys.stderr
      faulthandler.dump_traceback_later(self._seconds, repeat=True, file=stream)

  def __exit__(self, kind, error, traceback) -> None:
    faulthandler.cancel_dump_traceback_later()
    logging.getLogger().removeHandler(self._handler)
    with contextlib.suppress(OSError):
      if error is not None:  # said on the console only after this
        self._handler.stream.write(f'{kind.__name__}: {error}\n')
      self._handler.close()
    self._growing.close()
