"""How positions are encoded."""

import dataclasses

from ngrammer_jax.config.fields import field

# `segment_sinusoid` and `learned` (one in every layer) count from the end of the segment: the
# baselines of Transformer-XL, which know no other segment.
SEGMENT_POSITIONS = ('segment_sinusoid', 'learned')
# Those that count distances to earlier tokens, and have none for later ones.
BACKWARD_POSITIONS = ('relative', 'shaw', 'table')
POSITIONS = ('rope', 'sinusoid', 'relative', 'shaw', 'table', *SEGMENT_POSITIONS, 'none')

_ROPE = ('position', ('rope',))
_RELATIVE = ('position', ('relative',))
_CLAMPED = ('position', ('relative', 'shaw'))
_LEARNED = ('position', ('shaw', 'table', 'learned'))


@dataclasses.dataclass(frozen=True)
class PositionalConfig:
  """Options of `model.position`."""

  min_timescale: float = field(1.0, 'shortest timescale', above=0, only_for=_ROPE)
  max_timescale: float = field(10_000.0, 'longest timescale', above=0, only_for=_ROPE)
  shared_biases: bool = field(True, 'all layers share the biases u and v', only_for=_RELATIVE)
  clamp_length: int | None = field(
    None,
    'distances that count as one: relative, beyond it; shaw, from it on',
    at_least=1,
    only_for=_CLAMPED,
  )
  max_length: int = field(
    512,
    'number of learned distances (shaw, table) or positions (learned)',
    at_least=1,
    only_for=_LEARNED,
  )
