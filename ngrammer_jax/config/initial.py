"""Initial weights of a published code."""

import dataclasses
from typing import Any

from ngrammer_jax.config.fields import field

RECIPES = ('transformer_xl', 'adaptive_span')
_NORMAL = {'recipe': ('transformer_xl',)}


def start_field(**rules: Any) -> Any:
  """Declares the field `start` of a memory, see `runs.added_memories`."""
  return field(
    None,
    'initial values; neutral: no effect at step 0, for added memories; None: published',
    choices=('published', 'neutral'),
    **rules,
  )


@dataclasses.dataclass(frozen=True)
class InitialConfig:
  """Initial weights of a published code (see `models.initialization`)."""

  recipe: str = field(
    'transformer_xl',
    'official code for the initial weights',
    choices=RECIPES,
    needs={'transformer_xl': {'norm_offset': (False,)}},  # it draws the weights of norms around 1
  )
  # 0.005 in the large word-level configs of the TensorFlow code.
  deviation: float = field(0.02, 'standard deviation', above=0, only_for=_NORMAL)
  projection_deviation: float = field(
    0.01, 'standard deviation of the projections of an adaptive softmax', above=0, only_for=_NORMAL
  )
