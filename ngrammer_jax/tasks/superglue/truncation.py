"""How many inputs are truncated, and by how much."""

import dataclasses
import logging

import numpy as np

MAX_TRUNCATED_SHARE = 0.05  # a larger share of truncated inputs logs a warning


@dataclasses.dataclass(frozen=True)
class InputLengths:
  """Lengths of the inputs of a split.

  Attributes:
    task, split: names of the task and of the split.
    lengths: number of tokens of each input before truncation, with its end token.
    max_inputs: maximum number of tokens; longer inputs are truncated to it.
    targets_length: tokens of a row that are reserved for the target.
  """

  task: str
  split: str
  lengths: np.ndarray
  max_inputs: int
  targets_length: int

  @property
  def truncated_share(self) -> float:
    """Share of the inputs that are truncated."""
    return float((self.lengths > self.max_inputs).mean())

  def log(self) -> None:
    """Logs how many inputs are truncated; warns if it is more than MAX_TRUNCATED_SHARE."""
    if self.truncated_share > MAX_TRUNCATED_SHARE:
      logging.warning(
        '%s; at most %.0f %% are truncated with training.segment_length=%s',
        self._describe(),
        100 * MAX_TRUNCATED_SHARE,
        self.required_row_length(),
      )
    else:
      logging.info(self._describe())

  def required_row_length(self) -> int:
    """Returns the shortest row with which at most MAX_TRUNCATED_SHARE of inputs are truncated."""
    length = np.quantile(self.lengths, 1 - MAX_TRUNCATED_SHARE, method='inverted_cdf')
    return int(length) + self.targets_length

  def _describe(self) -> str:
    excess = self.lengths[self.lengths > self.max_inputs] - self.max_inputs
    name, count = f'{self.task}, {self.split}', len(self.lengths)
    if not len(excess):
      return (
        f'{name}: none of {count:,} inputs is truncated, the longest has {self.lengths.max():,} of '
        f'at most {self.max_inputs:,} tokens'
      )
    return (
      f'{name}: {len(excess):,} of {count:,} inputs ({self.truncated_share:.1%}) are truncated to '
      f'{self.max_inputs:,} tokens and lose {np.median(excess):,.0f} tokens (median), at most '
      f'{excess.max():,}'
    )
