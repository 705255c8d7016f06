"""Batches: one segment of tokens of each row.

B batch rows, T segment length.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ngrammer_jax.data.tokens.token_split import Row


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
    """The arguments of a model besides tokens and memory."""
    return {name: getattr(self, name) for name in ('starts_BxT', 'valid_BxT', 'prefix_BxT')}

  @property
  def counted(self) -> np.ndarray:
    """More than 0 where a target has a loss."""
    return self.valid_BxT if self.counts_BxT is None else self.counts_BxT


def stack_rows(rows: Iterable[Row]) -> Batch:
  """Returns the batch of some rows. If one of them has counts, missing counts are 1."""
  rows = list(rows)
  inputs_BxT = np.stack([row.inputs for row in rows])
  valid_BxT = _stack_masks([row.valid for row in rows], inputs_BxT.shape[1])
  counts_BxT = None
  if any(row.counts is not None for row in rows):
    counts_BxT = valid_BxT * _stack_masks([row.counts for row in rows], inputs_BxT.shape[1])
  return Batch(
    inputs_BxT,
    np.stack([row.targets for row in rows]),
    np.stack([row.starts for row in rows]),
    valid_BxT,
    counts_BxT,
  )


def _stack_masks(masks: Sequence[np.ndarray | None], length: int) -> np.ndarray:
  """Returns the masks of rows, float32 [B, T]; 1 for missing masks."""
  ones = np.ones(length, np.float32)
  return np.stack([ones if mask is None else mask.astype(np.float32) for mask in masks])


def map_batches(fn: Callable[..., np.ndarray], *batches: Batch) -> Batch:
  """Applies `fn` to the corresponding arrays of the batches; a missing array stays None."""
  columns = zip(*batches, strict=True)
  return Batch(*(None if arrays[0] is None else fn(*arrays) for arrays in columns))
