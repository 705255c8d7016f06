"""Initial weights of a published code."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

RECIPES = ('transformer_xl', 'adaptive_span')


@dataclasses.dataclass(frozen=True)
class InitialConfig:
  """Initial weights of a published code (see `models.initialization`)."""

  recipe: str = field('transformer_xl', 'whose initial weights', choices=RECIPES)
  # 0.005 in the large configs for words of the TensorFlow code.
  deviation: float = field(0.02, 'transformer_xl: standard deviation', above=0)
  projection_deviation: float = field(
    0.01, 'transformer_xl: standard deviation of the projections of an adaptive softmax', above=0
  )

  def check(self, model: Any) -> None:
    """Raises BadInput for an option that is not for this recipe."""
    del model
    if self.recipe != 'transformer_xl' and self != InitialConfig(self.recipe):
      raise errors.BadInput(
        f'model.initial.deviation and projection_deviation are not for recipe={self.recipe!r}'
      )
