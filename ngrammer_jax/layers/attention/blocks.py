"""Attention in blocks of queries and keys: all heads, on all devices.

Each head loops over its visible blocks (see `running_softmax`). The full score matrix of a segment
is never materialized, nor are all keys and values of a memory (see `memory_source`).

With fewer key heads than query heads, the query heads of a key head share its keys and its window.

B batch, T queries, M memory, N query heads, C key heads, G = N / C, H head width, K queries or keys
of a block.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import dropout, mesh_axes
from ngrammer_jax.layers.attention import block_layout
from ngrammer_jax.layers.attention.block_layout import BlockLayout
from ngrammer_jax.layers.attention.full import Heads, PartialAttention, SpanMask
from ngrammer_jax.layers.attention.memory_source import MemorySource
from ngrammer_jax.layers.attention.running_softmax import (
  Constants,
  Distances,
  HeadLoop,
  KeyHead,
  KeysAndValues,
  Queries,
  QueryHead,
  add_trees,
  wide_zeros,
  with_dtypes,
)
from ngrammer_jax.layers.context import Keys

BLOCK = 64  # number of queries and keys of a block; 128 and 256 were slower on a CPU


class Operands(NamedTuple):
  """The inputs with a gradient, padded to full blocks.

  Attributes:
    queries: of all query heads, [N, B, T, ...].
    keys: keys and values of the segment, of all key heads, [C, B, T, H].
    distances: encodings and biases of the distances.
    weights: weights of `MemorySource`.
  """

  queries: Queries
  keys: KeysAndValues
  distances: Distances
  weights: Any


def attend(
  heads: Heads,
  span_mask: SpanMask | None,
  keys: Keys,
  source: MemorySource,
  return_pairs: bool,
  drop: dropout.Dropout,
) -> PartialAttention:
  """Attends to the visible keys of each query, like `full.attend` except for epsilon.

  Args:
    heads: queries, keys and values of the segment, without a memory.
    span_mask: mask of the learned spans. None: no spans.
    keys: the keys of the segment.
    source: source of the memory.
    return_pairs: whether to compute pairs.
    drop: dropout of the weights.

  Raises:
    ValueError: the dropout key is not a threefry key.
  """
  if drop.is_active:
    dropout.check_key(drop.key)
  B, T, N, _ = heads.query_BxTxNxH.shape
  layout = block_layout.make(keys, BLOCK)
  first_query_NxB = (jnp.arange(B) * N + jnp.arange(N)[:, None]) * T
  source = source.replace(rows=jax.tree.map(layout.pad_memory, source.rows))
  operands = _operands(heads, span_mask, source, layout)
  ramp, renormalize = 1, True  # of no effect without spans
  if span_mask is not None:
    ramp, renormalize = span_mask.ramp, span_mask.renormalize
  constants = Constants(
    layout=layout,
    source=source.replace(weights=None),
    first_query_NxB=first_query_NxB,
    drop=drop,
    ramp=ramp,
    renormalize=renormalize,
    return_pairs=return_pairs,
    logit_cap=heads.logit_cap,
  )
  values, log_mass, pair = jax.tree.map(
    lambda array_NxBxTx: array_NxBxTx[:, :, :T], _attend_sharded(operands, constants)
  )
  pair_BxNxT = None if pair is None else _slot_pairs(pair.swapaxes(0, 1), keys)
  return PartialAttention(jnp.moveaxis(values, 0, 2), log_mass.swapaxes(0, 1), None, pair_BxNxT)


def _operands(
  heads: Heads, span_mask: SpanMask | None, source: MemorySource, layout: BlockLayout
) -> Operands:
  """Returns the operands of all heads, padded to full blocks."""

  def by_head(array_BxTxNx: jax.Array) -> jax.Array:
    return layout.pad_segment(jnp.moveaxis(array_BxTxNx, 2, 0), axis=2)

  distance_query = encoding = bias = None
  if heads.distance is not None:
    query_BxTxNxH, encoding_SxNxH, bias_SxN = heads.distance
    distance_query = by_head(query_BxTxNxH)
    encoding = layout.pad_distances(encoding_SxNxH.swapaxes(0, 1))
    if bias_SxN is not None:
      bias = layout.pad_distances(bias_SxN.T)
  span_NxBxT = None
  if span_mask is not None:
    z_BxTxN = span_mask.z_BxTxN
    is_shared = z_BxTxN.shape[:2] == (1, 1)
    span_NxBxT = z_BxTxN.T if is_shared else by_head(z_BxTxN)
  queries = Queries(by_head(heads.query_BxTxNxH), distance_query, span_NxBxT)
  keys = KeysAndValues(by_head(heads.key_BxSxCxH), by_head(heads.value_BxSxCxH))
  return Operands(queries, keys, Distances(encoding, bias), source.weights)


def _attend_sharded(
  operands: Operands, constants: Constants
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Each device attends for its own rows and heads. Returns the same as `_attend`."""
  N, B = constants.first_query_NxB.shape
  C = len(operands.keys.key)
  row_axes = mesh_axes.axes('batch', B)
  head_axes, key_head_axes = mesh_axes.head_axes(N, C)
  if not row_axes and not head_axes:
    return _attend(operands, constants)
  by_head = jax.P(head_axes)
  by_row = jax.P(row_axes)
  by_both = jax.P(head_axes, row_axes)
  by_key_head = jax.P(key_head_axes)
  by_key_head_and_row = jax.P(key_head_axes, row_axes)
  span_NxBxT = operands.queries.span
  span_spec = by_both
  if span_NxBxT is not None and span_NxBxT.shape[1:] == (1, 1):
    span_spec = by_head
  encoding_NxSxH = operands.distances.encoding
  encoding_spec = by_head
  if encoding_NxSxH is not None and len(encoding_NxSxH) == 1:
    encoding_spec = jax.P()
  operand_specs = Operands(
    queries=Queries(by_both, by_both, span_spec),
    keys=by_key_head_and_row,
    distances=Distances(encoding_spec, by_head),
    weights=by_key_head,
  )
  constant_specs = constants.replace(
    layout=by_row,
    source=constants.source.replace(rows=by_row, cache=jax.P(row_axes, key_head_axes)),
    first_query_NxB=by_both,
    drop=jax.P(),
  )
  pair_specs = by_both if constants.return_pairs else None

  def attend(operands, constants):
    if head_axes != key_head_axes:  # every device has all key heads
      select_heads = functools.partial(mesh_axes.local_key_heads, head_axes, N)
      keys, weights = select_heads((operands.keys, operands.weights), 0)
      operands = operands._replace(keys=keys, weights=weights)
      source = constants.source.replace(cache=select_heads(constants.source.cache, 1))
      constants = constants.replace(source=source)
    return _attend(operands, constants)

  attend_on_devices = jax.shard_map(
    attend,
    in_specs=(operand_specs, constant_specs),
    out_specs=(by_both, by_both, pair_specs),
    check_vma=False,
  )
  return attend_on_devices(operands, constants)


