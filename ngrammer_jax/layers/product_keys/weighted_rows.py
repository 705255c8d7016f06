"""Weighted sums of rows of a table, in chunks of tokens.

  weighted_sums  y_t  = sum_j w_tj U[r_tj]
  products       p_tj = x_t . U[r_tj]
  outer_sums     dU[r] = sum over all t and j with r_tj = r of w_tj x_t

Each is the gradient of another one: with weights w and the gradient dy, dw is `products(U, r, dy)`
and dU is `outer_sums(r, w, dy)`. The rows of all tokens are never materialized: 128 rows of 2,048
values for each of 16,384 tokens would be 17 GB. The gradient of the table is as large as the table.

Under a mesh, devices exchange sums per token, never rows: every device sums its own rows, and the
sums of devices are added. There is no forward-mode derivative.

V rows of the table, E width, B batch, T segment length, J rows of a token, N tokens of a device, C
tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import row_sums
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.layers.ngram.table import TableSharding

# Values of rows on a device at once: 128 MiB in float32.
MAX_VALUES = 2**25


@jax.custom_vjp
def weighted_sums(table_VxE: jax.Array, rows_BxTxJ: jax.Array, w_BxTxJ: jax.Array) -> jax.Array:
  """Returns the weighted sums of the rows of each token, [B, T, E], in the dtype of the weights.

  Args:
    table_VxE: sharded by the logical `table.AXES` under a mesh.
    rows_BxTxJ: int32, from 0 to V - 1, sharded by `batch`.
    w_BxTxJ: weights.
  """
  return _by_chunk(_sum_rows, table_VxE, rows_BxTxJ, w_BxTxJ)


@jax.custom_vjp
def products(table_VxE: jax.Array, rows_BxTxJ: jax.Array, x_BxTxE: jax.Array) -> jax.Array:
  """Returns the products of each token with its rows, [B, T, J], in the dtype of x.

  Args:
    table_VxE, rows_BxTxJ: see `weighted_sums`.
    x_BxTxE: a vector for each token.
  """
  return _by_chunk(_multiply_rows, table_VxE, rows_BxTxJ, x_BxTxE)


def outer_sums(
  V: int, rows_BxTxJ: jax.Array, w_BxTxJ: jax.Array, x_BxTxE: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Returns for each row the weighted sum of the vectors of its tokens, [V, E].

  Args:
    V: number of rows.
    rows_BxTxJ, w_BxTxJ: see `weighted_sums`.
    x_BxTxE: a vector for each token.
    dtype: of the result; sums are in at least float32.
  """
  E = x_BxTxE.shape[-1]
  wide = jnp.promote_types(dtype, jnp.float32)
  sharding = table.make_sharding(V, len(rows_BxTxJ))

  def add_shard(rows_BxTxJ, w_BxTxJ, x_BxTxE):
    shared = () if sharding is None else sharding.shared
    shard_rows = V if sharding is None else sharding.shard_rows

    def add_chunk(total_VxE, chunk):
      rows_CxJ, w_CxJ, x_CxE = (table.all_gather(array, shared) for array in chunk)
      if sharding is not None:
        rows_CxJ = sharding.local_rows(rows_CxJ)
      outer_CxJxE = w_CxJ.astype(wide)[..., None] * x_CxE.astype(wide)[:, None]
      outer_NxE = outer_CxJxE.reshape(-1, E)
      return row_sums.add(total_VxE, rows_CxJ.ravel(), outer_NxE), None

    tokens = (_flatten(rows_BxTxJ), _flatten(w_BxTxJ), _flatten(x_BxTxE))
    C = _chunk_length(tokens[0].shape[1], E, sharding)
    total_VxE, _ = _scan(add_chunk, jnp.zeros((shard_rows, E), wide), tokens, C)
    if sharding is not None:
      others = tuple(axis for axis in sharding.batch if axis not in shared)
      if others:
        total_VxE = jax.lax.psum(total_VxE, others)
    return total_VxE.astype(dtype)

  if sharding is None:
    return add_shard(rows_BxTxJ, w_BxTxJ, x_BxTxE)
  add = sharding.shard_map(add_shard, ('batch',) * 3, 'table')
  return add(rows_BxTxJ, w_BxTxJ, x_BxTxE)


def _sum_rows(values_CxJxE: jax.Array, w_CxJ: jax.Array) -> jax.Array:
  return jnp.einsum('cje,cj->ce', values_CxJxE, w_CxJ, preferred_element_type=_wide(w_CxJ))


def _multiply_rows(values_CxJxE: jax.Array, x_CxE: jax.Array) -> jax.Array:
  return jnp.einsum('cje,ce->cj', values_CxJxE, x_CxE, preferred_element_type=_wide(x_CxE))


