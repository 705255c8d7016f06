"""Token shift: a short convolution of the inputs of attention and feed-forward (Canon)."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.place import Place

# Both after the norm.
POINTS = {'before_attention': 'attention_input', 'before_feed_forward': 'before_feed_forward'}


@dataclasses.dataclass(frozen=True)
class TokenShiftConfig:
  """Mixes each token with its predecessors, in every block (see `layers.token_shift`)."""

  tokens: int = field(
    4, 'number of mixed tokens, including the token itself', at_least=1, at_most=256
  )
  points: tuple[str, ...] = field(
    tuple(POINTS), 'places in a block', choices=tuple(POINTS), may_be_empty=False
  )

  def places(self, layers: int) -> tuple[Place, ...]:
    """Returns the places of the memory in a model with this number of blocks."""
    return tuple(Place(POINTS[point], block) for block in range(layers) for point in self.points)

  def check(self, model: Any) -> None:
    """Raises BadInput for a place twice, or the feed-forward of a model without one."""
    if len(set(self.points)) < len(self.points):
      raise errors.BadInput(
        f'model.token_shift.points={self.points} has a place twice: use it once'
      )
    if 'before_feed_forward' in self.points and not model.feed_forward_width:
      raise errors.BadInput(
        "model.token_shift.points has 'before_feed_forward', but model.feed_forward_width=0: use "
        "model.token_shift.points=('before_attention',)"
      )
