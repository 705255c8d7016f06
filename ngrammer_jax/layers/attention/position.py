"""Rotary and sinusoidal position encodings.

B batch, T segment length, N heads, H head width, D model width.
"""

import math

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.config.positions import RotaryScalingConfig
from ngrammer_jax.layers.attention import rotary_scaling

# Larger angles would be rounded in float32 by more than 0.004: tokens turn by whole FARs, less the
# full turns.
FAR = 2**16


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
    timescale_h = min_timescale * (max_timescale / min_timescale) ** exponent_h
    factor = 1.0
  else:
    timescales = rotary_scaling.timescales(features, min_timescale, max_timescale)
    frequency_h, factor = rotary_scaling.scale(1 / timescales, scaling, max_timescale)
    timescale_h = jnp.asarray(1 / frequency_h, dtype)
  position_BxTx1x1 = jnp.asarray(position_BxT)[..., None, None]
  far, near = jnp.divmod(position_BxTx1x1, FAR)
  turned_h = jnp.mod(FAR / timescale_h, 2 * math.pi)
  angle_BxTx1xh = near.astype(dtype) / timescale_h + far.astype(dtype) * turned_h
  sin = jnp.sin(angle_BxTx1xh)
  cos = jnp.cos(angle_BxTx1xh)
  if factor != 1:
    sin = factor * sin
    cos = factor * cos
  return Rotation(sin, cos, interleaved)


@jax.named_scope('rotary')
def rotate(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotary position encoding (Su et al. 2021) of the first r features of queries or keys."""
  return jax.lax.platform_dependent(
    x_BxTxNxH, rotation, tpu=rotate_by_product, default=rotate_pairs
  )


@jax.custom_vjp
def rotate_by_product(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
  """Returns x cos + (x P) sin, where P swaps the features of each pair and negates the second.

  Halves of a head are halves of a TPU's vector: to take them apart, XLA copies x in float32.
  """
  return _rotate_by_product(x_BxTxNxH, rotation)


def _rotate_by_product(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
  H, h = x_BxTxNxH.shape[-1], rotation.sin.shape[-1]
  if rotation.interleaved:
    first_h = np.arange(h) * 2
    second_h = first_h + 1
  else:
    first_h = np.arange(h)
    second_h = first_h + h
  source_H = np.arange(H)
  source_H[first_h] = second_h
  source_H[second_h] = first_h
  sign_H = np.zeros(H, np.float32)
  sign_H[first_h] = -1
  sign_H[second_h] = 1
  swap_HxH = jnp.where(jnp.arange(H)[:, None] == source_H, sign_H, 0).astype(x_BxTxNxH.dtype)

  def by_feature(part: jax.Array, unrotated: int) -> jax.Array:
    """Returns the sine or cosine of each feature, and a constant where none is rotated."""
    if rotation.interleaved:
      pairs = jnp.repeat(part, 2, -1)
    else:
      pairs = jnp.concatenate([part, part], -1)
    padding = [(0, 0)] * (part.ndim - 1) + [(0, H - 2 * h)]
    return jnp.pad(pairs, padding, constant_values=unrotated)

  sin = by_feature(rotation.sin, 0)
  cos = by_feature(rotation.cos, 1)
  # Every sum has one term: it is exact if the terms are.
  swapped = jnp.matmul(x_BxTxNxH, swap_HxH, precision='highest')
  rotated = x_BxTxNxH.astype(sin.dtype) * cos + swapped.astype(sin.dtype) * sin
  return rotated.astype(x_BxTxNxH.dtype)


def _rotate_forward(x_BxTxNxH: jax.Array, rotation: Rotation) -> tuple[jax.Array, Rotation]:
  return _rotate_by_product(x_BxTxNxH, rotation), rotation


def _rotate_backward(rotation: Rotation, gradient_BxTxNxH: jax.Array) -> tuple[jax.Array, Rotation]:
  """Returns the gradient of x, rounded once."""
  back = rotation.replace(sin=-rotation.sin)
  return _rotate_by_product(gradient_BxTxNxH, back), jax.tree.map(jnp.zeros_like, rotation)


rotate_by_product.defvjp(_rotate_forward, _rotate_backward)


def rotate_pairs(x_BxTxNxH: jax.Array, rotation: Rotation) -> jax.Array:
  """Returns (a cos - b sin, b cos + a sin) for the features a and b of each pair."""
  sin, cos = rotation.sin, rotation.cos
  r = 2 * sin.shape[-1]
  wide = x_BxTxNxH.astype(sin.dtype)
  if rotation.interleaved:
    first = wide[..., :r:2]
    second = wide[..., 1:r:2]
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
