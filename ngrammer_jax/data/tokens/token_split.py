"""The tokens of a split."""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
  """A segment of one row of a batch, T tokens.

  Attributes:
    inputs: input ids.
    targets: the token after each input.
    starts: True where an input is the first of a document.
    counts: whether each target has a loss. None: all have.
    valid: False for padding. None: no padding.
  """

  inputs: np.ndarray
  targets: np.ndarray
  starts: np.ndarray
  counts: np.ndarray | None = None
  valid: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class TokenSplit:
  """The tokens of one split.

  Attributes:
    tokens: memory-mapped ids. Documents are separated by the document start, unless this is the
      line end and each document ends with one.
    starts: for each document, the index of its first token.
    text_bytes: length of the raw text; None if decoding the tokens does not reproduce the text.
    document_start: the id before the first token.
    num_characters: see `vocabularies.Vocabulary`.
    counts: memory-mapped; whether each token has a loss. None: all have.
  """

  tokens: np.ndarray
  starts: np.ndarray
  text_bytes: int | None
  document_start: int
  num_characters: int | None = None
  counts: np.ndarray | None = None

  def window(self, first: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs, targets and document starts of the targets [first, first + length).

    The input is the token before the target. Indices beyond the end of the split wrap around to
    its beginning, which starts a document.
    """
    indices = np.arange(first, first + length) % len(self.tokens)
    targets = self.tokens[indices].astype(np.int32)
    inputs = self.tokens[indices - 1].astype(np.int32)
    inputs[indices == 0] = self.document_start
    documents = np.minimum(np.searchsorted(self.starts, indices), len(self.starts) - 1)
    return inputs, targets, self.starts[documents] == indices

  def row(self, first: int, length: int) -> Row:
    """Returns a window with the counts of its targets."""
    row = Row(*self.window(first, length))
    if self.counts is None:
      return row
    indices = np.arange(first, first + length) % len(self.tokens)
    return row._replace(counts=self.counts[indices].astype(bool))

  def num_counted(self, max_tokens: int | None = None) -> int:
    """Returns the number of tokens with loss among the first ones (default: all)."""
    limit = min(max_tokens or len(self.tokens), len(self.tokens))
    if self.counts is None:
      return limit
    return int(np.count_nonzero(self.counts[:limit]))


def join(splits: Sequence[TokenSplit]) -> TokenSplit:
  """Returns splits one after another, separated by the document start."""
  if len(splits) == 1:
    return splits[0]
  separator = np.array([splits[0].document_start], splits[0].tokens.dtype)
  tokens = [array for split in splits for array in (split.tokens, separator)]
  offsets = itertools.accumulate((len(split.tokens) + 1 for split in splits), initial=0)
  starts = [split.starts + offset for split, offset in zip(splits, offsets, strict=False)]
  return dataclasses.replace(
    splits[0],
    tokens=np.concatenate(tokens[:-1]),
    starts=np.concatenate(starts),
    text_bytes=None,
    counts=_join_counts(splits),
  )


def _join_counts(splits: Sequence[TokenSplit]) -> np.ndarray | None:
  """Returns the counts of joined splits. Separators have no loss if any token has none."""
  if all(split.counts is None for split in splits):
    return None
  counts = []
  for split in splits:
    of_split = split.counts
    if of_split is None:
      of_split = np.ones(len(split.tokens), bool)
    counts += [of_split, [False]]
  return np.concatenate(counts[:-1]).astype(bool)
