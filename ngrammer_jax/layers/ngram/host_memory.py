"""Rows of arrays in the memory of the host, read and written there.

They are made there, and only the rows that are asked for travel between host and device. XLA:TPU
accepts neither bounds of its own (so every row is in bounds here) nor row numbers in the memory of
the device.

The sharding of such an array is one of `sharding.shardings`.

V rows of the array, E width, L rows that are read or written.
"""

from collections.abc import Callable
import functools

import jax
from jax.experimental import compute_on
import jax.numpy as jnp

# A function that runs on the host and returns arrays there. jax 0.11.2 renamed `compute_on2`.
_on_host = functools.partial(
  getattr(compute_on, 'compute_on2', compute_on.compute_on),
  compute_type='device_host',
  out_memory_spaces=jax.memory.Space.Host,
)


def contains(array: jax.Array) -> bool:
  """Whether an array, which may be traced, is in the memory of the host."""
  return jax.typeof(array).memory_space == jax.memory.Space.Host


def initializer(initialize: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Returns an initializer with the same arguments and values, which runs on the host."""

  def initialize_on_host(*args):
    @_on_host
    def make():
      return jax.device_put(initialize(*args), jax.memory.Space.Host)

    return make()

  return initialize_on_host


def broadcast(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns an array in host memory, broadcast there from one on the device."""

  @_on_host
  def broadcast_to_shape(array):
    return jnp.broadcast_to(array, shape)

  return broadcast_to_shape(jax.device_put(array, jax.memory.Space.Host))


def take(array_VxE: jax.Array, rows_Lx: jax.Array) -> jax.Array:
  """Returns rows of an array in host memory, on the device; rows are from 0 to V - 1."""

  @_on_host
  def get_rows(array_VxE, rows_Lx):
    return array_VxE.at[rows_Lx].get(mode='promise_in_bounds')

  rows_Lx = jax.device_put(rows_Lx, jax.memory.Space.Host)
  return jax.device_put(get_rows(array_VxE, rows_Lx), jax.memory.Space.Device)


def put(array_VxE: jax.Array, rows_L: jax.Array, values_LxE: jax.Array) -> jax.Array:
  """Returns an array in host memory with other values in the rows.

  It is written in place if the caller donates it.

  Args:
    array_VxE: the array.
    rows_L: different rows; V where an entry is unused.
    values_LxE: their values, on the device.
  """
  # Unused entries write the first used one again, or without any, row 0 as it is.
  is_used_L = rows_L < len(array_VxE)
  first = jnp.argmax(is_used_L)
  first_row = jnp.where(is_used_L[first], rows_L[first], 0)
  values_LxE = values_LxE.astype(array_VxE.dtype)
  first_value_E = jnp.where(
    is_used_L[first], values_LxE[first], take(array_VxE, first_row[None])[0]
  )
  rows_L = jnp.where(is_used_L, rows_L, first_row)
  values_LxE = jnp.where(is_used_L[:, None], values_LxE, first_value_E)
  rows_L, values_LxE = jax.device_put((rows_L, values_LxE), jax.memory.Space.Host)

  @_on_host
  def set_rows(array_VxE, rows_L, values_LxE):
    return array_VxE.at[rows_L].set(values_LxE, mode='promise_in_bounds')

  return set_rows(array_VxE, rows_L, values_LxE)
