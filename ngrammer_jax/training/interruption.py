"""SIGTERM and Ctrl-C as requests: finish the call that runs, save, then stop.

Of several processes, one that is sent SIGTERM stops all of them at the same check.
"""

import contextlib
import itertools
import os
import signal
import threading

from jax.experimental import multihost_utils

from ngrammer_jax import errors, hosts

CHECKS = itertools.count(1)  # of this process: JAX agrees on the number of one to come
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
  """Notes a signal instead of dying of it; a second one is not caught.

  A context manager, without effect outside the main thread, where no signals arrive.
  """

  def __init__(self):
    self._caught: signal.Signals | None = None
    self._before = {}

  def __enter__(self) -> 'Interruption':
    if hosts.several():
      return self  # JAX waits for SIGTERM, and tells all
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
    """Raises Interrupted where a signal has come. All processes check equally often."""
    if hosts.several() and multihost_utils.reached_preemption_sync_point(next(CHECKS)):
      raise errors.Interrupted(signal.SIGTERM)
    if self._caught is not None:
      raise errors.Interrupted(self._caught)
