"""A checksum of every array, the same for any sharding and any number of hosts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)  # odd, from the golden ratio and from xxHash
CHUNK = 2**18  # words, of a host array at a time


def _sums(words: jax.Array, index: jax.Array, valid: jax.Array) -> jax.Array:
  """Two 32-bit sums of all valid words, each mixed with its index first, modulo 2^32.

  Integer sums come out the same in any order. Mixing (the last steps of MurmurHash3) loses
  no bit, so a change of a single word always shows; without it two signs would cancel out.
  """

  def total(multiplier):
    mixed = (index + 1) * np.uint32(multiplier)
    mixed = words ^ (mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(jnp.where(valid, mixed ^ (mixed >> 16), 0), dtype=jnp.uint32)

  return jnp.stack([total(multiplier) for multiplier in MULTIPLIERS])


@functools.partial(jax.jit, static_argnums=1)
def _of_device_array(array: jax.Array, where: jax.sharding.Sharding | None = None) -> jax.Array:
  """The sums of an array where it lies; compiled for every shape."""
  if array.dtype == jnp.bool_:
    array = array.astype(jnp.uint8)
  bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{min(array.dtype.itemsize, 4) * 8}'))
  words = bits.astype(jnp.uint32)
  index, stride = jnp.zeros(words.shape, jnp.uint32), 1
  for axis in reversed(range(words.ndim)):
    place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index, stride = index + place * np.uint32(stride), stride * words.shape[axis] % 2**32
  sums = _sums(words, index, jnp.array(True))
  return sums if where is None else jax.lax.with_sharding_constraint(sums, where)


@jax.jit
def _of_chunk(words: np.ndarray, first: np.ndarray, count: np.ndarray) -> jax.Array:
  place = jax.lax.iota(jnp.uint32, words.size)
  return _sums(words, first + place, place < count)


def _of_host_array(array: np.ndarray) -> np.ndarray:
  """The sums of an array in the memory of this host, compiled for a few sizes only."""
  array = np.ascontiguousarray(array).reshape(-1)
  words = array.view(f'uint{min(array.dtype.itemsize, 4) * 8}')
  sums = np.zeros(len(MULTIPLIERS), np.uint32)
  for first in range(0, len(words), CHUNK):
    chunk = words[first : first + CHUNK].astype(np.uint32)
    size = min(CHUNK, max(2**12, 1 << (len(chunk) - 1).bit_length()))
    padded = np.pad(chunk, (0, size - len(chunk)))
    sums += np.asarray(_of_chunk(padded, np.uint32(first % 2**32), np.uint32(len(chunk))))
  return sums


def leaves(tree: Any) -> dict[str, Any]:
  """Every leaf by its name: `params/layer_0/attention/query/kernel`."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
  return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def checksums(tree: Any) -> dict[str, str]:
  """16 hexadecimal digits for every leaf, by name."""

  def of(leaf):
    # One after the other: on simulated devices, programs that run at once wait for each other.
    if not isinstance(leaf, jax.Array) or (
      leaf.is_fully_addressable and jax.default_backend() == 'cpu'
    ):
      return _of_host_array(np.asarray(leaf))
    return np.asarray(_of_device_array(leaf, _everywhere(leaf)))

  return {name: '{:08x}{:08x}'.format(*of(leaf)) for name, leaf in leaves(tree).items()}


def _everywhere(array: jax.Array) -> jax.sharding.Sharding | None:
  """Where all that hold a part of an array can read what is computed of it."""
  where = array.sharding
  if isinstance(where, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(where.mesh, jax.sharding.PartitionSpec())
  return None
