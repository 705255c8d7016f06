"""The schedule of a mixture: the part of each batch row in each block of segments.

Each row reads every part in proportion to its weight, without randomness: the count of each part in
the first n blocks of a row is a function of n and the row.

The function is a binary tree over the parts. At each node, the first half of the parts has a share
w of the weights. Of n blocks, it gets floor(n w + u), and the second half gets the rest. The error
of a division is below one block, so the error of a count is below ceil(log2(parts)).

The offset u, 0 <= u < 1, differs between rows, so that the errors of rows cancel. At the root it is
b/B for row b of B: there, the sum over all rows is exact to one block. At other nodes, the offsets
of any range of rows are spread evenly.

B batch rows, P parts.
"""

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

BITS = 31  # of shares and offsets: a product with a number of blocks fits into int64
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)  # multiples of their square roots are spread evenly


class MixtureSchedule:
  """The parts of each row, as a function of row and step alone.

  Args:
    weights: number of tokens of each part, relative to the others.
    batch_size: B.
    block: number of consecutive segments of one part in a row.
  """

  def __init__(self, weights: Sequence[float], batch_size: int, block: int = 1):
    self._weights = weights
    self.batch_size = batch_size
    self._block = block
    self._blocks_before = functools.lru_cache(maxsize=4)(self._count_blocks)

  def parts(self, step: int) -> np.ndarray:
    """Returns the index of the part of each row at a step, [B]."""
    block = step // self._block
    return np.argmax(self._blocks_before(block + 1) - self._blocks_before(block), axis=0)

  def segments_before(self, step: int) -> np.ndarray:
    """Returns the number of segments of each part and row before a step, [P, B]."""
    block, segments_of_block = divmod(step, self._block)
    before = self._blocks_before(block)
    after = self._blocks_before(block + 1)
    return before * self._block + (after - before) * segments_of_block

  def _count_blocks(self, blocks: int) -> np.ndarray:
    """Returns the count of each part in the first blocks of each row, [P, B]."""
    return np.stack(self._divide(np.full(self.batch_size, blocks, np.int64), self._weights, 0))

  def _divide(self, blocks_B: np.ndarray, weights: Sequence[float], level: int) -> list[np.ndarray]:
    """Divides the blocks of each row among parts with these weights."""
    if len(weights) == 1:
      return [blocks_B]
    middle = len(weights) // 2
    total = sum(weights)
    share = 0
    if total:
      share = int(sum(weights[:middle]) / total * (1 << BITS))
    rows = np.arange(self.batch_size)
    if level:
      offset_B = rows * int(math.sqrt(PRIMES[level % len(PRIMES)]) * (1 << BITS)) % (1 << BITS)
    else:
      offset_B = (rows << BITS) // self.batch_size
    first_B = (blocks_B * share + offset_B) >> BITS
    first = self._divide(first_B, weights[:middle], level + 1)
    return first + self._divide(blocks_B - first_B, weights[middle:], level + 1)


class PartSchedule(NamedTuple):
  """The steps at which each row reads one part of a mixture."""

  schedule: MixtureSchedule
  part: int

  @property
  def batch_size(self) -> int:
    """B."""
    return self.schedule.batch_size

  def is_reading(self, step: int) -> np.ndarray:
    """Returns whether each row reads the part at a step, [B]."""
    return self.schedule.parts(step) == self.part

  def segments_before(self, step: int) -> np.ndarray:
    """Returns the number of segments of the part in each row before a step, [B]."""
    return self.schedule.segments_before(step)[self.part]
