"""A log file for each process, with stack traces when the process makes no progress.

<workdir>/logs/process_0.log   all log lines of process 0, with times
"""

import contextlib
import faulthandler
import logging
import pathlib
import sys

from ngrammer_jax.system import file_errors, hosts, synced_folder

DEFAULT_MINUTES = 10.0


class Watchdog:
  """Dumps the stack traces of all threads into the log file after a time without progress.

  When several processes hang, look at the process that does not wait in a collective. A context
  manager.

  Args:
    workdir: run directory.
    minutes: time without a `beat`. 0 disables the stack traces.
  """

  def __init__(self, workdir: pathlib.Path, minutes: float):
    self._folder = workdir / 'logs'
    self._name = f'process_{hosts.process_index()}.log'
    self._seconds = 60 * minutes

  def __enter__(self) -> 'Watchdog':
    self._synced = synced_folder.SyncedFolder(self._folder, self._name)
    path = self._synced.folder / self._name

    def disk_full_message() -> str:
      return f'{path} cannot be written: No space left on device'

    def ignore(_: logging.LogRecord) -> None:
      """Other code reports a full disk."""

    with file_errors.translate_disk_full(disk_full_message):
      path.parent.mkdir(parents=True, exist_ok=True)
      self._handler = logging.FileHandler(path, encoding='utf-8')
    self._handler.handleError = ignore
    self._handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
    logging.getLogger().addHandler(self._handler)
    self.beat()
    return self

  def beat(self) -> None:
    """Reports progress: restarts the timer."""
    if self._seconds:
      stream = self._handler.stream or sys.stderr
      faulthandler.dump_traceback_later(self._seconds, repeat=True, file=stream)

  def __exit__(self, kind, error, traceback) -> None:
    faulthandler.cancel_dump_traceback_later()
    logging.getLogger().removeHandler(self._handler)
    with contextlib.suppress(OSError):
      if error is not None:  # the console shows it only after this
        self._handler.stream.write(f'{kind.__name__}: {error}\n')
      self._handler.close()
    self._synced.close()
