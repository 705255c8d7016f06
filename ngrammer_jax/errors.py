"""Exceptions with exit codes of the commands."""

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
  """The input is invalid. The message has the input, the expectation and the remedy.

  The commands print only the message and exit with status 2; do not retry. If all of several
  processes raise it, the first one prints it.
  """

  is_shared = False


@contextlib.contextmanager
def named(name: str | os.PathLike[str]) -> Iterator[None]:
  """Prefixes the message of a BadInput with a name."""
  try:
    yield
  except BadInput as error:
    raise BadInput(f'{name}: {error}') from error


def and_more(texts: Sequence[str]) -> str:
  """Returns the number of further texts after the first one in a message."""
  if len(texts) == 1:
    return ''
  return f' (and {len(texts) - 1:,} more)'


class NotApplicable(BadInput):
  """The model lacks the analyzed part, or the corpus lacks the required split."""


class PeerLostError(Exception):
  """Other processes of the same job cannot be reached.

  The message ends with `RERUN_ALL`. The commands exit with status 1.
  """


class Interrupted(Exception):
  """A signal stopped the run after everything was saved; rerun the same command to resume.

  The commands exit with 128 + the number of the signal, 143 for SIGTERM; several processes with
  143. All processes raise it at the same step; None: a signal received by another process.
  """

  is_shared = True

  def __init__(self, received: signal.Signals | None):
    cause = 'SIGTERM, or a signal to another process'
    if received is not None:
      cause = received.name
    super().__init__(f'stopped by {cause}; rerun the same command to resume')
    self.signal = received
