"""Signals as requests: training saves a checkpoint and stops; other commands end with a message.

These are SIGTERM, SIGUSR1 and SIGUSR2 (Slurm's --signal), SIGHUP (a closed terminal) and SIGINT
(Ctrl-C). Signals ignored at the start, as by `nohup`, stay ignored.

JAX announces a SIGTERM of one process to all processes, so other signals are converted to SIGTERM.
"""

from collections.abc import Callable, Sequence
import contextlib
import itertools
import os
import signal
import threading
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.system import hosts

SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT
MAX_INTERRUPTS = 2  # terminals and launchers send Ctrl-C twice; one more ends without a checkpoint
SYNC_POINTS = itertools.count(1)  # JAX agrees on a sync point by its number in each process


def exit_on_signals() -> None:
  """Ends a command with 128 + the number of a signal, except within `SignalHandler`.

  Ctrl-C stays a KeyboardInterrupt.
  """

  def exit_now(number: int, frame: object) -> None:
    if hosts.is_multiprocess() and number != signal.SIGTERM:
      os.kill(os.getpid(), signal.SIGTERM)
      return
    _print(f'stopped by {signal.Signals(number).name}; rerun the same command')
    os._exit(128 + number)

  _handle(exit_now, SIGNALS[:-1])


def _handle(
  handler: Callable[[int, Any], None], numbers: Sequence[signal.Signals]
) -> dict[signal.Signals, Any]:
  """Sets the handler of all signals except ignored ones; returns the previous handlers by signal.

  It has no effect outside the main thread, because only this thread receives signals.
  """
  if threading.current_thread() is not threading.main_thread():
    return {}
  heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
  return {number: signal.signal(number, handler) for number in heard}


def _print(message: str) -> None:
  # Not through logging, because the signal may have interrupted it.
  with contextlib.suppress(OSError):  # standard error may be closed
    os.write(2, f'{message}\n'.encode())


class SignalHandler:
  """A context manager that records the first signal instead of exiting.

  Later signals are ignored, as Slurm sends SIGTERM after SIGUSR1. The third Ctrl-C has its default
  effect.
  """

  def __init__(self):
    self._received: signal.Signals | None = None
    self._interrupts = 0

  def __enter__(self) -> 'SignalHandler':
    # JAX handles SIGTERM to one of several processes.
    self._original_handlers = _handle(self._on_signal, SIGNALS[hosts.is_multiprocess() :])
    return self

  def __exit__(self, *exception) -> None:
    for number, handler in self._original_handlers.items():
      signal.signal(number, handler)

  def _on_signal(self, number: int, frame: object) -> None:
    self._interrupts += number == signal.SIGINT
    if self._interrupts > MAX_INTERRUPTS:
      signal.default_int_handler(number, frame)
    if self._received is None:
      self._received = signal.Signals(number)
      _print(f'{hosts.prefix()}{self._received.name}: saving a checkpoint, then stopping')
      if hosts.is_multiprocess():
        os.kill(os.getpid(), signal.SIGTERM)

  def check_interrupted(self) -> None:
    """Raises Interrupted if a signal was received. All processes must call it equally often."""
    was_received = self._received is not None
    if hosts.is_multiprocess():
      from jax.experimental import multihost_utils

      was_received = multihost_utils.reached_preemption_sync_point(next(SYNC_POINTS))
    if was_received:
      raise errors.Interrupted(self._received)
