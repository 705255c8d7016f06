"""SIGTERM and Ctrl-C as requests: finish the current call, save a checkpoint, then stop.

SIGTERM to one of several processes stops all of them at the same check.
"""

import contextlib
import itertools
import os
import signal
import threading

from jax.experimental import multihost_utils

from ngrammer_jax import errors
from ngrammer_jax.system import hosts

SYNC_POINTS = itertools.count(1)  # JAX agrees on a sync point by its number in each process
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalHandler:
  """Records the first signal instead of exiting; a second one has its default effect.

  A context manager. It has no effect outside the main thread, the only one that gets signals.
  """

  def __init__(self):
    self._received: signal.Signals | None = None
    self._original_handlers = {}

  def __enter__(self) -> 'SignalHandler':
    if hosts.is_multiprocess():
      return self  # JAX handles SIGTERM, and tells all processes
    if threading.current_thread() is threading.main_thread():
      self._original_handlers = {n: signal.signal(n, self._on_signal) for n in SIGNALS}
    return self

  def __exit__(self, *exception) -> None:
    for number, handler in self._original_handlers.items():
      signal.signal(number, handler)

  def _on_signal(self, number: int, frame: object) -> None:
    self._received = signal.Signals(number)
    self.__exit__()  # a second signal has its default effect
    # Not through logging: the signal may have interrupted a log call.
    with contextlib.suppress(OSError):  # standard error may be closed
      os.write(2, f'{self._received.name}: saving a checkpoint, then stopping\n'.encode())

  def check(self, *_: object) -> None:
    """Raises Interrupted if a signal was received. All processes have to call it equally often."""
    if hosts.is_multiprocess() and multihost_utils.reached_preemption_sync_point(next(SYNC_POINTS)):
      raise errors.Interrupted(signal.SIGTERM)
    if self._received is not None:
      raise errors.Interrupted(self._received)
