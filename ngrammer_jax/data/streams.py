"""Contiguous streams of tokens: which tokens a step sees is a function of the step alone.

Row b of a batch reads the split from its own place, b-th of the way through, and runs on
from segment to segment: the memory of a row always belongs to the tokens just before.

B batch, T segment length.
"""

from collections.abc import Callable
import math
from typing import NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import token_cache


class Segment(NamedTuple):
  """One segment of some rows.

  tokens_BxT holds the inputs, targets_BxT the token after each; starts_BxT is true where
  an input is the first of a document; valid_BxT is 0 where there is nothing; counts_BxT is 0 where
  a target is not learned (None: nowhere else); prefix_BxT is true where attention is bidirectional.
  """

  tokens_BxT: np.ndarray
  targets_BxT: np.ndarray
  starts_BxT: np.ndarray
  valid_BxT: np.ndarray
  counts_BxT: np.ndarray | None = None
  prefix_BxT: np.ndarray | None = None


def mapped(of: Callable[..., np.ndarray], *segments: Segment) -> Segment:
  """The segment of what is made of the arrays of some, where there are any."""
  columns = zip(*segments, strict=True)
  return Segment(*(None if parts[0] is None else of(*parts) for parts in columns))


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


PROTOCOLS = ('streams', 'transformer_xl', 'adaptive_span', 'sliding_window')


class EvaluationStreams:
  """A split as a fixed number of streams, each read segment by segment.

  The protocol, the streams and the segment length are what defines the result; how many rows are
  evaluated at a time is not. Protocols:

  `streams`: every token is a target exactly once, the first inputs are the tokens before.
  `transformer_xl`, its PyTorch code: the split is cut to a multiple of the streams, and the first
    token of each is no target.
  `adaptive_span`, its code: the same, and a last segment that is not full is left out.
  `sliding_window` (Al-Rfou et al. 2018): one stream, of which every token is predicted from a
    window of its own, of a segment's length; see `window`.
  """

  def __init__(
    self,
    split: token_cache.TokenSplit,
    streams: int,
    length: int,
    max_tokens: int = 0,
    protocol: str = 'streams',
  ):
    self._split, self.length = split, length
    tokens = min(max_tokens or len(split.tokens), len(split.tokens))
    if protocol in ('transformer_xl', 'adaptive_span'):
      self.streams, self._skip = min(streams, max(tokens // 2, 1)), 1
      self._stride = tokens // self.streams
      self._share = self._stride - 1
      if protocol == 'adaptive_span':
        self._share -= self._share % length
      self.tokens = self._share * self.streams
    else:
      self._share = self._stride = math.ceil(tokens / streams)
      self.streams = math.ceil(tokens / self._share)  # fewer, where the split is tiny
      self.tokens, self._skip = tokens, 0
    if not self.tokens:
      raise errors.BadInput(
        f'evaluation.protocol={protocol!r}: {tokens:,} tokens in {streams} streams fill no '
        f'segment of {length}'
      )
    self.segments = math.ceil(self._share / length)

  def segment(self, index: int, first_row: int, rows: int) -> Segment:
    """Segment number `index` of rows [first_row, first_row + rows).

    Rows past the last stream, and what lies past the end of one, are padding.
    """
    windows = [self._row(first_row + i, index) for i in range(rows)]
    return Segment(*(np.stack(parts) for parts in zip(*windows, strict=True)))

  def window(self, first: int, rows: int) -> Segment:
    """Windows that end with the tokens [first, first + rows), each starting afresh."""
    windows = []
    for last in range(first, first + rows):
      begin = max(last + 1 - self.length, 0)
      inputs, targets, starts = self._split.window(begin, self.length)
      there = np.arange(self.length) <= last - begin if last < self.tokens else False
      windows.append((inputs, targets, starts, np.broadcast_to(there, starts.shape)))
    inputs, targets, starts, valid = (np.stack(parts) for parts in zip(*windows, strict=True))
    return Segment(inputs, targets, starts, valid.astype(np.float32))

  def _row(self, row: int, index: int):
    offset = index * self.length
    first = row * self._stride + self._skip + offset
    inputs, targets, starts = self._split.window(first, self.length)
    share = min(self._share, self.tokens - row * self._share) if row < self.streams else 0
    valid = (np.arange(self.length) < share - offset).astype(np.float32)
    return inputs, targets, starts, valid
