"""A split as streams of tokens for evaluation, by one of four protocols."""

import math

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.data.tokens import token_split


class EvaluationStreams:
  """A split, cut into a fixed number of streams, read segment by segment.

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
    tokens: number of targets in all streams, including targets without loss.
    length, protocol: see above.

  Raises:
    BadInput: too few tokens for one segment.
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
      windows.append(self._split.row(begin, self.length)._replace(valid=valid))
    return token_batch.stack_rows(windows)

  def _segment_row(self, stream: int, index: int) -> token_split.Row:
    """Returns a segment of a stream."""
    offset = index * self.length
    first = stream * self._stride + self._num_skipped + offset
    num_left = self.tokens - stream * self._targets_per_stream  # none beyond the last stream
    valid = np.arange(self.length) < min(self._targets_per_stream, num_left) - offset
    return self._split.row(first, self.length)._replace(valid=valid)
