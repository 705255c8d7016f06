"""Attention in blocks of queries and keys, with a running softmax (Dao et al. 2022).

Each head loops over the blocks j of keys that it sees (see `layers.block_layout`) and over the
blocks i of queries that see these keys. The sums over the keys

  numerator_i += e_ij m_ij v_j,   mass_i += e_ij m_ij,   e_ij = exp(s_ij - max_i)

are rescaled when the maximum grows; numerator_i / mass_i is the output o_i. m is the soft mask of a
learned span (see `layers.span`), 1 without one. The full score matrix of a segment never
exists. Nor do all keys and values of a memory: they are projected block by block. The epsilon in
the mass of a span counts only the keys within the span and its ramp, as in the official code, which
trims its cache.

The gradient visits the same blocks and recomputes the scores. With the log mass L_i in place of
max_i the mass is 1, and the gradients of the two sums are do_i and dL_i - do_i . o_i.

B batch, T queries, M memory, N heads, H head width, K queries or keys of a block, R = 2 K - 1
distances between them, J blocks of the memory.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import block_layout, dropout, placement, relative, span
from ngrammer_jax.layers.block_layout import Layout
from ngrammer_jax.layers.cache import KeyValues
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.full_attention import Heads, PartialAttention, SpanMask, cap_logits

BLOCK = 64  # number of queries and keys of a block
MIN_SCORES = 2**14  # of a head; with fewer, full scores are faster on a CPU


def is_faster(T: int, M: int, has_spans: bool) -> bool:
  """Whether blocks are faster than full scores, for T queries after a memory of M.

  With learned spans, blocks skip most of the scores. Without them, few large products are faster
  than many small ones.
  """
  return has_spans and T >= BLOCK and T * (M + T) >= MIN_SCORES


@struct.dataclass
class MemorySource:
  """The source of the keys and values of a memory.

  Attributes:
    read: returns the keys and values [B, K, H] of a head for a block of tokens. Arguments: the
      weights of the head, a block of `rows`, `cache`, and the index of the head.
    weights: arrays [N, ...] with a gradient.
    rows: arrays [B, M, ...]. An array may begin with R more rows; then its blocks do too.
    cache: arrays [B, N, M, H].
  """

  read: Callable[..., tuple[jax.Array, jax.Array]] | None = struct.field(
    pytree_node=False, default=None
  )
  weights: Any = None
  rows: Any = None
  cache: Any = None


def cache_source(cached: KeyValues, order_BxM: jax.Array) -> MemorySource:
  """Returns a source that reads cache slots in the order of their tokens."""
  return MemorySource(_read_cache, rows=order_BxM, cache=(cached.keys, cached.values))


def _read_cache(weights, order_BxK, cache, head):
  del weights
  rows_Bx1 = jnp.arange(len(order_BxK))[:, None]
  return tuple(array_BxNxMxH[rows_Bx1, head, order_BxK] for array_BxNxMxH in cache)


class Operands(NamedTuple):
  """The inputs with a gradient, of one head, or of all heads with a leading axis N.

  Attributes:
    queries: query_BxTxH, scaled, with the content bias; distance_query_BxTxH, or None; the learned
      span_BxT in tokens, or None.
    keys: key_BxTxH and value_BxTxH of the segment.
    distances: encoding_1xSxH and bias_1xS of the distances S - 1 down to 0, or None.
    weights: weights of `MemorySource`.
  """

  queries: tuple[jax.Array, jax.Array | None, jax.Array | None]
  keys: tuple[jax.Array, jax.Array]
  distances: tuple[jax.Array | None, jax.Array | None]
  weights: Any


@struct.dataclass
class Constants:
  """The inputs without a gradient.

  Attributes:
    layout: layout of the blocks.
    source: source of the memory, without weights.
    first_query_NxB: index of the first query of each row and head among all queries, for dropout.
    drop: dropout of the weights.
    ramp: length over which the mask of a span falls to 0.
    renormalize: whether masked weights are scaled to add up to 1.
    return_pairs: whether to return the earlier key that each query attends to most.
    logit_cap: cap of the scores. None: not capped.
  """

  layout: Layout
  source: MemorySource
  first_query_NxB: jax.Array
  drop: dropout.Dropout
  ramp: int = struct.field(pytree_node=False)
  renormalize: bool = struct.field(pytree_node=False)
  return_pairs: bool = struct.field(pytree_node=False)
  logit_cap: float | None = struct.field(pytree_node=False)


def attend(
  heads: Heads,
  span_mask: SpanMask | None,
  context: Context,
  source: MemorySource,
  return_pairs: bool,
  drop: dropout.Dropout,
) -> PartialAttention:
  """Attends to the keys that each query sees, as `full_attention.attend` does but for epsilon.

  Args:
    heads: queries, keys and values of the segment, without a memory.
    span_mask: mask of the learned spans. None: no spans.
    context: context of the segment.
    source: source of the memory.
    return_pairs: whether to compute pairs.
    drop: dropout of the weights.

  Raises:
    ValueError: the dropout key is not a threefry key.
  """
  if drop.is_active:
    dropout.check_key(drop.key)
  (B, T, N), layout = heads.query_BxTxNxH.shape[:3], block_layout.make(context, BLOCK)
  first_query_NxB = (jnp.arange(B) * N + jnp.arange(N)[:, None]) * T
  source = source.replace(rows=jax.tree.map(layout.pad_memory, source.rows))
  operands = _operands(heads, span_mask, source, layout)
  ramp, renormalize = (1, True) if span_mask is None else (span_mask.ramp, span_mask.renormalize)
  source = source.replace(weights=None)
  options = ramp, renormalize, return_pairs, heads.logit_cap
  constants = Constants(layout, source, first_query_NxB, drop, *options)
  values, log_mass, pair = jax.tree.map(
    lambda array_NxBxTx: array_NxBxTx[:, :, :T], _attend_sharded(operands, constants)
  )
  pair_BxNxT = None if pair is None else _slot_pairs(pair.swapaxes(0, 1), context)
  return PartialAttention(jnp.moveaxis(values, 0, 2), log_mass.swapaxes(0, 1), None, pair_BxNxT)


def _operands(heads, span_mask, source, layout):
  """Returns the operands of all heads, padded to full blocks."""
  B, T, N = heads.query_BxTxNxH.shape[:3]
  by_head = lambda array_BxTxNx: layout.pad_segment(jnp.moveaxis(array_BxTxNx, 2, 0), axis=2)
  distance_query = span_NxBxT = encoding = bias = None
  if heads.distance is not None:
    query_BxTxNxH, encoding_SxNxH, bias_SxN = heads.distance
    distance_query = by_head(query_BxTxNxH)
    encoding = jnp.broadcast_to(encoding_SxNxH, (len(encoding_SxNxH), N, query_BxTxNxH.shape[3]))
    encoding = layout.pad_distances(encoding.swapaxes(0, 1))[:, None]
    bias = None if bias_SxN is None else layout.pad_distances(bias_SxN.T)[:, None]
  if span_mask is not None:
    span_NxBxT = by_head(jnp.broadcast_to(span_mask.z_BxTxN, (B, T, N)))
  queries = by_head(heads.query_BxTxNxH), distance_query, span_NxBxT
  keys = by_head(heads.key_BxSxNxH), by_head(heads.value_BxSxNxH)
  return Operands(queries, keys, (encoding, bias), source.weights)


def _attend_sharded(operands, constants):
  """Each device attends for its own rows and heads."""
  N, B = constants.first_query_NxB.shape
  rows, heads = placement.axes('batch', B), placement.axes('heads', N)
  if not rows and not heads:
    return _attend(operands, constants)
  by_head, by_row, by_both = jax.P(heads), jax.P(rows), jax.P(heads, rows)
  source = constants.source.replace(rows=by_row, cache=jax.P(rows, heads))
  specs = (
    Operands(by_both, by_both, by_head, by_head),
    constants.replace(layout=by_row, source=source, first_query_NxB=by_both, drop=jax.P()),
  )
  out_specs = by_both, by_both, by_both if constants.return_pairs else None
  run = jax.shard_map(_attend, in_specs=specs, out_specs=out_specs, check_vma=False)
  return run(operands, constants)


def _slot_pairs(pair_BxNxT, context):
  """Maps pairs from the order of tokens to that of the cache slots."""
  if context.order_BxM is None:
    return pair_BxNxT
  M = context.order_BxM.shape[1]
  index_BxNxT = jnp.minimum(pair_BxNxT, M - 1)
  slot_BxNxT = jnp.take_along_axis(context.order_BxM[:, None], index_BxNxT, axis=2)
  return jnp.where(pair_BxNxT < M, slot_BxNxT, pair_BxNxT)


@jax.custom_vjp
def _attend(operands, constants):
  """Returns values [N, B, T, H], log masses [N, B, T], and pairs [N, B, T] or None.

  The values of a query that sees no key are 0; the pair of one that sees no earlier key is S.
  """
  return jax.lax.map(
    lambda head: _Head(constants, *head).attend(), _head_arguments(operands, constants)
  )


def _attend_forward(operands, constants):
  result = _attend(operands, constants)
  return result, (operands, constants, result[:2])


def _attend_backward(residuals, cotangents):
  operands, constants, result = residuals
  gradient = lambda head: _Head(constants, *head[0]).gradient(*head[1])
  heads = _head_arguments(operands, constants), (*result, *cotangents[:2])
  return jax.lax.map(gradient, heads), None


_attend.defvjp(_attend_forward, _attend_backward)


def _head_arguments(operands, constants):
  """Returns the arguments of `_Head` for all heads."""
  layout, N = constants.layout, len(constants.first_query_NxB)
  span_NxBxT, longest_NxB = operands.queries[2], None
  if span_NxBxT is not None and constants.renormalize:  # otherwise all keys are in the softmax
    longest_NxB = span_NxBxT.max(axis=2) + constants.ramp
  max_distance_NxB = layout.max_distance(longest_NxB, N)
  bounds = layout.first_block(max_distance_NxB), max_distance_NxB.max(axis=1)
  return operands, jnp.arange(N), constants.first_query_NxB, *bounds


class _Running(NamedTuple):
  """The running softmax of the queries, and the best earlier key of each so far."""

  numerator_BxTxH: jax.Array
  mass_BxT: jax.Array
  max_BxT: jax.Array
  pair_score_BxT: jax.Array | None
  pair_BxT: jax.Array | None


class _Head:
  """The loops of one head over its blocks.

  Args:
    constants: inputs without a gradient, of all heads.
    operands: inputs with a gradient, of this head.
    index: index of the head among those of the device.
    first_query_B: index of its first query in each row, see `Constants`.
    first_block: the first block of keys that it sees.
    max_distance: maximum distance to a key that it sees.
  """

  def __init__(self, constants, operands, index, first_query_B, first_block, max_distance):
    self.constants, self.layout = constants, constants.layout
    self.K = constants.layout.block_size
    self.operands, self.index, self.first_query_B = operands, index, first_query_B
    self.first_block, self.max_distance = first_block, max_distance
    self.dtype = operands.keys[1].dtype
    self.wide = jnp.promote_types(self.dtype, jnp.float32)  # dtype of scores and sums

  def attend(self):
    """Returns the attended values [B, T, H], log masses [B, T], and pairs [B, T]."""
    B, T, H = self.operands.keys[1].shape
    full = lambda value, *shape: jnp.full((B, T, *shape), value, self.wide)
    pairs = None, None
    if self.constants.return_pairs:
      S = self.layout.memory_length + self.layout.segment_length
      pairs = full(-jnp.inf), jnp.full((B, T), S, jnp.int32)
    # The initial maximum is finite, so that the difference of two maxima is not NaN.
    running = _Running(full(0, H), full(0), full(jnp.finfo(self.wide).min / 2), *pairs)

    def visit(j, keys, running):
      add = functools.partial(self._add, j, keys)
      return jax.lax.fori_loop(*self.layout.query_blocks(j, self.max_distance), add, running)

    visit_memory = lambda j, r: visit(j, self._memory_keys(j, self.operands.weights), r)
    visit_segment = lambda j, r: visit(j, self._segment_keys(j), r)
    if self.layout.memory_blocks:
      running = jax.lax.fori_loop(self.first_block, 0, visit_memory, running)
    running = jax.lax.fori_loop(0, self.layout.segment_blocks, visit_segment, running)
    mass_BxT = jnp.where(running.mass_BxT > 0, running.mass_BxT, 1)
    values_BxTxH = running.numerator_BxTxH / mass_BxT[..., None]
    return values_BxTxH, running.max_BxT + jnp.log(mass_BxT), running.pair_BxT

  def gradient(self, values_BxTxH, log_mass_BxT, d_values_BxTxH, d_log_mass_BxT):
    """Returns the gradient of the operands."""
    d_mass_BxT = d_log_mass_BxT - (values_BxTxH * d_values_BxTxH).sum(axis=-1)
    saved = log_mass_BxT, d_mass_BxT, d_values_BxTxH
    zeros = lambda tree: jax.tree.map(
      lambda array: jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32)), tree
    )

    def visit(j, keys, total):
      """Adds the gradients of the blocks of queries; also returns the gradient of the keys."""

      def add(i, carry):
        total, d_keys = carry
        d_inputs, d_block_keys = self._block_gradient(i, j, keys, saved)
        total = self._add_input_gradient(total, d_inputs, i, j)
        return total, jax.tree.map(jnp.add, d_keys, d_block_keys)

      bounds = self.layout.query_blocks(j, self.max_distance)
      return jax.lax.fori_loop(*bounds, add, (total, zeros(keys)))

    def visit_memory(j, total):
      keys, pullback = jax.vjp(functools.partial(self._memory_keys, j), self.operands.weights)
      total, d_keys = visit(j, keys, total)
      (d_weights,) = pullback(_with_dtypes(d_keys, keys))
      return total._replace(weights=jax.tree.map(jnp.add, total.weights, d_weights))

    def visit_segment(j, total):
      total, d_keys = visit(j, self._segment_keys(j), total)
      return total._replace(keys=_add_slice(total.keys, d_keys, j * self.K))

    total = zeros(self.operands)
    if self.layout.memory_blocks:
      total = jax.lax.fori_loop(self.first_block, 0, visit_memory, total)
    total = jax.lax.fori_loop(0, self.layout.segment_blocks, visit_segment, total)
    return _with_dtypes(total, self.operands)

  def _memory_keys(self, j, weights):
    """Returns keys and values [B, K, H] of a block of the memory."""
    first, M = (j + self.layout.memory_blocks) * self.K, self.layout.memory_blocks * self.K
    slice_block = lambda array: _slice(array, first, self.K + array.shape[1] - M)
    source = self.constants.source
    return source.read(weights, jax.tree.map(slice_block, source.rows), source.cache, self.index)

  def _segment_keys(self, j):
    """Returns keys and values [B, K, H] of a block of the segment."""
    return _slice(self.operands.keys, j * self.K, self.K)

  def _block_inputs(self, i, j):
    """Returns the queries of block i, and the distances from them to the keys of block j."""
    distances = _slice(self.operands.distances, self.layout.first_distance(i, j), 2 * self.K - 1)
    return _slice(self.operands.queries, i * self.K, self.K), distances

  def _add_input_gradient(self, total, d_inputs, i, j):
    """Adds the gradient of `_block_inputs` to that of the operands."""
    queries, distances = d_inputs
    return total._replace(
      queries=_add_slice(total.queries, queries, i * self.K),
      distances=_add_slice(total.distances, distances, self.layout.first_distance(i, j)),
    )

  def _scores(self, i, j, inputs, key_BxKxH):
    """Returns scores [B, K, K], minus infinity if masked, and the unclipped mask of the spans.

    The mask (see `span.unclipped_mask`) is None without learned spans.
    """
    (query_BxKxH, distance_query_BxKxH, span_BxK), (encoding_1xRxH, bias_1xR) = inputs
    visible_BxKxK = self.layout.visible(i, j)
    scores_BxKxK = self._product('bqh,bkh->bqk', query_BxKxH, key_BxKxH)
    if distance_query_BxKxH is not None:
      scores_BxKxR = self._product('bqh,rh->bqr', distance_query_BxKxH, encoding_1xRxH[0])
      scores_BxKxR += 0 if bias_1xR is None else bias_1xR
      scores_BxKxK += relative.shift(scores_BxKxR[:, None])[:, 0, :, : self.K]
    scores_BxKxK = cap_logits(scores_BxKxK, self.constants.logit_cap)
    unclipped_BxKxK = None
    if span_BxK is not None:
      distance_KxK = self.layout.nearest_distance(i, j)
      unclipped_BxKxK = span.unclipped_mask(span_BxK[..., None], distance_KxK, self.constants.ramp)
      if self.constants.renormalize:
        visible_BxKxK &= unclipped_BxKxK >= 0
    return jnp.where(visible_BxKxK, scores_BxKxK, -jnp.inf), unclipped_BxKxK

  def _weights(self, scores_BxKxK, unclipped_BxKxK, max_BxK):
    """Returns the weights of the values, and the mass that they add to the queries."""
    exp_BxKxK = jnp.exp(scores_BxKxK - max_BxK[..., None])
    weights_BxKxK, mass_BxKxK = span.masked_weights(
      exp_BxKxK, unclipped_BxKxK, self.constants.renormalize
    )
    return weights_BxKxK, mass_BxKxK.sum(axis=-1)

  def _add(self, j, keys, i, running):
    """Adds the keys of block j to the running softmax of the queries of block i."""
    key_BxKxH, value_BxKxH = keys
    scores_BxKxK, unclipped_BxKxK = self._scores(i, j, self._block_inputs(i, j), key_BxKxH)
    before = _slice(running, i * self.K, self.K)
    max_BxK = jnp.maximum(before.max_BxT, scores_BxKxK.max(axis=-1))
    weights_BxKxK, mass_BxK = self._weights(scores_BxKxK, unclipped_BxKxK, max_BxK)
    dropped_BxKxK = (weights_BxKxK * self._dropout_mask(i, j)).astype(self.dtype)
    numerator_BxKxH = self._product('bqk,bkh->bqh', dropped_BxKxK, value_BxKxH)
    rescale_BxK = jnp.exp(before.max_BxT - max_BxK)
    after = before._replace(
      numerator_BxTxH=before.numerator_BxTxH * rescale_BxK[..., None] + numerator_BxKxH,
      mass_BxT=before.mass_BxT * rescale_BxK + mass_BxK,
      max_BxT=max_BxK,
    )
    if self.constants.return_pairs:
      after = self._update_pairs(after, i, j, scores_BxKxK, unclipped_BxKxK)
    put = lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, i * self.K, 1)
    return jax.tree.map(put, running, after)

  def _update_pairs(self, running, i, j, scores_BxKxK, unclipped_BxKxK):
    """Replaces the pairs of block i by keys of block j with higher scores."""
    if unclipped_BxKxK is not None:
      scores_BxKxK += jnp.log(span.unit_clip(unclipped_BxKxK))
    scores_BxKxK = jnp.where(self.layout.distance(i, j) > 0, scores_BxKxK, -jnp.inf)
    score_BxK = scores_BxKxK.max(axis=-1)
    pair_BxK = scores_BxKxK.argmax(axis=-1) + j * self.K + self.layout.memory_length
    is_better_BxK = score_BxK > running.pair_score_BxT
    return running._replace(
      pair_score_BxT=jnp.where(is_better_BxK, score_BxK, running.pair_score_BxT),
      pair_BxT=jnp.where(is_better_BxK, pair_BxK.astype(jnp.int32), running.pair_BxT),
    )

  def _block_gradient(self, i, j, keys, saved):
    """Returns the gradients of `_block_inputs`, and of the keys and values of block j."""
    key_BxKxH, value_BxKxH = keys
    log_mass_BxK, d_mass_BxK, d_values_BxKxH = _slice(saved, i * self.K, self.K)
    weigh = lambda *inputs: self._weights(*self._scores(i, j, *inputs), log_mass_BxK)
    (weights_BxKxK, _), pullback = jax.vjp(weigh, self._block_inputs(i, j), key_BxKxH)
    mask_BxKxK = self._dropout_mask(i, j)
    d_weights_BxKxK = mask_BxKxK * self._product('bqh,bkh->bqk', d_values_BxKxH, value_BxKxH)
    d_inputs, d_key_BxKxH = pullback((d_weights_BxKxK, d_mass_BxK))
    dropped_BxKxK = weights_BxKxK * mask_BxKxK
    return d_inputs, (d_key_BxKxH, self._product('bqk,bqh->bkh', dropped_BxKxK, d_values_BxKxH))

  def _dropout_mask(self, i, j):
    """Returns the factors of the weights, [B, K, K]; 1 without dropout."""
    if not self.constants.drop.is_active:
      return 1.0
    M, index_K = self.layout.memory_length, jnp.arange(self.K)
    row_BxK = self.first_query_B[:, None] + i * self.K + index_K
    column_K, columns = M + j * self.K + index_K, M + self.layout.segment_length
    drop = self.constants.drop
    return dropout.block_mask(drop.key, drop.rate, row_BxK, column_K, columns)

  def _product(self, indices, a, b):
    return jnp.einsum(indices, a, b, preferred_element_type=self.wide)


def _slice(tree, first, count):
  """Slices axis 1 of all arrays of a tree."""
  return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, count, 1), tree)


def _add_slice(tree, parts, first):
  """Adds parts to the slices of the arrays of a tree."""

  def add(array, part):
    rows = _slice(array, first, part.shape[1]) + part.astype(array.dtype)
    return jax.lax.dynamic_update_slice_in_dim(array, rows, first, 1)

  return jax.tree.map(add, tree, parts)


def _with_dtypes(tree, like):
  return jax.tree.map(lambda array, other: array.astype(other.dtype), tree, like)
