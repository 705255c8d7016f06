"""Lookup in a sharded table, with an efficient exchange of its gradient.

A step looks up few rows of a large table, but the gradient summed over the devices of the batch is
as large as the table. If fewer rows were looked up, devices exchange these rows and their gradients
instead. Every device then adds the rows of all devices, in the same order. There is no forward-mode
derivative.

`lookup` has an ordinary gradient, as large as the table. With `lookup_parameter` a training step
can instead take the looked-up rows and their gradients (see `optimizers.row_gradient`). The layer
records its lookups in the collection LOOKUPS. It adds the arrays of the collection PERTURBATIONS to
the values, so both have the same gradient.

On a TPU an array has 128 values side by side, its lanes: XLA stores narrow rows across them, and
then looks up and changes rows value by value. A train state therefore has its narrow tables
*packed*, several rows in one of 128 values, with the same values in the same order.

V rows of the table, E width, B batch, P rows in a packed one.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, mesh_axes, row_sums

AXES = ('ngram_vocab', 'ngram_embed')  # logical axes of a table
# Collections of `lookup_parameter`.
LOOKUPS = 'table_lookups'
PERTURBATIONS = 'table_perturbations'
# `auto` exchanges rows if the devices together look up at most this share of the rows of a device.
# Measured with E = 32 and V = 32,768 and 262,144 on 8 simulated CPU devices: a step takes 0.6 to
# 0.8 of the time of `table` at 0.25, and 1.05 to 1.4 at 0.5. Rows are fewer bytes up to a share of
# about 2, but every device adds them all.
ROWS_SHARE = 0.25
# Without shards, measured with 12,288 lookups on one CPU device: gradient and update of Adagrad
# take as long by rows as on the whole table at 0.125 with E = 8, and a third at 0.25 with E = 64.
UNSHARDED_ROWS_SHARE = 0.125
# Values that a device holds of the rows of all devices: 1 GiB in float32. On a TPU a row has whole
# lanes. Without chunks, memory would grow with the batch of all devices.
MAX_VALUES = 2**28
LANES = 128


def is_table(param: Any) -> bool:
  """Whether a parameter with its logical axis names, in a box or an NNX variable, is a table."""
  return AXES[0] in axis_names.names_of(param)


class Lookup(struct.PyTreeNode):
  """The rows of a lookup, [B, ...], and how their gradient is exchanged, see `TableSharding`."""

  rows_Bx: jax.Array
  exchange: str = struct.field(pytree_node=False)


class TableSharding(NamedTuple):
  """Number of rows of a table, and the mesh axes of table and batch.

  `exchange` selects the data exchanged over the batch axes for the gradient: `rows`, `table`,
  `table_bfloat16` (rounded to bfloat16 where devices sum), or `auto`, see `prefers_rows`.
  """

  V: int
  exchange: str
  mesh: jax.sharding.AbstractMesh
  table: tuple[str, ...]
  batch: tuple[str, ...]

  @property
  def shared(self) -> tuple[str, ...]:
    """Axes of both table and batch; over these, a table shard needs all lookups."""
    return tuple(axis for axis in self.batch if axis in self.table)

  def size(self, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along the axes."""
    return math.prod(self.mesh.shape[axis] for axis in axes)

  @property
  def shard_rows(self) -> int:
    """Rows of the table of one device."""
    return self.V // self.size(self.table)

  def shard_map(self, function: Callable, inputs: tuple[str, ...], output: str) -> Callable:
    """Maps a function over shards; inputs and outputs are each sharded as `table` or `batch`."""
    specs = {'table': jax.P(self.table), 'batch': jax.P(self.batch)}
    return jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=tuple(specs[name] for name in inputs),
      out_specs=specs[output],
      check_vma=False,
    )

  def local_rows(self, rows_Bx: jax.Array) -> jax.Array:
    """Returns row numbers within the shard of a device, `shard_rows` for rows of other shards."""
    if not self.table:
      return rows_Bx
    size = self.shard_rows
    local_Bx = rows_Bx - size * jax.lax.axis_index(self.table)
    return jnp.where((local_Bx >= 0) & (local_Bx < size), local_Bx, size)

  def global_rows(self, local_Bx: jax.Array) -> jax.Array:
    """The inverse of `local_rows`; V for rows of other shards."""
    if not self.table:
      return local_Bx
    size = self.shard_rows
    rows_Bx = local_Bx + size * jax.lax.axis_index(self.table)
    return jnp.where(local_Bx < size, rows_Bx, self.V)

  def chunk_count(self, rows: int, E: int, axes: tuple[str, ...]) -> int:
    """Returns the number of chunks in which devices along the axes exchange their rows."""
    values = rows * self.size(axes) * (-(-E // LANES) * LANES)
    return min(max(1, -(-values // MAX_VALUES)), max(1, rows))


def lookup(table_VxE: jax.Array, rows_Bx: jax.Array, exchange: str = 'auto') -> jax.Array:
  """Returns rows of a table, [B, ..., E].

  Args:
    table_VxE: sharded by the logical AXES under a mesh.
    rows_Bx: int32 [B, ...], from 0 to V - 1, sharded by `batch`.
    exchange: see `TableSharding`.
  """
  sharding = make_sharding(len(table_VxE), len(rows_Bx), exchange)
  if sharding is None:
    return row_sums.take(jnp.asarray(table_VxE), rows_Bx)  # a NumPy array has no traced rows
  return _lookup(sharding, table_VxE, rows_Bx)


def take(array_VxE: jax.Array, rows_Bx: jax.Array) -> jax.Array:
  """Returns rows of an unsharded array, [B, ..., E]; zeros for rows from V on."""
  return array_VxE.at[rows_Bx].get(mode='fill', fill_value=0)


def packed_shape(V: int, E: int) -> tuple[int, int]:
  """Returns the shape of the packed table; unchanged if it does not fill rows of 128."""
  P = LANES // E if LANES % E == 0 else 1
  if V % P:
    return V, E
  return V // P, P * E


def lookup_parameter(
  module: nn.Module,
  name: str,
  table_VxE: jax.Array,
  rows_Bx: jax.Array,
  exchange: str = 'auto',
  width: int | None = None,
) -> jax.Array:
  """Like `lookup`, for a parameter of a Linen module with a gradient by rows.

  Records a `Lookup` in LOOKUPS if this collection is mutable, and adds its array of PERTURBATIONS
  if there is one. All lookups in a parameter should be made by this function.

  Args:
    module: the module of the parameter.
    name: name of the parameter.
    table_VxE, rows_Bx, exchange: see `lookup`.
    width: E of a possibly packed table. None: not packed.
  """
  P = 1 if width is None else table_VxE.shape[1] // width
  if P > 1:
    packed_BxPE = lookup_parameter(module, name, table_VxE, rows_Bx // P, exchange)
    return _unpack(packed_BxPE, rows_Bx % P, P)
  y_BxE = lookup(table_VxE, rows_Bx, exchange)
  if module.is_initializing():
    return y_BxE
  number = len(module.get_variable(LOOKUPS, name, ()))
  module.sow(LOOKUPS, name, Lookup(rows_Bx, exchange))
  perturbations = module.get_variable(PERTURBATIONS, name)
  if perturbations is None:
    return y_BxE
  return y_BxE + perturbations[number]


def _unpack(packed_BxPE: jax.Array, index_Bx: jax.Array, P: int) -> jax.Array:
  """Returns the rows [B, ..., E] at the indices `index_Bx` of packed rows."""
  first_BxE, *others = jnp.split(packed_BxPE, P, axis=-1)
  y_BxE = first_BxE
  for index, other_BxE in enumerate(others, 1):
    y_BxE = jnp.where(index_Bx[..., None] == index, other_BxE, y_BxE)
  return y_BxE


def prefers_rows(V: int, B: int, lookups: int, exchange: str = 'auto') -> bool:
  """Whether to exchange the gradient of a table as rows instead of a whole array.

  Args:
    V: rows of the table.
    B: size of the batch axis of the lookups.
    lookups: number of lookups of all devices.
    exchange: see `TableSharding`; `auto` compares the lookups with the rows of a device.
  """
  if mesh_axes.axes('batch', B) is None:
    return False
  if exchange != 'auto':
    return exchange == 'rows'
  sharding = make_sharding(V, B)
  if sharding is None:
    return lookups <= UNSHARDED_ROWS_SHARE * V
  return lookups <= ROWS_SHARE * sharding.shard_rows


def make_sharding(V: int, B: int | None = None, exchange: str = 'auto') -> TableSharding | None:
  """Returns the sharding under the current rules.

  Returns None if nothing is sharded, or if the batch of B rows is not divisible. An indivisible
  table is replicated.
  """
  table_axes = mesh_axes.axes(AXES[0], V) or ()
  batch_axes = () if B is None else mesh_axes.axes('batch', B)
  if batch_axes is None or not table_axes + batch_axes:
    return None
  return TableSharding(V, exchange, jax.sharding.get_abstract_mesh(), table_axes, batch_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(sharding: TableSharding, table_VxE: jax.Array, rows_Bx: jax.Array) -> jax.Array:

  def look_up_chunk(table_VxE, rows_C):
    rows_C = all_gather(rows_C, sharding.shared)
    # Rows of other shards are zeros, so the sum over shards is exact.
    y_CxE = take(table_VxE, sharding.local_rows(rows_C))
    table_only = tuple(axis for axis in sharding.table if axis not in sharding.batch)
    if table_only:
      y_CxE = jax.lax.psum(y_CxE, table_only)
    if sharding.shared:
      y_CxE = jax.lax.psum_scatter(y_CxE, sharding.shared, tiled=True)
    return y_CxE

  def lookup_shard(table_VxE, rows_Bx):
    E = table_VxE.shape[1]
    chunks = sharding.chunk_count(rows_Bx.size, E, sharding.shared)
    rows_PxC = _split(rows_Bx.ravel(), chunks, sharding.V)
    y_PxCxE = jax.lax.map(functools.partial(look_up_chunk, table_VxE), rows_PxC)
    return y_PxCxE.reshape(-1, E)[: rows_Bx.size].reshape(*rows_Bx.shape, E)

  return sharding.shard_map(lookup_shard, ('table', 'batch'), 'batch')(table_VxE, rows_Bx)


def _split(array_Rx: jax.Array, chunks: int, fill: int) -> jax.Array:
  """Splits the first axis into chunks of equal size, the last one padded."""
  R, *rest = array_Rx.shape
  padding = [(0, -R % chunks)] + [(0, 0)] * len(rest)
  return jnp.pad(array_Rx, padding, constant_values=fill).reshape(chunks, -(-R // chunks), *rest)


def _forward(
  sharding: TableSharding, table_VxE: jax.Array, rows_Bx: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return _lookup(sharding, table_VxE, rows_Bx), rows_Bx


def _backward(
  sharding: TableSharding, rows_Bx: jax.Array, gradient_BxE: jax.Array
) -> tuple[jax.Array, None]:
  by_rows = prefers_rows(sharding.V, len(rows_Bx), rows_Bx.size, sharding.exchange)
  # Rows are gathered over these axes of the batch; over the others the whole gradient is summed.
  gathered = sharding.batch if by_rows else sharding.shared
  summed = tuple(axis for axis in sharding.batch if axis not in gathered)

  def add_chunk(total_VxE, chunk):
    rows_C, gradient_CxE = chunk
    rows_C = all_gather(rows_C, gathered)
    gradient_CxE = all_gather(gradient_CxE, gathered)
    return row_sums.add(total_VxE, sharding.local_rows(rows_C), gradient_CxE), None

  def add_shard(gradient_BxE, rows_Bx):
    E = gradient_BxE.shape[-1]
    chunks = sharding.chunk_count(rows_Bx.size, E, gathered)
    rows_PxC = _split(rows_Bx.ravel(), chunks, sharding.V)
    gradient_PxCxE = _split(gradient_BxE.reshape(-1, E), chunks, 0)
    zeros_VxE = jnp.zeros((sharding.shard_rows, E), gradient_BxE.dtype)
    gradient_VxE, _ = jax.lax.scan(add_chunk, zeros_VxE, (rows_PxC, gradient_PxCxE))
    if not summed:
      return gradient_VxE
    dtype = gradient_VxE.dtype
    if sharding.exchange == 'table_bfloat16':
      dtype = jnp.bfloat16
    return jax.lax.psum(gradient_VxE.astype(dtype), summed).astype(gradient_VxE.dtype)

  add = sharding.shard_map(add_shard, ('batch', 'batch'), 'table')
  return add(gradient_BxE, rows_Bx), None


_lookup.defvjp(_forward, _backward)


def all_gather(array_Bx: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Concatenates the shards of an array along mesh axes, in the order of the devices."""
  if not axes:
    return array_Bx
  return jax.lax.all_gather(array_Bx, axes, tiled=True)
