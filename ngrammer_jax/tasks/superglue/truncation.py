"""How many inputs are truncated, and by how much."""

from collections.abc import Sequence
import logging

import numpy as np

MAX_TRUNCATED_SHARE = 0.05  # a larger share of truncated inputs logs a warning


def log_lengths(
  task: str, split: str, lengths: Sequence[int], max_inputs: int, max_targets: int
) -> None:
  """Logs how many inputs are truncated; warns if it is more than MAX_TRUNCATED_SHARE.

  Args:
    task, split: names of the task and of the split.
    lengths: number of tokens of each input before truncation, with its end token.
    max_inputs: maximum number of tokens; longer inputs are truncated to it.
    max_targets: tokens of a row that are reserved for the target.
  """
  lengths = np.asarray(lengths)
  excess = lengths[lengths > max_inputs] - max_inputs
  if not len(excess):
    logging.info(
      f'{task}, {split}: none of {len(lengths):,} inputs is truncated, the longest has '
      f'{lengths.max():,} of at most {max_inputs:,} tokens'
    )
    return
  share = len(excess) / len(lengths)
  message = (
    f'{task}, {split}: {len(excess):,} of {len(lengths):,} inputs ({share:.1%}) are truncated to '
    f'{max_inputs:,} tokens and lose {np.median(excess):,.0f} tokens (median), at most '
    f'{excess.max():,}'
  )
  if share <= MAX_TRUNCATED_SHARE:
    logging.info(message)
    return
  row_length = required_row_length(lengths, max_targets)
  logging.warning(
    f'{message}; at most {MAX_TRUNCATED_SHARE:.0%} are truncated with '
    f'training.segment_length={row_length}'
  )


def required_row_length(lengths: np.ndarray, max_targets: int) -> int:
  """Returns the shortest row with which at most MAX_TRUNCATED_SHARE of inputs are truncated."""
  length = np.quantile(lengths, 1 - MAX_TRUNCATED_SHARE, method='inverted_cdf')
  return int(length) + max_targets
