"""The two exceptions that verbs end with: wrong input, and a request to stop."""

from collections.abc import Mapping
import signal
from typing import Any


class BadInput(ValueError):
  """What was given cannot work. The message names it, what was expected and the fix.

  The verbs print the message alone and exit with status 2: retrying the same
  command cannot help.
  """


def check_choices(section: str, block: Any, choices: Mapping[str, tuple[str, ...]]) -> None:
  """Raises BadInput for a key of a block whose value is not among its choices."""
  for key, valid in choices.items():
    if getattr(block, key) not in valid:
      raise BadInput(f'{section}.{key}={getattr(block, key)!r} is not one of: {", ".join(valid)}')


def check_at_least(section: str, key: str, value: int, least: int) -> None:
  """Raises BadInput for a value that is too small."""
  if value < least:
    raise BadInput(f'{section}.{key}={value} must be at least {least}')


class Lost(Exception):
  """Other processes that work together with this one cannot be reached.

  The verbs exit with status 1: the same command, for all of them, goes on from the last checkpoint.
  """


class Interrupted(Exception):
  """A signal asked to stop; everything is saved, and the same command goes on.

  The verbs exit with 128 + the number of the signal, 143 for SIGTERM.
  """

  def __init__(self, caught: signal.Signals):
    super().__init__(f'stopped by {caught.name}; the same command goes on from here')
    self.signal = caught
