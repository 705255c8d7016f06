"""Rotary and sinusoidal position encodings.

B batch, T segment length, N heads, H head width, D model width.
"""

import math

from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.config.positions import RotaryScalingConfig
from ngrammer_jax.layers.attention import rotary_scaling


@struct.dataclass
class Rotation:
  """The angles of `rotate`.

  Attributes:
    sin, cos: [B, T, 1, r/2] for the first r features of a head; without a batch axis, [T, 1, r/2].
    interleaved: whether features 2 j and 2 j + 1 form a pair, not j and j + r/2.
  """

  sin: jax.Array
  cos: jax.Array
  interleaved: bool = struct.field(pytree_node=False, default=False)

  def between(self, start: int, stop: int | None) -> 'Rotation':
    """Returns the angles of a range of the tokens."""
    return jax.tree.map(lambda part: part[..., start:stop, :, :], self)

  def without_factor(self) -> 'Rotation':
    """Returns the rotation alone, without the factor that some scalings of frequencies have."""
    return jax.tree.map(lambda part: part / jnp.hypot(self.sin, self.cos), self)


def rotation(
  position_BxT: jax.Array,
  features: int,
  min_timescale: float = 1.0,
  max_timescale: float = 10_000.0,
  dtype: jnp.dtype = jnp.float32,
  scaling: RotaryScalingConfig | None = None,
  interleaved: bool = False,
) -> Rotation:
  """Returns the angles of the first r `features` of a head.

  The angle of pair j is position / timescale_j, with timescale_j = min (max / min)^(2 j / r), or of
  a scaled frequency (see `rotary_scaling`). Without a batch axis, positions are [T].
  """
  if scaling is None:
    exponent_h = jnp.arange(features // 2, dtype=dtype) / (features // 2)
    timescale_h, factor = min_timescale * (max_timescale / min_timescale) ** exponent_h, 1.0
  else:
    timescales = rotary_scaling.timescales(features, min_timescale, max_timescale)
    frequency_h, factor = rotary_scaling.scale(1 / timescales, scaling, max_timescale)
    timescale_h = jnp.asarray(1 / frequency_h, dtype)
  angle_BxTx1xh = position_BxT[..., None, None].astype(dtype) / timescale_h
  sin, cos = jnp.sin(angle_BxTx1xh), jnp.cos(angle_BxTx1xh)
  if factor != 1:
    sin, cos = factor * sin, factor * cos
  return Rotation(sin, cos, interleaved)


@jax.named_scope('rotary')
def rotate(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotary position encoding (Su et al. 2021) of the first r features of queries or keys."""
  sin, cos, r = rotation.sin, rotation.cos, 2 * rotation.sin.shape[-1]
  wide = x_BxTxNxH.astype(sin.dtype)
  if rotation.interleaved:
    first, second = wide[..., :r:2], wide[..., 1:r:2]
  else:
    first, second = jnp.split(wide[..., :r], 2, axis=-1)
  pairs = first * cos - second * sin, second * cos + first * sin
  if rotation.interleaved:
    rotated = jnp.stack(pairs, axis=-1).reshape(*x_BxTxNxH.shape[:-1], r)
  else:
    rotated = jnp.concatenate(pairs, axis=-1)
  if r < x_BxTxNxH.shape[-1]:
    rotated = jnp.concatenate([rotated, wide[..., r:]], axis=-1)
  return rotated.astype(x_BxTxNxH.dtype)


def sinusoid(position_BxT: jax.Array, D: int, dtype: jnp.dtype = jnp.float32) -> jax.Array:
  """Absolute encoding (Vaswani et al. 2017), [B, T, D]: all sines, then all cosines.

  Feature j has the frequency exp(-j ln(10000) / (D/2 - 1)).
  """
  half = D // 2
  exponent_h = jnp.arange(half, dtype=dtype) / max(half - 1, 1)
  frequency_h = jnp.exp(-math.log(10_000) * exponent_h)
  angle_BxTxh = position_BxT[..., None].astype(dtype) * frequency_h
  return jnp.concatenate([jnp.sin(angle_BxTxh), jnp.cos(angle_BxTxh)], axis=-1)


def distance_sinusoid(
  distance_S: jax.Array, D: int, dtype: jnp.dtype = jnp.float32, relative_to_zero: bool = False
) -> jax.Array:
  """The encoding of Transformer-XL, [S, D]: all sines, then all cosines.

  Feature j has the frequency 10000^(-2 j / D). With `relative_to_zero`
  the encoding of distance 0 is subtracted.
  """
  frequency_h = 10_000 ** (-jnp.arange(0, D, 2, dtype=dtype) / D)
  angle_Sxh = distance_S[:, None].astype(dtype) * frequency_h
  cosine_less_1_Sxh = -2 * jnp.square(jnp.sin(angle_Sxh / 2))  # exact for small angles
  cosine_Sxh = cosine_less_1_Sxh if relative_to_zero else jnp.cos(angle_Sxh)
  return jnp.concatenate([jnp.sin(angle_Sxh), cosine_Sxh], axis=-1)
