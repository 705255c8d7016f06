"""Where a memory acts in a model."""

from typing import NamedTuple

BETWEEN_BLOCKS = ('input', 'after_block')
POINTS = (
  *BETWEEN_BLOCKS,
  'before_attention',
  'after_attention',
  'feed_forward',
  'after_feed_forward',
  'block_end',
)


class Place(NamedTuple):
  """Where a memory is applied (see `models.memories`).

  Attributes:
    point: `input`: to the embeddings, before positions and dropout. `after_block`: to the output
      of a block. `before_attention`: to the input of a block, before the segment memory stores it.
      `after_attention`: to the attended values of a block, before their projection.
      `feed_forward`: to the up projection of a gated feed-forward. `after_feed_forward`: to the
      output of the feed-forward. `block_end`: to the output of a block, as `after_block`, but it
      belongs to the block: one memory may be in several.
    block: number of the block, from 0 on; 0 for `input`.
  """

  point: str
  block: int = 0
