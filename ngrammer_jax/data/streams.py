"""Contiguous streams of tokens: which tokens a step sees is a function of the step alone.

Row b of a batch reads the split from its own place, b-th of the way through, and runs on
from segment to segment: the memory of a row always belongs to the tokens just before.

B batch, T segment length.
"""

import math
from typing import NamedTuple

import numpy as np

from ngrammer_jax.data import token_cache


class Segment(NamedTuple):
  """One segment of some rows.

  tokens_BxT holds the inputs, targets_BxT the token after each; starts_BxT is true where
  an input is the first of a document; valid_BxT is 0 where there is nothing.
  """

  tokens_BxT: np.ndarray
  targets_BxT: np.ndarray
  starts_BxT: np.ndarray
  valid_BxT: np.ndarray


def train_segment(
  split: token_cache.TokenSplit, step: int, batch_size: int, length: int, rows: slice = slice(None)
) -> Segment:
  """The segment of one training step.

  Every row walks through the whole split, wrapping round at its end; batch_size rows
  together see each token once in the time that one row takes for its share.

  Args:
    split: where the tokens are.
    step: of the training, from 0.
    batch_size: rows of the global batch.
    length: T.
    rows: of the global batch that are wanted, the same for any number of hosts.
  """
  share = len(split.tokens) // batch_size
  firsts = [row * share + step * length for row in range(batch_size)[rows]]
  inputs, targets, starts = (
    np.stack(parts)
    for parts in zip(*(split.window(first, length) for first in firsts), strict=True)
  )
  return Segment(inputs, targets, starts, np.ones(inputs.shape, np.float32))


class EvaluationStreams:
  """A split as a fixed number of streams, every token a target exactly once.

  The streams and the segment length are what defines the result; how many rows are
  evaluated at a time is not.
  """

  def __init__(self, split: token_cache.TokenSplit, streams: int, length: int, max_tokens: int = 0):
    self._split = split
    self.tokens = min(max_tokens or len(split.tokens), len(split.tokens))
    self._share = math.ceil(self.tokens / streams)
    self.streams = math.ceil(self.tokens / self._share)  # fewer, where the split is tiny
    self.length = length
    self.segments = math.ceil(self._share / length)

  def segment(self, index: int, first_row: int, rows: int) -> Segment:
    """Segment number `index` of rows [first_row, first_row + rows).

    Rows past the last stream, and what lies past the end of one, are padding.
    """
    windows = [self._row(first_row + i, index) for i in range(rows)]
    return Segment(*(np.stack(parts) for parts in zip(*windows, strict=True)))

  def _row(self, row: int, index: int):
    offset = index * self.length
    inputs, targets, starts = self._split.window(row * self._share + offset, self.length)
    left = min(self._share, self.tokens - row * self._share) - offset
    valid = (np.arange(self.length) < left).astype(np.float32)
    return inputs, targets, starts, valid
