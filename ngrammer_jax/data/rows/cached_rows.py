"""Rows of the token cache: their tokens are a function of the step alone.

Row b of a batch starts at b/B of the split and continues from segment to segment. After the first
step, the memory of a row therefore has the tokens just before the segment.

B batch rows, T segment length.
"""

from ngrammer_jax.data.rows import mixture_schedule
from ngrammer_jax.data.tokens import token_split


class CachedRows:
  """The training rows of a split tokenised in advance; see `interface.TrainRows`.

  Every row reads the whole split and wraps around at its end. The first tokens of the rows are
  spread evenly, so one epoch of the batch contains each token once, except for remainders of
  indivisible lengths.

  Args:
    split: the tokens.
    length: T.
    schedule: the steps at which each row of the global batch reads the split.

  Attributes:
    epochs: number of completed epochs after the last step read here.
  """

  def __init__(
    self, split: token_split.TokenSplit, length: int, schedule: mixture_schedule.PartSchedule
  ):
    self._split = split
    self._length = length
    self._schedule = schedule
    self.epochs = 0
    self._stride = len(split.tokens) // schedule.batch_size

  def rows(self, step: int, rows: range) -> dict[int, token_split.Row]:
    """Returns the segments of the rows that read the split at a step, from 0.

    They do not depend on the number of hosts.
    """
    is_reading_B = self._schedule.is_reading(step)
    segments_B = self._schedule.segments_before(step)
    self.epochs = int(self.epochs_before(step + 1))
    segments = {}
    for row in rows:
      if is_reading_B[row]:
        first = row * self._stride + int(segments_B[row]) * self._length
        segments[row] = self._split.row(first, self._length)
    return segments

  def epochs_before(self, step: int) -> float:
    """Returns the number of epochs read by all rows of the batch before a step."""
    segments = int(self._schedule.segments_before(step).sum())
    return segments * self._length / len(self._split.tokens)

  def states(self, step: int) -> None:
    """Returns None: the rows are a function of the step, without state."""

  def restore(self, step: int, saved: None) -> None:
    """Does nothing, see `states`."""
