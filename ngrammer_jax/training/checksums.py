"""A checksum of every array, the same for any sharding and any number of hosts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)  # odd, from the golden ratio and from xxHash


@jax.jit
def _sums(array: jax.Array) -> jax.Array:
  """Two 32-bit sums of all words, each mixed with its place first, modulo 2^32.

  Integer sums come out the same in any order. Mixing (the last steps of MurmurHash3) loses
  no bit, so a change of a single word always shows; without it two signs would cancel out.
  """
  if array.dtype == jnp.bool_:
    array = array.astype(jnp.uint8)
  bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{min(array.dtype.itemsize, 4) * 8}'))
  words = bits.astype(jnp.uint32)
  index, stride = jnp.zeros(words.shape, jnp.uint32), 1
  for axis in reversed(range(words.ndim)):
    place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index, stride = index + place * np.uint32(stride), stride * words.shape[axis] % 2**32

  def total(multiplier):
    mixed = (index + 1) * np.uint32(multiplier)
    mixed = words ^ (mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)

  return jnp.stack([total(multiplier) for multiplier in MULTIPLIERS])


def leaves(tree: Any) -> dict[str, Any]:
  """Every leaf by its name: `params/layer_0/attention/query/kernel`."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
  return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def checksums(tree: Any) -> dict[str, str]:
  """16 hexadecimal digits for every leaf, by name."""
  # One after the other: on simulated devices, programs that run at once wait for each other.
  return {name: '{:08x}{:08x}'.format(*np.asarray(_sums(x))) for name, x in leaves(tree).items()}
