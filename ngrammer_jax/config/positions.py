"""How positions are encoded."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

# `segment_sinusoid` and `learned` (one in every layer) count from the end of the segment: the
# baselines of Transformer-XL, which know no other segment.
SEGMENT_POSITIONS = ('segment_sinusoid', 'learned')
# Those that count distances to earlier tokens, and have none for later ones.
BACKWARD_POSITIONS = ('relative', 'shaw', 'table')
POSITIONS = ('rope', 'sinusoid', 'relative', 'shaw', 'table', *SEGMENT_POSITIONS, 'none')

# The fields that each of `model.position` uses.
_FIELDS = {
  'rope': {'min_timescale', 'max_timescale'},
  'relative': {'shared_biases', 'clamp_length'},
  'shaw': {'max_length', 'clamp_length'},
  'table': {'max_length'},
  'learned': {'max_length'},
}


@dataclasses.dataclass(frozen=True)
class PositionalConfig:
  """Options of `model.position`."""

  min_timescale: float = field(1.0, 'rope: shortest timescale', above=0)
  max_timescale: float = field(10_000.0, 'rope: longest timescale', above=0)
  shared_biases: bool = field(True, 'relative: the biases u and v are shared by all layers')
  clamp_length: int | None = field(
    None, 'distances that count as one: relative, beyond it; shaw, from it on', at_least=1
  )
  max_length: int = field(
    512, 'number of learned distances (shaw, table) or positions (learned)', at_least=1
  )

  def check(self, model: Any) -> None:
    """Raises BadInput for an option that is not for this model."""
    for option in dataclasses.fields(self):
      is_default = getattr(self, option.name) == option.default
      if not is_default and option.name not in _FIELDS.get(model.position, set()):
        raise errors.BadInput(
          f'model.positional.{option.name} is not for model.position={model.position!r}'
        )
