"""Lookup in a table whose rows are spread over devices, with a gradient that travels light.

A step touches few rows of a large table. Summed over the devices of the batch, the gradient is as
large as the table; where the rows that were looked up are less, they and their gradients are
exchanged instead, and every device adds those of all, in one order: on GPUs that takes the
deterministic ops, which the trainer asks for. Under a mesh there is no forward-mode derivative.

V rows of the table, E width, B batch.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import placement

AXES = ('ngram_vocab', 'ngram_embed')  # logical, of a table
# To add a row to a table takes a device as long as to send so many bytes: a guess for TPUs, tiles
# that are read and written against links of 200 GB/s, all devices in one slice. Not measured.
ADDING = 8192


class Layout(NamedTuple):
  """How many rows a table has, and the mesh axes that they and the batch are spread over.

  The exchange of gradients over the axes of the batch: of `rows`, of the `table`, or what takes
  less time, `auto`.
  """

  V: int
  exchange: str
  mesh: jax.sharding.AbstractMesh
  table: tuple[str, ...]
  batch: tuple[str, ...]

  @property
  def shared(self) -> tuple[str, ...]:
    """Axes of both: a device that has part of the rows has to see the tokens of all."""
    return tuple(axis for axis in self.batch if axis in self.table)

  def size(self, axes: tuple[str, ...]) -> int:
    """Devices along some axes."""
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def mapped(self, part: Callable, inputs: tuple[Any, ...], output: Any) -> Callable:
    """A function of what each device has."""
    spec = {'table': jax.P(self.table), 'batch': jax.P(self.batch)}
    inputs = tuple(spec[name] for name in inputs)
    return jax.shard_map(
      part, mesh=self.mesh, in_specs=inputs, out_specs=spec[output], check_vma=False
    )


def lookup(table_VxE: jax.Array, rows_Bx: jax.Array, exchange: str = 'auto') -> jax.Array:
  """The rows of a table, [B, ..., E].

  Args:
    table_VxE: with the logical AXES, where there is a mesh.
    rows_Bx: int32 [B, ...], from 0 to V - 1. Its first axis is the `batch`.
    exchange: `auto`, `rows` or `table`, see `Layout`.
  """
  layout = _layout(len(table_VxE), len(rows_Bx), exchange)
  if layout is None:
    return table_VxE[rows_Bx]
  return _lookup(layout, table_VxE, rows_Bx)


def _layout(V: int, B: int, exchange: str) -> Layout | None:
  """Where the rows lie by the rules in force; None on one device, or where they do not divide."""
  axes = placement.axes(AXES[0], V), placement.axes('batch', B)
  if None in axes or not any(axes):
    return None
  return Layout(V, exchange, jax.sharding.get_abstract_mesh(), *axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(layout: Layout, table_VxE: jax.Array, rows_Bx: jax.Array) -> jax.Array:

  def part(table_VxE, rows_Bx):
    rows_Bx = _gathered(rows_Bx, layout.shared)
    # Each device has the rows of its part, and zeros for the others: sums are exact.
    own = _own(layout, rows_Bx, len(table_VxE))
    found_BxE = table_VxE.at[own].get(mode='fill', fill_value=0)
    alone = tuple(axis for axis in layout.table if axis not in layout.batch)
    found_BxE = jax.lax.psum(found_BxE, alone) if alone else found_BxE
    if not layout.shared:
      return found_BxE
    return jax.lax.psum_scatter(found_BxE, layout.shared, tiled=True)

  return layout.mapped(part, ('table', 'batch'), 'batch')(table_VxE, rows_Bx)


def _forward(layout, table_VxE, rows_Bx):
  return _lookup(layout, table_VxE, rows_Bx), rows_Bx


def _backward(layout, rows_Bx, gradient_BxE):
  seen = _exchanged(layout, gradient_BxE)
  rest = tuple(axis for axis in layout.batch if axis not in seen)

  def part(gradient_BxE, rows_Bx):
    gradient_BxE, rows_Bx = (_gathered(array, seen) for array in (gradient_BxE, rows_Bx))
    size = layout.V // layout.size(layout.table)
    zeros_VxE = jnp.zeros((size, gradient_BxE.shape[-1]), gradient_BxE.dtype)
    own = _own(layout, rows_Bx, size)
    gradient_VxE = zeros_VxE.at[own].add(gradient_BxE, mode='drop')
    return jax.lax.psum(gradient_VxE, rest) if rest else gradient_VxE

  return layout.mapped(part, ('batch', 'batch'), 'table')(gradient_BxE, rows_Bx), None


_lookup.defvjp(_forward, _backward)


def _exchanged(layout: Layout, gradient_BxE: jax.Array) -> tuple[str, ...]:
  """The axes over which looked-up rows are exchanged; over the others a whole gradient is summed.

  Of n devices in rings each sends (n - 1) times its rows, with their numbers, and adds as many of
  others; or it sends 2 (n - 1) / n times the gradient of its part of the table.
  """
  E, width = gradient_BxE.shape[-1], gradient_BxE.dtype.itemsize
  count = layout.size(layout.batch) // layout.size(layout.shared)
  looked_up = gradient_BxE.size // E / count
  rows = looked_up * (width * E + 4 + ADDING)
  table = 2 / count * width * E * layout.V / layout.size(layout.table)
  by_rows = rows < table if layout.exchange == 'auto' else layout.exchange == 'rows'
  return layout.batch if by_rows else layout.shared


def _gathered(array_Bx: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """The rows of a batch of all devices along some axes."""
  return jax.lax.all_gather(array_Bx, axes, tiled=True) if axes else array_Bx


def _own(layout: Layout, rows_Bx: jax.Array, size: int) -> jax.Array:
  """Numbers of rows in the part of a device; of those that others have, one that none has."""
  if not layout.table:
    return rows_Bx
  own_Bx = rows_Bx - size * jax.lax.axis_index(layout.table)
  return jnp.where((own_Bx >= 0) & (own_Bx < size), own_Bx, size)
