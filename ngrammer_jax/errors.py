"""Exceptions that the verbs turn into exit codes, and checks that raise them."""

from collections.abc import Mapping
import signal
from typing import Any


class BadInput(ValueError):
  """The input is invalid. The message names it, what was expected, and the fix.

  The verbs print only the message and exit with status 2: rerunning the same command cannot help.
  """


def check_choices(section: str, block: Any, choices: Mapping[str, tuple[str, ...]]) -> None:
  """Raises BadInput if the value of a key is not one of its choices."""
  for key, valid in choices.items():
    if getattr(block, key) not in valid:
      raise BadInput(f'{section}.{key}={getattr(block, key)!r} is not one of: {", ".join(valid)}')


def check_at_least(section: str, key: str, value: int, least: int) -> None:
  """Raises BadInput if a value is too small."""
  if value < least:
    raise BadInput(f'{section}.{key}={value} must be at least {least}')


class PeerLostError(Exception):
  """Other processes of the same job cannot be reached.

  The verbs exit with status 1: rerun the same command in all processes to resume from the last
  checkpoint.
  """


class Interrupted(Exception):
  """A signal stopped the run after everything was saved; rerun the same command to resume.

  The verbs exit with 128 + the number of the signal, 143 for SIGTERM.
  """

  def __init__(self, received: signal.Signals):
    super().__init__(f'stopped by {received.name}; rerun the same command to resume')
    self.signal = received
