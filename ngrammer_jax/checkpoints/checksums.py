"""A checksum of every array, the same for any sharding and any number of hosts."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import host_arrays, sharding
from ngrammer_jax.system import hosts

MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)  # odd: from the golden ratio and from xxHash
CHUNK = 2**16  # number of words of a host array summed at a time; they fit in the cache


def _word_sums(words: Any, index: Any) -> list[Any]:
  """Returns two sums of words, each mixed with its index, modulo 2^32, in NumPy or JAX.

  Integer sums are the same in any order. The mixing (the last steps of MurmurHash3) is a bijection
  of a word, so a change of a single word is always detected. Without mixing, two changes of sign
  would cancel.
  """

  def total(multiplier: int) -> Any:
    mixed = (index + np.uint32(1)) * np.uint32(multiplier)
    mixed = words ^ (mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE3D)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> 16)).sum(dtype=np.uint32)

  return [total(multiplier) for multiplier in MULTIPLIERS]


@functools.partial(jax.jit, static_argnums=1)
def _sum_on_device(array: jax.Array, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
  """Sums an array on its devices, compiled for every shape; the result has `sharding`."""
  if array.dtype == jnp.bool_:
    array = array.astype(jnp.uint8)
  bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{min(array.dtype.itemsize, 4) * 8}'))
  words = bits.astype(jnp.uint32)
  index = jnp.zeros(words.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(words.ndim)):
    position = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index = index + position * np.uint32(stride)
    stride = stride * words.shape[axis] % 2**32
  sums = jnp.stack(_word_sums(words, index))
  if sharding is None:
    return sums
  return jax.lax.with_sharding_constraint(sums, sharding)


def _sum_on_host(array: np.ndarray, start: int = 0) -> np.ndarray:
  """Sums an array in host memory, without compiling; `start` is the index of its first word."""
  array = np.ascontiguousarray(array).reshape(-1)
  words = array.view(f'uint{min(array.dtype.itemsize, 4) * 8}')
  sums = np.zeros(len(MULTIPLIERS), np.uint32)
  for first in range(0, len(words), CHUNK):
    chunk = words[first : first + CHUNK].astype(np.uint32)
    index = np.arange(first, first + len(chunk), dtype=np.uint64) + np.uint64(start)
    sums += np.array(_word_sums(chunk, index.astype(np.uint32)), np.uint32)
  return sums


def named_leaves(tree: Any) -> dict[str, Any]:
  """Returns every leaf by its name, such as `params/layer_0/attention/query/kernel`."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {sharding.leaf_name(path): leaf for path, leaf in leaves}


def checksums(tree: Any) -> dict[str, str]:
  """Returns 16 hexadecimal digits for every leaf, by name."""
  return {name: _checksum(leaf) for name, leaf in named_leaves(tree).items()}


def _checksum(leaf: jax.Array | np.ndarray | host_arrays.ProcessRows) -> str:
  """Returns the checksum of an array, wherever it is."""
  # One at a time: on simulated devices, programs that run concurrently can deadlock.
  if isinstance(leaf, host_arrays.ProcessRows):
    sums = _sum_of_processes(leaf)
  elif _is_in_process(leaf):
    sums = _sum_on_host(np.asarray(leaf))
  else:
    result_sharding = None
    if hosts.is_multiprocess():  # replicated, so that every process can read it
      result_sharding = sharding.replicated(leaf.sharding.mesh)
    sums = _sum_on_device(leaf, result_sharding)
  return '{:08x}{:08x}'.format(*np.asarray(sums))


def _sum_of_processes(leaf: host_arrays.ProcessRows) -> np.ndarray:
  """Sums an array whose rows several processes have; all of them call it."""
  first, array = host_arrays.rows_here(leaf)
  words_of_row = math.prod(leaf.shape[1:]) * -(-leaf.dtype.itemsize // 4)
  own = _sum_on_host(array, first * words_of_row)
  return np.array(hosts.all_gather(own.tolist()), np.uint32).sum(axis=0, dtype=np.uint32)


def _is_in_process(leaf: jax.Array | np.ndarray) -> bool:
  """Whether this process has the whole array in the memory of its processor."""
  if not isinstance(leaf, jax.Array):
    return True
  return leaf.is_fully_addressable and jax.default_backend() == 'cpu'
