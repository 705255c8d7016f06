"""Sums of vectors with equal row numbers, as in the gradients of look-ups.

XLA adds vectors to rows by a scatter. On a GPU a scatter adds in any order. With deterministic
operations, as in training, XLA turns each scatter with possibly repeated indices into a sequential
loop, even for sorted indices. Only integer sums and scatters with `unique_indices` are exempt
(`ScatterExpander`, `IsScatterDeterministic` in XLA). XLA's
`--xla_gpu_enable_scatter_determinism_expander` is off by default: it sorts single values instead of
vectors, with an undefined order of equal indices.

On GPUs this module sorts the vectors by row, and an associative scan adds the vectors of each row.
A scatter with unique indices then adds the last sum of each row. There is no loop, and the order of
the sums is fixed.

L vectors, V rows, E width.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import mesh_axes


def add(array_Vx: jax.Array, rows_L: jax.Array, values_Lx: jax.Array) -> jax.Array:
  """Returns an array plus values in its rows; values of rows from V on are dropped.

  Args:
    array_Vx: not sharded, [V, ...].
    rows_L: int32 row numbers from 0 on, [L].
    values_Lx: [L, ...].
  """
  return on_gpu(array_Vx, rows_L, values_Lx, gpu=_add_sorted, default=_scatter)


def on_gpu(*arrays: jax.Array, gpu: Callable, default: Callable) -> Any:
  """Returns the result of one of two functions, by the platform of the lowered program."""
  return jax.lax.platform_dependent(*arrays, cuda=gpu, rocm=gpu, default=default)


def _scatter(array_Vx: jax.Array, rows_L: jax.Array, values_Lx: jax.Array) -> jax.Array:
  return array_Vx.at[rows_L].add(values_Lx, mode='drop')


def _add_sorted(array_Vx: jax.Array, rows_L: jax.Array, values_Lx: jax.Array) -> jax.Array:
  V, L = len(array_Vx), len(rows_L)
  rows_L, sums_Lx, is_last_L = sorted_sums(rows_L, values_Lx)
  # The others get different numbers too, all of them from V on.
  unique_L = jnp.where(is_last_L & (rows_L < V), rows_L, V + jnp.arange(L, dtype=rows_L.dtype))
  sums_Lx = sums_Lx.astype(array_Vx.dtype)
  return array_Vx.at[unique_L].add(sums_Lx, mode='drop', unique_indices=True)


def sorted_sums(rows_L: jax.Array, values_Lx: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sorts rows and adds the values of each in the order of the input.

  Returns:
    The sorted row numbers [L]; sums of the values of a row up to here [L, ...], in at least
    float32; and whether the sum is complete, bool [L].
  """
  order_L = jnp.argsort(rows_L, stable=True)
  rows_L = rows_L[order_L]
  wide = jnp.promote_types(values_Lx.dtype, jnp.float32)
  values_Lx = values_Lx[order_L].astype(wide)
  is_first_L = jnp.diff(rows_L, prepend=-1) != 0

  def join(before, after):
    sums_Lx, starts_L = before
    later_Lx, later_starts_L = after
    starts_Lx = later_starts_L.reshape(-1, *(1,) * (values_Lx.ndim - 1))
    sums_Lx = jnp.where(starts_Lx, later_Lx, sums_Lx + later_Lx)
    return sums_Lx, starts_L | later_starts_L

  sums_Lx, _ = jax.lax.associative_scan(join, (values_Lx, is_first_L))
  is_last_L = jnp.concatenate([is_first_L[1:], jnp.ones(1, bool)])
  return rows_L, sums_Lx, is_last_L


def totals(
  shape: tuple[int, ...], rows_Bx: jax.Array, values_Bx: jax.Array, axis: str | None = None
) -> jax.Array:
  """Returns the sums of the values of each row, [V, ...], in their dtype.

  Args:
    shape: [V, ...] of the result.
    rows_Bx: int32 row numbers from 0 to V - 1, [B, ...], sharded by `batch`.
    values_Bx: the shape of the rows, followed by the shape of a row of the result.
    axis: logical name of the first axis of the result, for sharding. None: not sharded.
  """

  def scatter(rows_Bx, values_Bx):
    return jnp.zeros(shape, values_Bx.dtype).at[rows_Bx].add(values_Bx)

  batch = mesh_axes.axes('batch', len(rows_Bx)) or ()
  sharded = None if axis is None else mesh_axes.axes(axis, shape[0])

  def add_shard(rows_Bx, values_Bx):
    V = shape[0]
    rows_L = rows_Bx.ravel()
    if sharded:
      V //= mesh_axes.shards(axis)
      rows_L = rows_L - V * jax.lax.axis_index(sharded)
      rows_L = jnp.where((rows_L >= 0) & (rows_L < V), rows_L, V)
    values_Lx = values_Bx.reshape(-1, *shape[1:])
    total_Vx = _add_sorted(jnp.zeros((V, *shape[1:]), values_Bx.dtype), rows_L, values_Lx)
    return jax.lax.psum(total_Vx, batch) if batch else total_Vx

  add_shards = add_shard
  if sharded or batch:
    add_shards = jax.shard_map(
      add_shard,
      mesh=jax.sharding.get_abstract_mesh(),
      in_specs=(jax.P(batch), jax.P(batch)),
      out_specs=jax.P(sharded),
      check_vma=False,
    )
  return on_gpu(rows_Bx, values_Bx, gpu=add_shards, default=scatter)


def take(array_Vx: jax.Array, rows_Bx: jax.Array) -> jax.Array:
  """Returns rows of an array, [B, ..., ...], with `totals` as gradient.

  Args:
    array_Vx: [V, ...], sharded by `vocab`, or not sharded.
    rows_Bx: int32 row numbers from 0 to V - 1, [B, ...], sharded by `batch`.
  """
  return _take(array_Vx.shape, array_Vx, rows_Bx)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(shape: tuple[int, ...], array_Vx: jax.Array, rows_Bx: jax.Array) -> jax.Array:
  return array_Vx[rows_Bx]


def _forward(
  shape: tuple[int, ...], array_Vx: jax.Array, rows_Bx: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return array_Vx[rows_Bx], rows_Bx


def _backward(
  shape: tuple[int, ...], rows_Bx: jax.Array, dy_Bx: jax.Array
) -> tuple[jax.Array, None]:
  return totals(shape, rows_Bx, dy_Bx, axis='vocab'), None


_take.defvjp(_forward, _backward)
