"""The tokens of a split."""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenSplit:
  """The tokens of one split.

  Attributes:
    tokens: memory-mapped ids. Documents are separated by the document start; if that is the line
      end, and each document ends with one, no further token separates them.
    starts: for each document, the index of its first token.
    text_bytes: length of the raw text; None if decoding the tokens does not reproduce the text.
    document_start: the id before the first token.
    num_characters: see `vocabularies.Vocabulary`.
  """

  tokens: np.ndarray
  starts: np.ndarray
  text_bytes: int | None
  document_start: int
  num_characters: int | None = None

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


def join(splits: Sequence[TokenSplit]) -> TokenSplit:
  """Returns splits one after another, separated by the document start."""
  if len(splits) == 1:
    return splits[0]
  separator = np.array([splits[0].document_start], splits[0].tokens.dtype)
  tokens = [array for split in splits for array in (split.tokens, separator)]
  offsets = itertools.accumulate((len(split.tokens) + 1 for split in splits), initial=0)
  starts = [split.starts + offset for split, offset in zip(splits, offsets, strict=False)]
  return dataclasses.replace(
    splits[0], tokens=np.concatenate(tokens[:-1]), starts=np.concatenate(starts), text_bytes=None
  )
