"""Position encodings."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import ANY, field
from ngrammer_jax.config.relations import less_than

# Positions in the segment, counted from its end, so they cannot be combined with a memory: the
# baselines of the Transformer-XL paper. Each layer has its own `learned` positions.
SEGMENT_POSITIONS = ('segment_sinusoid', 'learned')
# Encodings of the distance to earlier tokens, without values for later tokens.
BACKWARD_POSITIONS = ('relative', 'shaw', 'table')
# absolute: learned vectors of the positions in the document are added to the embeddings (GPT-2).
# Beyond `max_length` they repeat. A segment and its memory fit in it, so that no two keys of a
# token share a vector.
ENCODINGS = ('rope', 'sinusoid', 'absolute', *BACKWARD_POSITIONS, *SEGMENT_POSITIONS)
POSITIONS = (*ENCODINGS, 'none')
SCALINGS = ('linear', 'llama3', 'yarn', 'longrope')

_ROPE = {'position': ('rope',)}
_RELATIVE = {'position': ('relative',)}
_CLAMPED = {'position': ('relative', 'shaw')}
_LEARNED = {'position': ('shaw', 'table', 'learned', 'absolute')}
_BY_LENGTH = {'kind': ('llama3', 'yarn', 'longrope')}
_LLAMA3 = {'kind': ('llama3',)}
_YARN = {'kind': ('yarn',)}
_LONGROPE = {'kind': ('longrope',)}


@dataclasses.dataclass(frozen=True)
class RotaryScalingConfig:
  """Rotary frequencies for longer texts (see `layers.attention.rotary_scaling`)."""

  kind: str = field('linear', 'formula of the scaled frequencies', choices=SCALINGS)
  factor: float = field(1.0, 'ratio of the new length to the original one', at_least=1)
  original_length: int = field(8192, 'text length before scaling', at_least=2, only_for=_BY_LENGTH)
  low_frequency_factor: float = field(
    1.0,
    'frequencies with fewer turns in the original length are scaled',
    only_for=_LLAMA3,
    above=0,
    relations=(less_than('high_frequency_factor', where=_LLAMA3),),
  )
  high_frequency_factor: float = field(
    4.0, 'frequencies with more turns are unchanged', only_for=_LLAMA3, above=0
  )
  beta_fast: float = field(
    32.0, 'frequencies with more turns are unchanged', only_for=_YARN, above=0
  )
  beta_slow: float = field(1.0, 'frequencies with fewer turns are scaled', only_for=_YARN, above=0)
  truncate: bool = field(True, 'round the ends of the ramp', only_for=_YARN)
  attention_factor: float | None = field(
    None,
    'factor of sine and cosine; None: by formula',
    above=0,
    only_for={'kind': ('yarn', 'longrope')},
  )
  short_factors: tuple[float, ...] = field(
    (), 'divisors of the frequencies for texts up to `original_length`', above=0, only_for=_LONGROPE
  )
  long_factors: tuple[float, ...] = field(
    (), 'divisors of the frequencies for longer texts', above=0, only_for=_LONGROPE
  )
  is_long: bool = field(False, 'whether texts are longer', only_for=_LONGROPE, free_on_init=True)

  def check_pairs(self, pairs: int) -> None:
    """Raises BadInput if the factors do not match the number of rotated feature pairs."""
    name = 'long_factors' if self.is_long else 'short_factors'
    count = len(getattr(self, name))
    if self.kind == 'longrope' and count != pairs:
      raise errors.BadInput(
        f'model.positional.scaling.{name} has {count} factors, but heads have {pairs} rotated '
        f'pairs of features: give one factor for each pair'
      )


@dataclasses.dataclass(frozen=True)
class PositionalConfig:
  """Options of `model.position`."""

  min_timescale: float = field(1.0, 'shortest timescale', above=0, only_for=_ROPE)
  max_timescale: float = field(10_000.0, 'longest timescale, `theta`', above=0, only_for=_ROPE)
  window_max_timescale: float | None = field(
    None,
    'longest timescale in layers with a window; None: the same',
    above=0,
    only_for=_ROPE | {'attention.window': (ANY,)},
  )
  rotary_fraction: float = field(1.0, 'rotated share of a head', above=0, at_most=1, only_for=_ROPE)
  interleaved: bool = field(False, 'rotate features 2 j and 2 j + 1 as a pair', only_for=_ROPE)
  scaling: RotaryScalingConfig | None = field(None, 'frequencies for longer texts', only_for=_ROPE)
  shared_biases: bool = field(True, 'all layers share the biases u and v', only_for=_RELATIVE)
  clamp_length: int | None = field(
    None, 'maximum distance: relative clamps beyond it, shaw at it', at_least=1, only_for=_CLAMPED
  )
  max_length: int = field(
    512, 'distances (shaw, table) or positions (learned, absolute)', at_least=1, only_for=_LEARNED
  )

  def rotated_features(self, head_width: int) -> int:
    """Number of rotated features of a head."""
    return int(head_width * self.rotary_fraction)

  def check(self, model: Any) -> None:
    """Raises BadInput for options that are invalid for the model."""
    if model.position != 'rope':
      return
    features = self.rotated_features(model.head_features)
    if features % 2 or not features:
      raise errors.BadInput(
        f'model.positional.rotary_fraction={self.rotary_fraction} rotates {features} of the '
        f'{model.head_features} features of a head, which must be even and above 0'
      )
    if self.scaling is not None:
      self.scaling.check_pairs(features // 2)
