"""Batches: one segment of tokens of each row.

B batch rows, T segment length.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
  """A batch of B rows of T tokens: one segment of each row.

  Attributes:
    tokens_BxT: input ids.
    targets_BxT: the token after each input. None: of a prompt.
    starts_BxT: True where an input is the first of a document.
    valid_BxT: 1, or 0 for padding.
    counts_BxT: 1, or 0 for a target without loss. None: every valid target has a loss.
    prefix_BxT: True where attention is bidirectional. None: nowhere.
  """

  tokens_BxT: np.ndarray
  targets_BxT: np.ndarray | None
  starts_BxT: np.ndarray
  valid_BxT: np.ndarray
  counts_BxT: np.ndarray | None = None
  prefix_BxT: np.ndarray | None = None

  @property
  def marks(self) -> dict[str, np.ndarray | None]:
    """The arguments of a model beside the tokens and the memory."""
    return {name: getattr(self, name) for name in ('starts_BxT', 'valid_BxT', 'prefix_BxT')}


# Inputs, targets and document starts of one row, and valid if there is padding, [T].
Row = tuple[np.ndarray, ...]


def stack_rows(rows: Iterable[Row]) -> Batch:
  """Returns the batch of some rows: inputs, targets, starts and, if there is padding, valid."""
  inputs, targets, starts, *valid = map(np.stack, zip(*rows, strict=True))
  valid_BxT = valid[0] if valid else np.ones(inputs.shape)
  return Batch(inputs, targets, starts, valid_BxT.astype(np.float32))


def map_batches(fn: Callable[..., np.ndarray], *batches: Batch) -> Batch:
  """Applies `fn` to the corresponding arrays of the batches; a missing array stays None."""
  columns = zip(*batches, strict=True)
  return Batch(*(None if arrays[0] is None else fn(*arrays) for arrays in columns))
