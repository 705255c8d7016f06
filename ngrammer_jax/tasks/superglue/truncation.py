"""Statistics of truncated inputs."""

from collections.abc import Sequence
import logging

import numpy as np

MAX_TRUNCATED_SHARE = 0.05  # a larger share of truncated inputs logs a warning


def log_lengths(
  task: str, split: str, lengths: Sequence[int], max_inputs: int, max_targets: int
) -> None:
  """Logs the number of truncated inputs; warns above MAX_TRUNCATED_SHARE.

  Args:
    task, split: names of the task and of the split.
    lengths: number of tokens of each input before truncation, with its end token.
    max_inputs: maximum number of tokens; longer inputs are truncated to it.
    max_targets: tokens of a row reserved for the target.
  """
  lengths = np.asarray(lengths)
  excess = lengths[lengths > max_inputs] - max_inputs
  share = len(excess) / len(lengths)
  if len(excess):
    message = (
      f'{len(excess):,} of {len(lengths):,} inputs ({share:.1%}) are truncated to {max_inputs:,} '
      f'tokens and lose {np.median(excess):,.0f} tokens (median), at most {excess.max():,}'
    )
  else:
    message = (
      f'none of {len(lengths):,} inputs is truncated, the longest has {lengths.max():,} of at '
      f'most {max_inputs:,} tokens'
    )
  level = logging.INFO
  if share > MAX_TRUNCATED_SHARE:
    level = logging.WARNING
    row_length = required_row_length(lengths, max_targets)
    message += (
      f'; at most {MAX_TRUNCATED_SHARE:.0%} are truncated with training.segment_length={row_length}'
    )
  logging.log(level, f'{task}, {split}: {message}')


def required_row_length(lengths: np.ndarray, max_targets: int) -> int:
  """Returns the shortest row with which at most MAX_TRUNCATED_SHARE of inputs are truncated."""
  length = np.quantile(lengths, 1 - MAX_TRUNCATED_SHARE, method='inverted_cdf')
  return int(length) + max_targets
