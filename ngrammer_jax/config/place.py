"""Places of memories in a model."""

from typing import NamedTuple

BETWEEN_BLOCKS = ('input', 'after_block', 'before_head')
INSIDE_FEED_FORWARD = ('feed_forward', 'after_feed_forward')
AT_FEED_FORWARD = ('in_place_of_feed_forward', 'beside_feed_forward')
POINTS = (
  *BETWEEN_BLOCKS,
  'before_attention',
  'attention_input',
  'values',
  'after_attention',
  'before_feed_forward',
  *INSIDE_FEED_FORWARD,
  *AT_FEED_FORWARD,
  'block_end',
)


class Place(NamedTuple):
  """The place of a memory (see `models.memories`).

  Attributes:
    point: `input`: to the embeddings, before positions and dropout. `after_block`: to the output
      of a block. `before_attention`: to the input of a block, before the segment memory stores it.
      `attention_input`: to the input of attention, after its norm; a segment memory stores the
      result.
      `values`: to the values of attention, of all key heads, before attention reads them.
      `after_attention`: to the attended values of a block, before their projection.
      `before_feed_forward`: to the input of the feed-forward, after its norm.
      `feed_forward`: to the up projection of a gated feed-forward. `after_feed_forward`: to the
      output of the feed-forward. `in_place_of_feed_forward` and `beside_feed_forward`: to the input
      of the feed-forward, after the norm; the result is its output, or added to it.
      `block_end`: to the output of a block, as `after_block`, but it belongs to the block: one
      memory may be in several. `before_head`: to the output of the last block, before the final
      norm.
    block: number of the block, from 0 on; 0 for `input` and `before_head`.
  """

  point: str
  block: int = 0
