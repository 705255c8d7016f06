"""Exceptions that the commands turn into exit codes."""

from collections.abc import Iterator, Sequence
import contextlib
import os
import signal

LESS_MEMORY = (
  'lower training.batch_size or training.segment_length (of evaluation: evaluation.streams or '
  'evaluation.segment_length), raise training.accumulation.parts, or use model.remat="minimal", or '
  '"full", which needs the least memory'
)
RERUN_ALL = 'rerun the same command in all processes to resume from the last checkpoint'


class BadInput(ValueError):
  """The input is invalid. The message names it, what was expected, and the fix.

  The commands print only the message and exit with status 2: rerunning them cannot help. One that
  all of several processes raise is printed by the first.
  """

  is_shared = False


@contextlib.contextmanager
def named(name: str | os.PathLike[str]) -> Iterator[None]:
  """Puts the name of what is read before the message of a BadInput."""
  try:
    yield
  except BadInput as error:
    raise BadInput(f'{name}: {error}') from error


def and_more(texts: Sequence[str]) -> str:
  """Says how many texts there are besides the first, which a message shows."""
  if len(texts) == 1:
    return ''
  return f' (and {len(texts) - 1:,} more)'


class NotApplicable(BadInput):
  """The model lacks the part that is analyzed, or the corpus the split that this needs."""


class PeerLostError(Exception):
  """Other processes of the same job cannot be reached.

  The message ends with `RERUN_ALL`. The commands exit with status 1.
  """


class Interrupted(Exception):
  """A signal stopped the run after everything was saved; rerun the same command to resume.

  The commands exit with 128 + the number of the signal, 143 for SIGTERM; of several processes with
  143. All of these raise it at the same step; None: the signal is not known to this one.
  """

  is_shared = True

  def __init__(self, received: signal.Signals | None):
    cause = 'SIGTERM, or a signal to another process' if received is None else received.name
    super().__init__(f'stopped by {cause}; rerun the same command to resume')
    self.signal = received
