"""Initial weights of a published code."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

RECIPES = ('transformer_xl', 'adaptive_span')
STARTS = ('published', 'neutral')
_NORMAL = ('recipe', ('transformer_xl',))


def start_field() -> Any:
  """Declares the field `start` of a memory, see `config.added`."""
  return field(
    None,
    'initial values; neutral: of no effect, for a memory that init_from lacks; None: published',
    choices=STARTS,
  )


@dataclasses.dataclass(frozen=True)
class InitialConfig:
  """Initial weights of a published code (see `models.initialization`)."""

  recipe: str = field(
    'transformer_xl', 'official code whose initial weights are used', choices=RECIPES
  )
  # 0.005 in the large word-level configs of the TensorFlow code.
  deviation: float = field(0.02, 'standard deviation', above=0, only_for=_NORMAL)
  projection_deviation: float = field(
    0.01, 'standard deviation of the projections of an adaptive softmax', above=0, only_for=_NORMAL
  )

  def check(self, model: Any) -> None:
    """Raises BadInput for a recipe that does not fit the model."""
    if self.recipe == 'transformer_xl' and model.norm_offset:
      raise errors.BadInput(
        'model.initial.recipe="transformer_xl" draws the weights of norms around 1, but with '
        'model.norm_offset=True the parameters are weights minus 1: use another recipe'
      )
