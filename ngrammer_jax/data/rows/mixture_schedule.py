"""Which part of a mixture each batch row reads in each block of segments.

The blocks of a row are divided among the parts by a binary tree: at a node, n blocks are
floor(n w + u) for the first half of its parts, whose share is w, and the rest for the others. So
the number of blocks of a part follows from the number of all blocks, and differs from its share by
less than ceil(log2(parts)). The offset u of row b is b/B at the root, where the number in all rows
together is exact to one block; below, offsets are spread evenly over every range of rows.

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
  """The parts that the rows read, as a function of row and step alone.

  Args:
    weights: number of tokens of each part, relative to the others.
    batch_size: B.
    block: number of segments that a row reads of a part before it may change to another.
  """

  def __init__(self, weights: Sequence[float], batch_size: int, block: int = 1):
    self._weights = weights
    self.batch_size = batch_size
    self._block = block
    self._blocks_before = functools.lru_cache(maxsize=4)(self._count_blocks)

  def parts(self, step: int) -> np.ndarray:
    """Returns the index of the part that each row reads at a step, [B]."""
    block = step // self._block
    return np.argmax(self._blocks_before(block + 1) - self._blocks_before(block), axis=0)

  def segments_before(self, step: int) -> np.ndarray:
    """Returns the number of segments of each part that each row reads before a step, [P, B]."""
    block, segments_of_block = divmod(step, self._block)
    before = self._blocks_before(block)
    after = self._blocks_before(block + 1)
    return before * self._block + (after - before) * segments_of_block

  def _count_blocks(self, blocks: int) -> np.ndarray:
    """Returns how many of the first blocks of each row are of each part, [P, B]."""
    return np.stack(self._divide(np.full(self.batch_size, blocks, np.int64), self._weights, 0))

  def _divide(self, blocks_B: np.ndarray, weights: Sequence[float], level: int) -> list[np.ndarray]:
    """Divides the blocks of each row among parts with these weights."""
    if len(weights) == 1:
      return [blocks_B]
    middle = len(weights) // 2
    total = sum(weights)
    share = int(sum(weights[:middle]) / total * (1 << BITS)) if total else 0
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
    """Returns the number of segments that each row reads of the part before a step, [B]."""
    return self.schedule.segments_before(step)[self.part]
