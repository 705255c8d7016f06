"""Rows of the token cache: contiguous streams, whose tokens are a function of the step alone.

Row b of a batch starts to read the split at b/B of its length and continues from segment to
segment, so the memory of a row always holds the tokens just before the segment.

B batch rows, T segment length.
"""

import math

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.rows import mixture_schedule, token_batch
from ngrammer_jax.data.tokens import token_split


class TrainStreams:
  """The training rows of a split that was tokenised in advance; see `mixture.TrainRows`.

  Every row reads the whole split and wraps around at its end. The first tokens of the rows are
  spread evenly, so one epoch of the batch contains each token once.

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

  def rows(self, step: int, rows: range) -> dict[int, token_batch.Row]:
    """Returns the segments of those of the rows that read the split at a step, from 0.

    They do not depend on the number of hosts.
    """
    is_reading_B = self._schedule.is_reading(step)
    segments_B = self._schedule.segments_before(step)
    self.epochs = int(self.epochs_before(step + 1))
    segments = {}
    for row in rows:
      if is_reading_B[row]:
        first = row * self._stride + int(segments_B[row]) * self._length
        segments[row] = self._split.window(first, self._length)
    return segments

  def epochs_before(self, step: int) -> float:
    """Returns the number of epochs that all rows of the batch read before a step."""
    segments = int(self._schedule.segments_before(step).sum())
    return segments * self._length / len(self._split.tokens)

  def states(self, step: int) -> None:
    """Returns None: the rows are a function of the step, so there is nothing to save."""

  def restore(self, step: int, saved: None) -> None:
    """Does nothing, see `states`."""


class EvaluationStreams:
  """A split, cut into a fixed number of streams that are read segment by segment.

  The result depends on the protocol, the number of streams and the segment length, but not on the
  number of rows evaluated at a time. Protocols:

  `streams`: every token is a target exactly once. The first input of a stream is the token before
    its first target.
  `transformer_xl` (as in its PyTorch code): the split is truncated to a multiple of the number of
    streams, and the first token of each stream is not a target.
  `adaptive_span` (as in its code): as `transformer_xl`, and an incomplete last segment is dropped.
  `sliding_window` (Al-Rfou et al. 2018): one stream. Every token is predicted from its own window
    of one segment length; see `window`.

  Args:
    split: the tokens.
    streams: number of streams; fewer are used for a tiny split.
    length: T.
    max_tokens: use only the first tokens of the split. 0: all.
    protocol: one of the above.

  Attributes:
    streams: number of streams.
    segments: number of segments per stream.
    tokens: number of targets in all streams.
    length, protocol: see above.

  Raises:
    BadInput: there are too few tokens for one segment.
  """

  def __init__(
    self,
    split: token_split.TokenSplit,
    streams: int,
    length: int,
    max_tokens: int = 0,
    protocol: str = 'streams',
  ):
    self._split = split
    self.length = length
    self.protocol = protocol
    tokens = min(max_tokens or len(split.tokens), len(split.tokens))
    if protocol in ('transformer_xl', 'adaptive_span'):
      self.streams = min(streams, max(tokens // 2, 1))
      self._num_skipped = 1
      self._stride = tokens // self.streams
      self._targets_per_stream = self._stride - 1
      if protocol == 'adaptive_span':
        self._targets_per_stream -= self._targets_per_stream % length
      self.tokens = self._targets_per_stream * self.streams
    else:
      self._targets_per_stream = self._stride = math.ceil(tokens / streams)
      self.streams = math.ceil(tokens / self._targets_per_stream)
      self.tokens = tokens
      self._num_skipped = 0
    if not self.tokens:
      raise errors.BadInput(
        f'evaluation.protocol={protocol!r}: {tokens:,} tokens in {streams} streams fill no '
        f'segment of {length}'
      )
    self.segments = math.ceil(self._targets_per_stream / length)

  def segment(self, index: int, first_row: int, rows: int) -> token_batch.Batch:
    """Returns segment number `index` of the streams [first_row, first_row + rows).

    Rows beyond the last stream and tokens beyond the end of a stream are padding.
    """
    return token_batch.stack_rows(self._segment_row(first_row + i, index) for i in range(rows))

  def window(self, first: int, rows: int) -> token_batch.Batch:
    """Returns one window per target in [first, first + rows); the target is its last token.

    Windows near the start of the split and rows beyond its end are padded.
    """
    windows = []
    for target in range(first, first + rows):
      begin = max(target + 1 - self.length, 0)
      valid = (np.arange(self.length) <= target - begin) & (target < self.tokens)
      windows.append((*self._split.window(begin, self.length), valid))
    return token_batch.stack_rows(windows)

  def _segment_row(self, stream: int, index: int) -> token_batch.Row:
    """Returns a segment of a stream: inputs, targets, starts and valid."""
    offset = index * self.length
    first = stream * self._stride + self._num_skipped + offset
    num_left = self.tokens - stream * self._targets_per_stream  # none beyond the last stream
    valid = np.arange(self.length) < min(self._targets_per_stream, num_left) - offset
    return (*self._split.window(first, self.length), valid)
