"""Rotary and sinusoidal position encodings.

B batch, T segment length, N heads, H head width, D model width.
"""

import math

import jax
import jax.numpy as jnp


def rotation(
  position_BxT: jax.Array,
  H: int,
  min_timescale: float = 1.0,
  max_timescale: float = 10_000.0,
  dtype: jnp.dtype = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
  """Returns sine and cosine [B, T, 1, H/2] of the angles of `rotate`.

  The angle of feature j is position / timescale_j, with timescale_j = min (max / min)^(2 j / H).
  Without a batch axis, positions are [T].
  """
  exponent_h = jnp.arange(H // 2, dtype=dtype) / (H // 2)
  timescale_h = min_timescale * (max_timescale / min_timescale) ** exponent_h
  angle_BxTx1xh = position_BxT[..., None, None].astype(dtype) / timescale_h
  return jnp.sin(angle_BxTx1xh), jnp.cos(angle_BxTx1xh)


def rotate(x_BxTxNxH: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotary position encoding (Su et al. 2021); features j and j + H/2 form a pair."""
  sin, cos = rotation
  first, second = jnp.split(x_BxTxNxH.astype(sin.dtype), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
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
