"""Lookup in a sharded table, with an efficient exchange of its gradient.

A step looks up few rows of a large table. Summed over the devices of the batch, the gradient is as
large as the table; if fewer rows were looked up, devices exchange these rows and their gradients
instead. Every device then adds the rows of all devices, in the same order; on GPUs this is only
deterministic with the deterministic ops that the trainer enables. Under a mesh there is no
forward-mode derivative.

V rows of the table, E width, B batch.
"""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import placement

AXES = ('ngram_vocab', 'ngram_embed')  # logical axes of a table
# `auto` exchanges rows if the devices together look up at most this share of the rows of a device.
# Measured with E = 32 and V = 32,768 and 262,144 on 8 simulated CPU devices: a step takes 0.6 to
# 0.8 of the time of `table` at 0.25, and 1.05 to 1.4 at 0.5. Rows are fewer bytes up to a share of
# about 2, but every device adds them all.
ROWS_SHARE = 0.25


class Layout(NamedTuple):
  """Rows of a table, and the mesh axes that the table and the batch are sharded over.

  `exchange` is what is exchanged over the axes of the batch for the gradient: `rows`, `table`, or
  `auto`, see ROWS_SHARE.
  """

  V: int
  exchange: str
  mesh: jax.sharding.AbstractMesh
  table: tuple[str, ...]
  batch: tuple[str, ...]

  @property
  def shared(self) -> tuple[str, ...]:
    """Axes of both table and batch, over which a shard of the table needs all lookups."""
    return tuple(axis for axis in self.batch if axis in self.table)

  def size(self, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along the axes."""
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def shard_map(self, function: Callable, inputs: tuple[str, ...], output: str) -> Callable:
    """Maps a function over shards; inputs and output are each sharded as `table` or `batch`."""
    specs = {'table': jax.P(self.table), 'batch': jax.P(self.batch)}
    return jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=tuple(specs[name] for name in inputs),
      out_specs=specs[output],
      check_vma=False,
    )


def lookup(table_VxE: jax.Array, rows_Bx: jax.Array, exchange: str = 'auto') -> jax.Array:
  """Returns rows of a table, [B, ..., E].

  Args:
    table_VxE: sharded by the logical AXES under a mesh.
    rows_Bx: int32 [B, ...], from 0 to V - 1, sharded by `batch`.
    exchange: `auto`, `rows` or `table`, see `Layout`.
  """
  layout = _layout(len(table_VxE), len(rows_Bx), exchange)
  if layout is None:
    return table_VxE[rows_Bx]
  return _lookup(layout, table_VxE, rows_Bx)


def _layout(V: int, B: int, exchange: str) -> Layout | None:
  """Returns the layout under the current rules, None if unsharded or not divisible."""
  axes = placement.axes(AXES[0], V), placement.axes('batch', B)
  if None in axes or not any(axes):
    return None
  return Layout(V, exchange, jax.sharding.get_abstract_mesh(), *axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(layout: Layout, table_VxE: jax.Array, rows_Bx: jax.Array) -> jax.Array:

  def lookup_shard(table_VxE, rows_Bx):
    rows_Bx = _all_gather(rows_Bx, layout.shared)
    # Rows of other shards are zeros, so the sum over shards is exact.
    local_rows = _local_rows(layout, rows_Bx, len(table_VxE))
    y_BxE = table_VxE.at[local_rows].get(mode='fill', fill_value=0)
    table_only = tuple(axis for axis in layout.table if axis not in layout.batch)
    y_BxE = jax.lax.psum(y_BxE, table_only) if table_only else y_BxE
    return jax.lax.psum_scatter(y_BxE, layout.shared, tiled=True) if layout.shared else y_BxE

  return layout.shard_map(lookup_shard, ('table', 'batch'), 'batch')(table_VxE, rows_Bx)


def _forward(layout, table_VxE, rows_Bx):
  return _lookup(layout, table_VxE, rows_Bx), rows_Bx


def _backward(layout, rows_Bx, gradient_BxE):
  gathered = _gathered_axes(layout, rows_Bx.size)
  rest = tuple(axis for axis in layout.batch if axis not in gathered)

  def add_shard(gradient_BxE, rows_Bx):
    gradient_BxE, rows_Bx = (_all_gather(array, gathered) for array in (gradient_BxE, rows_Bx))
    size = layout.V // layout.size(layout.table)
    zeros_VxE = jnp.zeros((size, gradient_BxE.shape[-1]), gradient_BxE.dtype)
    local_rows = _local_rows(layout, rows_Bx, size)
    gradient_VxE = zeros_VxE.at[local_rows].add(gradient_BxE, mode='drop')
    return jax.lax.psum(gradient_VxE, rest) if rest else gradient_VxE

  return layout.shard_map(add_shard, ('batch', 'batch'), 'table')(gradient_BxE, rows_Bx), None


_lookup.defvjp(_forward, _backward)


def _gathered_axes(layout: Layout, lookups: int) -> tuple[str, ...]:
  """Returns the batch axes to gather rows over; over the others the whole gradient is summed."""
  rows_per_device = layout.V // layout.size(layout.table)
  by_rows = layout.exchange == 'rows'
  if layout.exchange == 'auto':
    by_rows = lookups <= ROWS_SHARE * rows_per_device
  return layout.batch if by_rows else layout.shared


def _all_gather(array_Bx: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  return jax.lax.all_gather(array_Bx, axes, tiled=True) if axes else array_Bx


def _local_rows(layout: Layout, rows_Bx: jax.Array, size: int) -> jax.Array:
  """Returns row numbers within the shard of a device; `size`, out of range, for other rows."""
  if not layout.table:
    return rows_Bx
  local_Bx = rows_Bx - size * jax.lax.axis_index(layout.table)
  return jnp.where((local_Bx >= 0) & (local_Bx < size), local_Bx, size)
