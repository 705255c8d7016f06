"""Dropout with explicit keys, so that scanned and unrolled layers draw alike."""

from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp


class Dropout(NamedTuple):
  """Dropout of an array at a rate, with a key. None: nothing is dropped."""

  rate: float = 0.0
  key: jax.Array | None = None

  @property
  def is_active(self) -> bool:
    """Whether anything is dropped."""
    return self.key is not None and self.rate > 0

  def __call__(self, x: jax.Array) -> jax.Array:
    """See `drop`."""
    return drop(x, self.rate, self.key)

  def fold_in(self, number: int) -> 'Dropout':
    """The same with another key."""
    return self if self.key is None else Dropout(self.rate, jax.random.fold_in(self.key, number))


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zeros in a share `rate` of the places, the others scaled to keep the mean. None: x itself."""
  if key is None or rate == 0:
    return x
  keep = 1 - rate
  return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)


def kept(
  key: jax.Array, rate: float, lines_BxQ: jax.Array, columns_K: jax.Array, columns: int
) -> jax.Array:
  """What `drop` multiplies a block of a large array with, [B, Q, K], without drawing all of it.

  Args:
    key: a threefry key.
    rate: share of zeros.
    lines_BxQ: numbers of the lines, all axes of the array but the last counted as one.
    columns_K: numbers of the columns.
    columns: how many there are.
  """
  high, low = _wide_product(lines_BxQ.astype(jnp.uint32)[..., None], jnp.uint32(columns))
  index = low + columns_K.astype(jnp.uint32)
  high = high + (index < low)
  counts = jnp.concatenate([jnp.broadcast_to(high, index.shape).ravel(), index.ravel()])
  bits = jax.extend.random.threefry_2x32(jax.random.key_data(key), counts)
  high, low = bits.reshape(2, *index.shape)
  keep = 1 - rate
  dtype = jnp.asarray(keep).dtype
  if dtype == jnp.float64:
    bits = (high.astype(jnp.uint64) << 32) | low
    one, shift, bits_of = jnp.uint64(0x3FF0000000000000), 12, bits
  else:
    one, shift, bits_of = jnp.uint32(0x3F800000), 9, high ^ low
  uniform = jax.lax.bitcast_convert_type((bits_of >> shift) | one, dtype) - 1
  return (uniform < keep) / keep


def _wide_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The 64 bits of a product of uint32, as its high and low half."""
  half = jnp.uint32(16)
  (a1, a0), (b1, b0) = ((x >> half, x & jnp.uint32(0xFFFF)) for x in (a, b))
  middle = a1 * b0 + ((a0 * b0) >> half)
  more = a0 * b1 + (middle & jnp.uint32(0xFFFF))
  return a1 * b1 + (middle >> half) + (more >> half), a * b
