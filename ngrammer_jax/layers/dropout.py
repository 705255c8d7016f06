"""Dropout with explicit keys, so that scanned and unrolled layers have the same masks."""

from flax import struct
import jax
import jax.extend
import jax.numpy as jnp

from ngrammer_jax.layers.ngram import uint64


@struct.dataclass
class Dropout:
  """Dropout at a rate, with a key. No dropout without a key."""

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
    """Returns the same dropout with another key."""
    if self.key is None:
      return self
    return self.replace(key=jax.random.fold_in(self.key, number))


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Sets a share `rate` of the elements to 0 and scales the others to keep the mean.

  Returns x itself if the key is None.
  """
  if key is None or rate == 0:
    return x
  keep = 1 - rate
  # A TPU would draw the numbers again for every use, and its compiler takes minutes for each.
  mask = jax.lax.platform_dependent(
    jax.random.bernoulli(key, keep, x.shape),
    tpu=jax.lax.optimization_barrier,
    default=lambda mask: mask,
  )
  return jnp.where(mask, x / keep, 0)


def check_key(key: jax.Array) -> None:
  """Raises ValueError if `block_mask` does not support a key."""
  name = jax.random.key_impl(key)
  if name != 'threefry2x32':
    raise ValueError(
      f'dropout of attention in blocks needs a threefry2x32 key, not {name}: pass '
      "jax.random.key(seed, impl='threefry2x32'), or set the kernel to 'xla'"
    )


def block_mask(
  key: jax.Array, rate: float, rows_BxQ: jax.Array, columns_K: jax.Array, columns: int
) -> jax.Array:
  """Returns the factors of `drop` for one block of a large array, [B, Q, K].

  Args:
    key: a threefry key, see `check_key`.
    rate: share of zeros.
    rows_BxQ: row indices; all axes of the array except the last are flattened to rows.
    columns_K: column indices.
    columns: number of columns of the array.
  """
  first_BxQx1 = uint64.multiply(_widen(rows_BxQ[..., None]), _widen(jnp.uint32(columns)))
  counts_BxQxK = uint64.add(first_BxQx1, _widen(columns_K))
  # threefry_2x32 flattens the counts; XLA did not compile that for a TPU within half an hour.
  high, low = jax.extend.random.threefry2x32_p.bind(*jax.random.key_data(key), *counts_BxQxK)
  keep = 1 - rate
  dtype = jnp.asarray(keep).dtype
  if dtype == jnp.float64:
    bits = (high.astype(jnp.uint64) << 32) | low
    shift = 12
    one = jnp.uint64(0x3FF0000000000000)
  else:
    bits = high ^ low
    shift = 9
    one = jnp.uint32(0x3F800000)
  # Random digits behind the exponent of 1: a number in [1, 2).
  uniform = jax.lax.bitcast_convert_type((bits >> shift) | one, dtype) - 1
  return (uniform < keep) / keep


def _widen(values: jax.Array) -> uint64.UInt64:
  return uint64.UInt64(jnp.uint32(0), values.astype(jnp.uint32))