def _slot_pairs(pair_BxNxT: jax.Array, keys: Keys) -> jax.Array:
  """Maps pairs from token order to cache slot order."""
  if keys.order_BxM is None:
    return pair_BxNxT
  M = keys.order_BxM.shape[1]
  index_BxNxT = jnp.minimum(pair_BxNxT, M - 1)
  slot_BxNxT = jnp.take_along_axis(keys.order_BxM[:, None], index_BxNxT, axis=2)
  return jnp.where(pair_BxNxT < M, slot_BxNxT, pair_BxNxT)


@jax.custom_vjp
def _attend(
  operands: Operands, constants: Constants
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns values [N, B, T, H], log masses [N, B, T], and pairs [N, B, T] or None.

  A query without visible keys has values 0; without earlier visible keys its pair is S.
  """
  return _attend_forward(operands, constants)[0]


def _attend_forward(
  operands: Operands, constants: Constants
) -> tuple[tuple[jax.Array, jax.Array, jax.Array | None], tuple[Any, ...]]:
  """Returns the result of `_attend`, and the residuals of its gradient."""

  def attend_key_head(heads):
    query_heads, key_head = heads

    def attend_query_head(_, query_head):
      loop = HeadLoop(constants, operands.distances, query_head, key_head)
      return None, loop.attend()

    _, (results, windows) = _scan_query_heads(attend_query_head, None, query_heads)
    # The window is the same for all query heads.
    return results, jax.tree.map(lambda window_Gx: window_Gx[0], windows)

  result, window = jax.lax.map(attend_key_head, _grouped_heads(operands, constants))
  result, window = checkpoint_name((_join_groups(result), window), 'attended')
  values, log_mass, _ = result
  return result, (operands, constants, values, log_mass, window)


def _attend_backward(
  residuals: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array, Any]
) -> tuple[Operands, None]:
  """Returns the gradient of the operands."""
  operands, constants, values, log_mass, window = residuals
  d_values, d_log_mass, _ = cotangents
  query_heads, key_heads = _grouped_heads(operands, constants)
  saved = _split_groups((values, log_mass, d_values, d_log_mass), len(operands.keys.key))

  def visit_key_head(d_distances, arguments):
    (query_heads, key_head), window, saved = arguments

    def visit_query_head(sums, arguments):
      query_head, saved = arguments
      d_distances, d_key_head = sums
      loop = HeadLoop(constants, operands.distances, query_head, key_head)
      d_distances, d_queries, d_own_key_head = loop.gradient(d_distances, window, *saved)
      return (d_distances, add_trees(d_key_head, d_own_key_head)), d_queries

    start = d_distances, wide_zeros((key_head.keys, key_head.weights))
    (d_distances, d_key_head), d_queries = _scan_query_heads(
      visit_query_head, start, (query_heads, saved)
    )
    return d_distances, (d_queries, d_key_head)

  start = wide_zeros(operands.distances)
  arguments = (query_heads, key_heads), window, saved
  d_distances, (d_queries, d_key_heads) = jax.lax.scan(visit_key_head, start, arguments)
  d_keys, d_weights = d_key_heads
  d_operands = Operands(_join_groups(d_queries), d_keys, d_distances, d_weights)
  return with_dtypes(d_operands, operands), None


_attend.defvjp(_attend_forward, _attend_backward)


def _grouped_heads(operands: Operands, constants: Constants) -> tuple[QueryHead, KeyHead]:
  """Returns all query heads, grouped by their key heads [C, G, ...], and all key heads [C, ...]."""
  N = len(constants.first_query_NxB)
  C = len(operands.keys.key)
  span_NxBxT = operands.queries.span
  longest_NxB = None
  if span_NxBxT is not None and constants.renormalize:  # otherwise all keys are in the softmax
    longest_NxB = span_NxBxT.max(axis=2) + constants.ramp
  queries = QueryHead(operands.queries, jnp.arange(N), constants.first_query_NxB)
  # As many for all query heads of a key head, so that they share the window.
  offsets_C = constants.layout.offsets(longest_NxB, N).reshape(C, -1).max(axis=1)
  keys = KeyHead(operands.keys, operands.weights, jnp.arange(C), offsets_C)
  return _split_groups(queries, C), keys


def _split_groups(tree: Any, C: int) -> Any:
  """[N, ...] -> [C, G, ...]"""
  return jax.tree.map(lambda leaf: leaf.reshape(C, -1, *leaf.shape[1:]), tree)


def _join_groups(tree: Any) -> Any:
  """[C, G, ...] -> [N, ...]"""
  return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _scan_query_heads(visit: Callable[..., tuple[Any, Any]], carry: Any, heads: Any) -> Any:
  """Returns `jax.lax.scan(visit, carry, heads)`, without a loop for a single head."""
  if len(jax.tree.leaves(heads)[0]) > 1:
    return jax.lax.scan(visit, carry, heads)
  carry, result = visit(carry, jax.tree.map(lambda leaf: leaf[0], heads))
  return carry, jax.tree.map(lambda leaf: leaf[None], result)
