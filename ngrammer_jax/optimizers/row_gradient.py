"""Gradients of n-gram tables as rows: the looked-up rows and their gradients.

A leaf of gradients or updates is then a `RowGradient` instead of an array as large as the table.
Under a mesh, every device has the rows of its shard of the table.

V rows of a table, E width, B batch, L rows of a gradient.
"""

from collections.abc import Callable, Collection, Sequence
import math
from typing import Any
import zlib

from flax import struct, traverse_util
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax.layers import row_sums
from ngrammer_jax.layers.ngram import table

Path = tuple[str, ...]  # of a parameter


class RowGradient(struct.PyTreeNode):
  """The gradient, or the update, of some rows of a table; 0 for all other rows.

  Attributes:
    rows: int32 [L], different row numbers; V where an entry is unused.
    values: [L, E], 0 where an entry is unused.
  """

  rows: jax.Array
  values: jax.Array

  def dense(self, like_VxE: jax.Array) -> jax.Array:
    """Returns the gradient of all rows, with the shape and dtype of an array."""
    return self.put(jnp.zeros_like(like_VxE), self.values)

  def take(self, array_VxE: jax.Array) -> jax.Array:
    """Returns the rows of an array, [L, E]; 0 for unused entries."""
    return self._by_shard(table.take, array_VxE)

  def put(self, array_VxE: jax.Array, values_LxE: jax.Array) -> jax.Array:
    """Returns the array with other values in the rows."""
    return self._by_shard(_put, array_VxE, values_LxE)

  def add_to(self, array_VxE: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the array plus the gradient; in bfloat16 rounded stochastically with a key."""
    if array_VxE.dtype == jnp.bfloat16:
      values_LxE = self.take(array_VxE) + self.values
      return self.put(array_VxE, round_stochastically(values_LxE, self.rows, key))
    return self._by_shard(_add, array_VxE, self.values.astype(array_VxE.dtype))

  def _by_shard(self, function: Callable, array_VxE: jax.Array, *values: jax.Array) -> jax.Array:
    """Calls a function of an array, the rows and values, on each shard of the table."""
    sharding = table.make_sharding(len(array_VxE))
    if sharding is None:
      return function(array_VxE, self.rows, *values)

    def call_on_shard(array, rows, *values):
      return function(array, sharding.local_rows(rows), *values)

    inputs = ('table',) * (2 + len(values))
    return sharding.shard_map(call_on_shard, inputs, 'table')(array_VxE, self.rows, *values)


def _add(array_VxE: jax.Array, rows_L: jax.Array, values_LxE: jax.Array) -> jax.Array:
  """Returns an unsharded array plus values in rows below V."""
  return array_VxE.at[rows_L].add(values_LxE, mode='drop', unique_indices=True)


def _put(array_VxE: jax.Array, rows_L: jax.Array, values_LxE: jax.Array) -> jax.Array:
  """Returns an unsharded array with other values in rows below V."""
  return array_VxE.at[rows_L].set(values_LxE, mode='drop', unique_indices=True)


def grad(
  loss: Callable[[Any, Any], tuple[jax.Array, tuple[Any, ...]]],
  params: Any,
  microbatches: int,
  frozen: Collection[str] = (),
) -> tuple[dict[Path, Any], dict[Path, Any], tuple[Any, ...]]:
  """Differentiates a loss with respect to parameters, with lookups in place of tables.

  Args:
    loss: maps parameters and further variables of the model to the loss, and to the collection
      `table.LOOKUPS` followed by other results.
    params: the parameters.
    microbatches: number of sequential parts of a batch; 0 differentiates tables like other
      parameters.
    frozen: names of the parameters without a gradient, such as `layer_0/attention_norm/scale`.

  Returns:
    The gradient by path, without these parameters and those tables; the rows of lookups and the
    gradients of their values, by path; and the other results. `join` takes the first two.
  """
  params_by_path = traverse_util.flatten_dict(params, keep_empty_nodes=True)
  trained = {path: p for path, p in params_by_path.items() if '/'.join(path) not in frozen}
  perturbations = {}
  if microbatches:
    perturbations = _perturbations(loss, params, trained, microbatches)
  dense = {path: param for path, param in trained.items() if path not in perturbations}

  def perturbed_loss(dense, perturbations):
    params = traverse_util.unflatten_dict(params_by_path | dense)
    if not perturbations:
      return loss(params, {})
    return loss(params, {table.PERTURBATIONS: traverse_util.unflatten_dict(perturbations)})

  differentiate = jax.grad(perturbed_loss, argnums=(0, 1), has_aux=True)
  (gradient, value_gradients), (recorded, *rest) = differentiate(dense, perturbations)
  recorded = traverse_util.flatten_dict(recorded)
  lookups = {}
  for path in perturbations:
    rows = [lookup.rows_Bx for lookup in recorded[path]]
    lookups[path] = tuple(zip(rows, value_gradients[path], strict=True))
  return gradient, lookups, tuple(rest)


def _perturbations(
  loss: Callable, params: Any, trained: dict[Path, jax.Array], microbatches: int
) -> dict[Path, tuple[jax.Array, ...]]:
  """Returns the perturbations of the lookups of each table with a row gradient, by path."""
  _, (recorded, *_) = jax.eval_shape(loss, params, {})
  perturbations = {}
  for path, lookups in traverse_util.flatten_dict(recorded).items():
    if path not in trained:
      continue
    V, E = trained[path].shape
    dtype = jnp.promote_types(trained[path].dtype, jnp.float32)
    shapes = [lookup.rows_Bx.shape for lookup in lookups]
    B = shapes[0][0]
    total = microbatches * sum(math.prod(shape) for shape in shapes)  # all of them are kept
    if all(table.prefers_rows(V, B, total, lookup.exchange) for lookup in lookups):
      # Minus zero: a value plus it has the same bits, also if it is minus zero.
      perturbations[path] = tuple(jnp.full((*shape, E), -0.0, dtype) for shape in shapes)
  return perturbations


def join(gradient: dict[Path, Any], lookups: dict[Path, Any], params: Any) -> Any:
  """Returns the tree of gradients of the results of `grad`, with a `RowGradient` for each table."""
  params_by_path = traverse_util.flatten_dict(params, keep_empty_nodes=True)
  joined = dict(gradient)
  for path, table_lookups in lookups.items():
    joined[path] = combine(table_lookups, V=len(params_by_path[path]))
  in_order = {path: joined[path] for path in params_by_path if path in joined}
  return traverse_util.unflatten_dict(in_order)


def combine(lookups: Sequence[tuple[jax.Array, jax.Array]], V: int) -> RowGradient:
  """Returns the gradient of a table from the gradients of its lookups.

  The gradients of a row are added in batch order on any mesh. Lookups with gradient 0, as at
  padding, are dropped. L is the number of lookups of all devices; under a mesh, L for every shard
  of the table.

  Args:
    lookups: rows [B, ...] and gradients [B, ..., E] of each lookup in the table.
    V: rows of the table.
  """
  first_rows, first_values = lookups[0]
  B = len(first_rows)
  E = first_values.shape[-1]
  rows_BxL = jnp.concatenate([rows.reshape(B, -1) for rows, _ in lookups], axis=1)
  values_BxLxE = jnp.concatenate([values.reshape(B, -1, E) for _, values in lookups], axis=1)
  sharding = table.make_sharding(V, B)
  if sharding is None:
    return RowGradient(*_merge(rows_BxL.reshape(-1), values_BxLxE.reshape(-1, E), V))

  def merge_shard(rows_BxL, values_BxLxE):
    rows_BxL = table.all_gather(rows_BxL, sharding.batch)
    values_BxLxE = table.all_gather(values_BxLxE, sharding.batch)
    rows_L = sharding.local_rows(rows_BxL.reshape(-1))
    rows_L, values_LxE = _merge(rows_L, values_BxLxE.reshape(-1, E), sharding.shard_rows)
    return RowGradient(sharding.global_rows(rows_L), values_LxE)

  return sharding.shard_map(merge_shard, ('batch', 'batch'), 'table')(rows_BxL, values_BxLxE)


def _merge(rows_L: jax.Array, values_LxE: jax.Array, V: int) -> tuple[jax.Array, jax.Array]:
  """Returns the distinct rows below V and the sums of their values, with unused entries V and 0."""
  L = len(rows_L)
  is_used_L = (rows_L < V) & (values_LxE != 0).any(axis=-1)
  rows_L = jnp.where(is_used_L, rows_L, V)
  values_LxE = jnp.where(is_used_L[:, None], values_LxE, 0)

  def add_segments(rows_L, values_LxE):
    order_L = jnp.argsort(rows_L, stable=True)
    rows_L = rows_L[order_L]
    values_LxE = values_LxE[order_L]
    group_L = jnp.cumsum(jnp.diff(rows_L, prepend=rows_L[:1]) != 0)
    values_LxE = jax.ops.segment_sum(values_LxE, group_L, L, indices_are_sorted=True)
    return jnp.full((L,), V, rows_L.dtype).at[group_L].set(rows_L), values_LxE

  def add_sorted(rows_L, values_LxE):
    rows_L, sums_LxE, is_last_L = row_sums.sorted_sums(rows_L, values_LxE)
    is_last_L &= rows_L < V
    sums_LxE = jnp.where(is_last_L[:, None], sums_LxE, 0).astype(values_LxE.dtype)
    return jnp.where(is_last_L, rows_L, V), sums_LxE

  return row_sums.on_gpu(rows_L, values_LxE, gpu=add_sorted, default=add_segments)


def is_row_gradient(leaf: Any) -> bool:
  """Whether a leaf of a tree of gradients is a `RowGradient`."""
  return isinstance(leaf, RowGradient)


def map_leaves(function: Callable, tree: Any, *rest: Any) -> Any:
  """Like `jax.tree.map`, with every `RowGradient` as one leaf."""
  return jax.tree.map(function, tree, *rest, is_leaf=is_row_gradient)


def norm(tree: Any) -> jax.Array:
  """Returns the Euclidean norm of a tree of gradients or updates."""
  return optax.tree.norm(values(tree))


def values(tree: Any) -> Any:
  """Returns the tree with the values of every `RowGradient` in its place."""

  def values_of(leaf):
    return leaf.values if is_row_gradient(leaf) else leaf

  return map_leaves(values_of, tree)


def apply_updates(params: Any, updates: Any, key: jax.Array) -> Any:
  """Like `optax.apply_updates`, but for a table changes only the rows of its update.

  Sums of a bfloat16 table and its update are rounded stochastically. Round-to-nearest would lose
  all updates below half the distance of neighbours, 1/256 to 1/128 of a value.

  Args:
    params: the parameters.
    updates: their updates.
    key: key of this step.
  """

  def apply(path, update, param):
    leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
    if is_row_gradient(update):
      return update.add_to(param, leaf_key)
    if param.dtype == jnp.bfloat16:
      return round_stochastically(param + update, jnp.arange(len(param)), leaf_key)
    return optax.apply_updates(param, update)

  return jax.tree_util.tree_map_with_path(apply, updates, params, is_leaf=is_row_gradient)


def round_stochastically(values_LxE: jax.Array, rows_L: jax.Array, key: jax.Array) -> jax.Array:
  """Rounds to a bfloat16 neighbour at random, unbiased.

  The result is a function of the values, the key and the row numbers, on any mesh.
  """
  keys_L = jax.vmap(jax.random.fold_in, (None, 0))(key, rows_L)
  row_shape = values_LxE.shape[1:]
  noise_LxE = jax.vmap(lambda key: jax.random.bits(key, row_shape, jnp.uint16))(keys_L)
  # The bits of a bfloat16 are the upper half of those of a float32: the carry of the lower half,
  # plus noise, is 1 with the probability of that half.
  bits_LxE = jax.lax.bitcast_convert_type(values_LxE.astype(jnp.float32), jnp.uint32)
  upper_LxE = (bits_LxE + noise_LxE) >> 16
  return jax.lax.bitcast_convert_type(upper_LxE.astype(jnp.uint16), jnp.bfloat16)
