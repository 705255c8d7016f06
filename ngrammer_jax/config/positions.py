"""Position encodings."""

import dataclasses

from ngrammer_jax.config.fields import field

# Positions in the segment, counted from its end, so they cannot be combined with a memory: the
# baselines of the Transformer-XL paper. Each layer has its own `learned` positions.
SEGMENT_POSITIONS = ('segment_sinusoid', 'learned')
# Encodings of the distance to earlier tokens, without values for later tokens.
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
    'maximum distance: relative clamps beyond it, shaw from it on',
    at_least=1,
    only_for=_CLAMPED,
  )
  max_length: int = field(
    512,
    'number of learned distances (shaw, table) or positions (learned)',
    at_least=1,
    only_for=_LEARNED,
  )
