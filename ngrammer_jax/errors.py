"""The two exceptions that verbs end with: wrong input, and a request to stop."""

import signal


class BadInput(ValueError):
  """What was given cannot work. The message names it, what was expected and the fix.

  The verbs print the message alone and exit with status 2: retrying the same
  command cannot help.
  """


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
