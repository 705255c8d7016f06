"""SIGTERM and Ctrl-C as requests: finish the call that runs, save, then stop."""

import contextlib
import os
import signal
import threading

from ngrammer_jax import errors

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
  """Notes a signal instead of dying of it; a second one is not caught.

  A context manager, without effect outside the main thread, where no signals arrive.
  """

  def __init__(self):
    self._caught: signal.Signals | None = None
    self._before = {}

  def __enter__(self) -> 'Interruption':
    if threading.current_thread() is threading.main_thread():
      self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
    return self

  def __exit__(self, *exception) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _catch(self, number: int, frame: object) -> None:
    self._caught = signal.Signals(number)
    self.__exit__()  # the next one does what it always does
    # Not by logging: what was interrupted may be a line of the log.
    with contextlib.suppress(OSError):  # nobody may be listening any more
      os.write(2, f'{self._caught.name}: stopping as soon as all is saved\n'.encode())

  def check(self, *_: object) -> None:
    """Raises Interrupted where a signal has come."""
    if self._caught is not None:
      raise errors.Interrupted(self._caught)