def _wide(array: jax.Array) -> jnp.dtype:
  return jnp.promote_types(array.dtype, jnp.float32)


def _by_chunk(
  function: Callable[[jax.Array, jax.Array], jax.Array],
  table_VxE: jax.Array,
  rows_BxTxJ: jax.Array,
  x_BxTx: jax.Array,
) -> jax.Array:
  """Returns a linear function of the rows [C, J, E] of each token and an array, [B, T, ...]."""
  V, E = table_VxE.shape
  sharding = table.make_sharding(V, len(rows_BxTxJ))

  def apply_shard(table_VxE, rows_BxTxJ, x_BxTx):
    def apply_chunk(_, chunk):
      if sharding is None:
        rows_CxJ, x_Cx = chunk
        return None, function(table_VxE[rows_CxJ].astype(x_Cx.dtype), x_Cx).astype(x_Cx.dtype)
      rows_CxJ, x_Cx = (table.all_gather(array, sharding.shared) for array in chunk)
      # Rows of other shards are zeros.
      values_CxJxE = table.take(table_VxE, sharding.local_rows(rows_CxJ))
      y_Cx = function(values_CxJxE.astype(x_Cx.dtype), x_Cx)
      table_only = tuple(axis for axis in sharding.table if axis not in sharding.batch)
      if table_only:
        y_Cx = jax.lax.psum(y_Cx, table_only)
      if sharding.shared:
        y_Cx = jax.lax.psum_scatter(y_Cx, sharding.shared, tiled=True)
      return None, y_Cx.astype(x_Cx.dtype)

    tokens = (_flatten(rows_BxTxJ), _flatten(x_BxTx))
    C = _chunk_length(tokens[0].shape[1], E, sharding)
    _, y_Nx = _scan(apply_chunk, None, tokens, C)
    return y_Nx.reshape(*rows_BxTxJ.shape[:2], *y_Nx.shape[1:])

  if sharding is None:
    return apply_shard(table_VxE, rows_BxTxJ, x_BxTx)
  apply = sharding.shard_map(apply_shard, ('table', 'batch', 'batch'), 'batch')
  return apply(table_VxE, rows_BxTxJ, x_BxTx)


def _flatten(array_BxTx: jax.Array) -> jax.Array:
  return array_BxTx.reshape(-1, *array_BxTx.shape[2:])


def _chunk_length(J: int, E: int, sharding: TableSharding | None) -> int:
  """Returns C, the tokens of a chunk on each device."""
  devices = 1 if sharding is None else sharding.size(sharding.shared)
  return max(1, MAX_VALUES // (J * E * devices))


def _scan(step: Callable, carry: Any, arrays_Nx: tuple[jax.Array, ...], C: int) -> tuple[Any, Any]:
  """Like `jax.lax.scan` over chunks of C entries, the last one shorter; joins their outputs."""
  N = len(arrays_Nx[0])
  count = N // C
  outputs = []
  if count:
    chunks = [array[: count * C].reshape(count, C, *array.shape[1:]) for array in arrays_Nx]
    carry, y_PxCx = jax.lax.scan(step, carry, tuple(chunks))
    outputs.append(jax.tree.map(_flatten, y_PxCx))
  if N % C:
    carry, y_Cx = step(carry, tuple(array[count * C :] for array in arrays_Nx))
    outputs.append(y_Cx)
  return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _sums_forward(table_VxE, rows_BxTxJ, w_BxTxJ):
  return weighted_sums(table_VxE, rows_BxTxJ, w_BxTxJ), (table_VxE, rows_BxTxJ, w_BxTxJ)


def _sums_backward(saved, dy_BxTxE):
  table_VxE, rows_BxTxJ, w_BxTxJ = saved
  d_table_VxE = outer_sums(len(table_VxE), rows_BxTxJ, w_BxTxJ, dy_BxTxE, table_VxE.dtype)
  return d_table_VxE, None, products(table_VxE, rows_BxTxJ, dy_BxTxE)


def _products_forward(table_VxE, rows_BxTxJ, x_BxTxE):
  return products(table_VxE, rows_BxTxJ, x_BxTxE), (table_VxE, rows_BxTxJ, x_BxTxE)


def _products_backward(saved, dp_BxTxJ):
  table_VxE, rows_BxTxJ, x_BxTxE = saved
  d_table_VxE = outer_sums(len(table_VxE), rows_BxTxJ, dp_BxTxJ, x_BxTxE, table_VxE.dtype)
  return d_table_VxE, None, weighted_sums(table_VxE, rows_BxTxJ, dp_BxTxJ)


weighted_sums.defvjp(_sums_forward, _sums_backward)
products.defvjp(_products_forward, _products_backward)
