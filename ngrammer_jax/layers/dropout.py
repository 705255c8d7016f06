"""Dropout with explicit keys, so that scanned and unrolled layers draw alike."""

from flax import struct
import jax
import jax.extend
import jax.numpy as jnp


@struct.dataclass
class Dropout:
  """Dropout of an array at a rate, with a key. None: nothing is dropped."""

  rate: float = struct.field(pytree_node=False, default=0.0)
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
    return self if self.key is None else self.replace(key=jax.random.fold_in(self.key, number))


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zeros in a share `rate` of the places, the others scaled to keep the mean. None: x itself."""
  if key is None or rate == 0:
    return x
  keep = 1 - rate
  return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)


def check_key(key: jax.Array) -> None:
  """Raises ValueError if `block_mask` cannot draw with a key."""
  if (name := jax.random.key_impl(key)) != 'threefry2x32':
    raise ValueError(
      f'attention in blocks drops with threefry2x32 keys, not with a key of {name}: pass '
      "jax.random.key(seed, impl='threefry2x32'), or set the kernel to 'xla'"
    )


def block_mask(
  key: jax.Array, rate: float, lines_BxQ: jax.Array, columns_K: jax.Array, columns: int
) -> jax.Array:
  """What `drop` multiplies a block of a large array with, [B, Q, K]; the rest is not drawn.

  Args:
    key: a threefry key, see `check_key`.
    rate: share of zeros.
    lines_BxQ: numbers of the lines, all axes of the array but the last counted as one.
    columns_K: numbers of the columns.
    columns: how many there are.
  """
  high, low = _wide_product(lines_BxQ.astype(jnp.uint32)[..., None], jnp.uint32(columns))
  index = low + columns_K.astype(jnp.uint32)
  high = high + (index < low)
  counts = jnp.concatenate([jnp.broadcast_to(high, index.shape).ravel(), index.ravel()])
  high, low = jax.extend.random.threefry_2x32(jax.random.key_data(key), counts).reshape(
    2, *index.shape
  )
  keep = 1 - rate
  dtype = jnp.asarray(keep).dtype
  if dtype == jnp.float64:
    bits, shift, one = (high.astype(jnp.uint64) << 32) | low, 12, jnp.uint64(0x3FF0000000000000)
  else:
    bits, shift, one = high ^ low, 9, jnp.uint32(0x3F800000)
  uniform = jax.lax.bitcast_convert_type((bits >> shift) | one, dtype) - 1
  return (uniform < keep) / keep


def _wide_product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The 64 bits of a product of uint32, as its high and low half."""
  half = jnp.uint32(16)
  (a1, a0), (b1, b0) = ((x >> half, x & jnp.uint32(0xFFFF)) for x in (a, b))
  middle = a1 * b0 + ((a0 * b0) >> half)
  more = a0 * b1 + (middle & jnp.uint32(0xFFFF))
  return a1 * b1 + (middle >> half) + (more >> half), a * b
