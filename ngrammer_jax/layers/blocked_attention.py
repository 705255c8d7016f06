"""Attention in blocks of queries and keys, with a running softmax (Dao et al. 2022).

For each head, each block j of keys that the head sees (see `layers.block_layout`), and each block i
of queries that see these keys, the sums over the keys

  numerator_i += e_ij m_ij v_j,   mass_i += e_ij m_ij,   e_ij = exp(s_ij - max_i)

are rescaled when the maximum grows; numerator_i / mass_i is the output o_i. m is the soft mask of a
learned span (see `layers.span`), 1 without one. The scores of a whole segment never exist, nor do
the keys and values of a whole memory: they are projected block by block. The epsilon in the mass of
a span counts only the keys in its reach, as in the official code, which trims its cache.

The gradient visits the same blocks and computes the scores again. With the logarithm L_i of the
mass for max_i, the mass is 1, and the gradients of the two sums are do_i and dL_i - do_i . o_i.

B batch, T queries, M memory, N heads, H head width, K queries or keys of a block, J blocks of the
memory.
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
from ngrammer_jax.layers.whole_attention import Heads, Part, Spans

BLOCK = 64  # queries and keys of a block
MIN_SCORES = 2**17  # scores of a head from which on blocks are faster


def is_faster(T: int, M: int, has_spans: bool) -> bool:
  """Whether blocks are faster than whole scores, for T queries after a memory of M.

  Learned spans leave most of the scores out. Without, few large products are faster than many small
  ones.
  """
  return has_spans and T >= BLOCK and T * (M + T) >= MIN_SCORES


@struct.dataclass
class Source:
  """Where the keys and values of a memory come from.

  Attributes:
    read: returns the keys and values [B, K, H] of a head for a block of tokens. Arguments: the
      weights of the head, a block of `rows`, `cache`, and the number of the head.
    weights: arrays with heads first, which gradients flow to.
    rows: arrays [B, M, ...]. If an array has R rows more at its beginning, its blocks have too.
    cache: arrays [B, N, M, H].
  """

  read: Callable[..., tuple[jax.Array, jax.Array]] | None = struct.field(
    pytree_node=False, default=None
  )
  weights: Any = None
  rows: Any = None
  cache: Any = None


def cache_source(cached: KeyValues, order_BxM: jax.Array) -> Source:
  """Keys and values in cache slots, read in the order of their tokens."""
  return Source(_read_cache, rows=order_BxM, cache=(cached.keys, cached.values))


def _read_cache(weights, order_BxK, cache, head):
  del weights
  rows_Bx1 = jnp.arange(len(order_BxK))[:, None]
  return tuple(array_BxNxMxH[rows_Bx1, head, order_BxK] for array_BxNxMxH in cache)


class Operands(NamedTuple):
  """What gradients flow to: of one head, or of all heads with an axis N first.

  Attributes:
    queries: query_BxTxH, scaled, with the content bias; query_BxTxH of the distances, or None; the
      learned span_BxT in tokens, or None.
    keys: key_BxTxH and value_BxTxH of the segment.
    distances: encoding_1xSxH and bias_1xS of the distances S - 1 down to 0, or None.
    weights: of `Source`.
  """

  queries: tuple[jax.Array, jax.Array | None, jax.Array | None]
  keys: tuple[jax.Array, jax.Array]
  distances: tuple[jax.Array | None, jax.Array | None]
  weights: Any


@struct.dataclass
class Blocks:
  """What no gradient flows to.

  Attributes:
    layout: which blocks are visited.
    source: of the keys and values of the memory.
    line_NxB: numbers of the first queries among all queries of the batch, for dropout.
    drop: dropout of the weights.
    ramp: length over which a span fades out.
    renormalize: weights under the mask of a span add up to 1 again.
    return_pairs: also find the earlier key that each query attends to most.
  """

  layout: Layout
  source: Source
  line_NxB: jax.Array
  drop: dropout.Dropout
  ramp: int = struct.field(pytree_node=False)
  renormalize: bool = struct.field(pytree_node=False)
  return_pairs: bool = struct.field(pytree_node=False)


def attend(
  heads: Heads,
  spans: Spans | None,
  context: Context,
  source: Source,
  return_pairs: bool,
  drop: dropout.Dropout,
) -> Part:
  """Attends to the keys that each query sees; the same as `whole_attention.attend`.

  Args:
    heads: of the segment, without a memory.
    spans: learned spans. None: none are learned.
    context: of the segment.
    source: the memory.
    return_pairs: find pairs too.
    drop: dropout of the weights.

  Raises:
    ValueError: the key of the dropout is not of threefry.
  """
  if drop.is_active:
    dropout.check_key(drop.key)
  (B, T, N), layout = heads.query_BxTxNxH.shape[:3], block_layout.make(context, BLOCK)
  line_NxB = (jnp.arange(B) * N + jnp.arange(N)[:, None]) * T
  source = source.replace(rows=jax.tree.map(layout.pad_memory, source.rows))
  operands = _operands(heads, spans, source, layout)
  ramp, renormalize = (1, True) if spans is None else (spans.ramp, spans.renormalize)
  source = source.replace(weights=None)
  blocks = Blocks(layout, source, line_NxB, drop, ramp, renormalize, return_pairs)
  values, log_mass, pair = jax.tree.map(
    lambda array_NxBxTx: array_NxBxTx[:, :, :T], _on_each_device(operands, blocks)
  )
  pair_BxNxT = None if pair is None else _pairs(pair.swapaxes(0, 1), context)
  return Part(jnp.moveaxis(values, 0, 2), log_mass.swapaxes(0, 1), None, pair_BxNxT)


def _operands(heads, spans, source, layout):
  """The operands of all heads, in whole blocks."""
  B, T, N = heads.query_BxTxNxH.shape[:3]
  by_head = lambda array_BxTxNx: layout.pad_segment(jnp.moveaxis(array_BxTxNx, 2, 0), axis=2)
  distance_query = span_NxBxT = encoding = bias = None
  if heads.distance is not None:
    query_BxTxNxH, encoding_SxNxH, bias_SxN = heads.distance
    distance_query = by_head(query_BxTxNxH)
    encoding = jnp.broadcast_to(encoding_SxNxH, (len(encoding_SxNxH), N, query_BxTxNxH.shape[3]))
    encoding = layout.pad_distances(encoding.swapaxes(0, 1))[:, None]
    bias = None if bias_SxN is None else layout.pad_distances(bias_SxN.T)[:, None]
  if spans is not None:
    span_NxBxT = by_head(jnp.broadcast_to(spans.z_BxTxN, (B, T, N)))
  queries = by_head(heads.query_BxTxNxH), distance_query, span_NxBxT
  keys = by_head(heads.key_BxSxNxH), by_head(heads.value_BxSxNxH)
  return Operands(queries, keys, (encoding, bias), source.weights)


def _on_each_device(operands, blocks):
  """Attends on each device for its own rows and heads."""
  N, B = blocks.line_NxB.shape
  rows, heads = placement.axes('batch', B), placement.axes('heads', N)
  if not rows and not heads:
    return _attend(operands, blocks)
  by_head, by_row, both = jax.P(heads), jax.P(rows), jax.P(heads, rows)
  source = blocks.source.replace(rows=by_row, cache=jax.P(rows, heads))
  specs = (
    Operands(both, both, by_head, by_head),
    blocks.replace(layout=by_row, source=source, line_NxB=both, drop=jax.P()),
  )
  out_specs = both, both, both if blocks.return_pairs else None
  run = jax.shard_map(_attend, in_specs=specs, out_specs=out_specs, check_vma=False)
  return run(operands, blocks)


def _pairs(pair_BxNxT, context):
  """Pairs as numbers of keys in the order of the context."""
  if context.order_BxM is None:
    return pair_BxNxT
  M = context.order_BxM.shape[1]
  index_BxNxT = jnp.minimum(pair_BxNxT, M - 1)
  slot_BxNxT = jnp.take_along_axis(context.order_BxM[:, None], index_BxNxT, axis=2)
  return jnp.where(pair_BxNxT < M, slot_BxNxT, pair_BxNxT)


@jax.custom_vjp
def _attend(operands, blocks):
  """Values [N, B, T, H], 0 if a query sees nothing, log masses [N, B, T], pairs [N, B, T] or None.

  The pair of a query that sees no earlier key is S.
  """
  return jax.lax.map(lambda head: _Head(blocks, *head).attend(), _by_head(operands, blocks))


def _attend_forward(operands, blocks):
  result = _attend(operands, blocks)
  return result, (operands, blocks, result[:2])


def _attend_backward(residuals, cotangents):
  operands, blocks, result = residuals
  gradient = lambda head: _Head(blocks, *head[0]).gradient(*head[1])
  heads = _by_head(operands, blocks), (*result, *cotangents[:2])
  return jax.lax.map(gradient, heads), None


_attend.defvjp(_attend_forward, _attend_backward)


def _by_head(operands, blocks):
  """What each head begins with, see `_Head`."""
  layout, (N, _), span_NxBxT = blocks.layout, blocks.line_NxB.shape, operands.queries[2]
  longest_NxB = None
  if span_NxBxT is not None and blocks.renormalize:  # else all keys are in the softmax
    longest_NxB = span_NxBxT.max(axis=2) + blocks.ramp
  max_distance_NxB = layout.max_distance(longest_NxB, N)
  bounds = layout.first_block(max_distance_NxB), max_distance_NxB.max(axis=1)
  return operands, jnp.arange(N), blocks.line_NxB, *bounds


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
    blocks: of all heads.
    operands: of the head.
    number: of the head among those of the device.
    line_B: numbers of its first queries, see `Blocks`.
    first: the first block of keys that it sees.
    max_distance: how far it sees.
  """

  def __init__(self, blocks, operands, number, line_B, first, max_distance):
    self.blocks, self.layout, self.K = blocks, blocks.layout, blocks.layout.block_size
    self.operands, self.number, self.line_B = operands, number, line_B
    self.first, self.max_distance = first, max_distance
    self.dtype = operands.keys[1].dtype
    self.wide = jnp.promote_types(self.dtype, jnp.float32)  # of scores and sums

  def attend(self):
    """The attended values [B, T, H], the logarithms of the masses [B, T], and pairs [B, T]."""
    B, T, H = self.operands.keys[1].shape
    full = lambda value, *shape: jnp.full((B, T, *shape), value, self.wide)
    pairs = None, None
    if self.blocks.return_pairs:
      S = self.layout.memory_length + self.layout.segment_length
      pairs = full(-jnp.inf), jnp.full((B, T), S, jnp.int32)
    # The maximum is finite, so that a difference of two of them is a number.
    running = _Running(full(0, H), full(0), full(jnp.finfo(self.wide).min / 2), *pairs)

    def visit(j, keys, running):
      add = functools.partial(self._add, j, keys)
      return jax.lax.fori_loop(*self.layout.query_blocks(j, self.max_distance), add, running)

    visit_memory = lambda j, r: visit(j, self._memory_keys(j, self.operands.weights), r)
    visit_segment = lambda j, r: visit(j, self._segment_keys(j), r)
    if self.layout.memory_blocks:
      running = jax.lax.fori_loop(self.first, 0, visit_memory, running)
    running = jax.lax.fori_loop(0, self.layout.segment_blocks, visit_segment, running)
    mass_BxT = jnp.where(running.mass_BxT > 0, running.mass_BxT, 1)
    values_BxTxH = running.numerator_BxTxH / mass_BxT[..., None]
    return values_BxTxH, running.max_BxT + jnp.log(mass_BxT), running.pair_BxT

  def gradient(self, values_BxTxH, log_mass_BxT, d_values_BxTxH, d_log_mass_BxT):
    """The gradient of the operands."""
    d_mass_BxT = d_log_mass_BxT - (values_BxTxH * d_values_BxTxH).sum(axis=-1)
    saved = log_mass_BxT, d_mass_BxT, d_values_BxTxH
    zeros = lambda tree: jax.tree.map(
      lambda array: jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32)), tree
    )

    def visit(j, keys, total):
      """Adds the gradients of the blocks of queries; also returns the gradient of the keys."""

      def add(i, carry):
        (total, d_keys), (d_cut, d_more_keys) = carry, self._block_gradient(i, j, keys, saved)
        return self._add_cut(total, d_cut, i, j), jax.tree.map(jnp.add, d_keys, d_more_keys)

      bounds = self.layout.query_blocks(j, self.max_distance)
      return jax.lax.fori_loop(*bounds, add, (total, zeros(keys)))

    def visit_memory(j, total):
      keys, pull = jax.vjp(functools.partial(self._memory_keys, j), self.operands.weights)
      total, d_keys = visit(j, keys, total)
      (d_weights,) = pull(_with_dtypes(d_keys, keys))
      return total._replace(weights=jax.tree.map(jnp.add, total.weights, d_weights))

    def visit_segment(j, total):
      total, d_keys = visit(j, self._segment_keys(j), total)
      return total._replace(keys=_add_slice(total.keys, d_keys, j * self.K))

    total = zeros(self.operands)
    if self.layout.memory_blocks:
      total = jax.lax.fori_loop(self.first, 0, visit_memory, total)
    total = jax.lax.fori_loop(0, self.layout.segment_blocks, visit_segment, total)
    return _with_dtypes(total, self.operands)

  def _memory_keys(self, j, weights):
    """Keys and values [B, K, H] of a block of the memory."""
    first, M = (j + self.layout.memory_blocks) * self.K, self.layout.memory_blocks * self.K
    cut = lambda array: _slice(array, first, self.K + array.shape[1] - M)
    source = self.blocks.source
    return source.read(weights, jax.tree.map(cut, source.rows), source.cache, self.number)

  def _segment_keys(self, j):
    """Keys and values [B, K, H] of a block of the segment."""
    return _slice(self.operands.keys, j * self.K, self.K)

  def _cut(self, i, j):
    """The queries of block i, and the distances from them to the keys of block j."""
    distances = _slice(self.operands.distances, self.layout.first_distance(i, j), 2 * self.K - 1)
    return _slice(self.operands.queries, i * self.K, self.K), distances

  def _add_cut(self, total, d_cut, i, j):
    """Adds the gradient of what `_cut` returns."""
    queries, distances = d_cut
    return total._replace(
      queries=_add_slice(total.queries, queries, i * self.K),
      distances=_add_slice(total.distances, distances, self.layout.first_distance(i, j)),
    )

  def _scores(self, i, j, cut, key_BxKxH):
    """Scores [B, K, K], minus infinity if masked, and how far keys are inside of the spans.

    See `span.inside`; None without learned spans.
    """
    (query_BxKxH, distance_query_BxKxH, span_BxK), (encoding_1xDxH, bias_1xD) = cut
    visible_BxKxK = self.layout.visible(i, j)
    scores_BxKxK = self._product('bqh,bkh->bqk', query_BxKxH, key_BxKxH)
    if distance_query_BxKxH is not None:
      scores_BxKxD = self._product('bqh,dh->bqd', distance_query_BxKxH, encoding_1xDxH[0])
      scores_BxKxD += 0 if bias_1xD is None else bias_1xD
      scores_BxKxK += relative.shift(scores_BxKxD[:, None])[:, 0, :, : self.K]
    inside_BxKxK = None
    if span_BxK is not None:
      distance_KxK = self.layout.nearest_distance(i, j)
      inside_BxKxK = span.inside(span_BxK[..., None], distance_KxK, self.blocks.ramp)
      if self.blocks.renormalize:
        visible_BxKxK &= inside_BxKxK >= 0
    return jnp.where(visible_BxKxK, scores_BxKxK, -jnp.inf), inside_BxKxK

  def _weights(self, scores_BxKxK, inside_BxKxK, max_BxK):
    """Weights of the values, and what they add to the mass of the queries."""
    exp_BxKxK = jnp.exp(scores_BxKxK - max_BxK[..., None])
    weights_BxKxK, counted_BxKxK = span.masked_weights(
      exp_BxKxK, inside_BxKxK, self.blocks.renormalize
    )
    return weights_BxKxK, counted_BxKxK.sum(axis=-1)

  def _add(self, j, keys, i, running):
    """The running softmax of the queries of block i, with the keys of block j too."""
    key_BxKxH, value_BxKxH = keys
    scores_BxKxK, inside_BxKxK = self._scores(i, j, self._cut(i, j), key_BxKxH)
    before = _slice(running, i * self.K, self.K)
    max_BxK = jnp.maximum(before.max_BxT, scores_BxKxK.max(axis=-1))
    weights_BxKxK, mass_BxK = self._weights(scores_BxKxK, inside_BxKxK, max_BxK)
    dropped_BxKxK = (weights_BxKxK * self._dropout_mask(i, j)).astype(self.dtype)
    numerator_BxKxH = self._product('bqk,bkh->bqh', dropped_BxKxK, value_BxKxH)
    rescale_BxK = jnp.exp(before.max_BxT - max_BxK)
    after = before._replace(
      numerator_BxTxH=before.numerator_BxTxH * rescale_BxK[..., None] + numerator_BxKxH,
      mass_BxT=before.mass_BxT * rescale_BxK + mass_BxK,
      max_BxT=max_BxK,
    )
    if self.blocks.return_pairs:
      after = self._with_pairs(after, i, j, scores_BxKxK, inside_BxKxK)
    put = lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, i * self.K, 1)
    return jax.tree.map(put, running, after)

  def _with_pairs(self, running, i, j, scores_BxKxK, inside_BxKxK):
    """The running softmax of block i, with the keys of block j as pairs where they are better."""
    if inside_BxKxK is not None:
      scores_BxKxK += jnp.log(span.unit_clip(inside_BxKxK))
    scores_BxKxK = jnp.where(self.layout.distance(i, j) > 0, scores_BxKxK, -jnp.inf)
    score_BxK = scores_BxKxK.max(axis=-1)
    pair_BxK = scores_BxKxK.argmax(axis=-1) + j * self.K + self.layout.memory_length
    is_better_BxK = score_BxK > running.pair_score_BxT
    return running._replace(
      pair_score_BxT=jnp.where(is_better_BxK, score_BxK, running.pair_score_BxT),
      pair_BxT=jnp.where(is_better_BxK, pair_BxK.astype(jnp.int32), running.pair_BxT),
    )

  def _block_gradient(self, i, j, keys, saved):
    """The gradients of what `_cut` returns, and of the keys and values of block j."""
    key_BxKxH, value_BxKxH = keys
    log_mass_BxK, d_mass_BxK, d_values_BxKxH = _slice(saved, i * self.K, self.K)
    weigh = lambda *inputs: self._weights(*self._scores(i, j, *inputs), log_mass_BxK)
    (weights_BxKxK, _), pull = jax.vjp(weigh, self._cut(i, j), key_BxKxH)
    mask_BxKxK = self._dropout_mask(i, j)
    d_weights_BxKxK = mask_BxKxK * self._product('bqh,bkh->bqk', d_values_BxKxH, value_BxKxH)
    d_cut, d_key_BxKxH = pull((d_weights_BxKxK, d_mass_BxK))
    dropped_BxKxK = weights_BxKxK * mask_BxKxK
    return d_cut, (d_key_BxKxH, self._product('bqk,bqh->bkh', dropped_BxKxK, d_values_BxKxH))

  def _dropout_mask(self, i, j):
    """What the weights are multiplied with, [B, K, K]; 1 without dropout."""
    if not self.blocks.drop.is_active:
      return 1.0
    M, index_K = self.layout.memory_length, jnp.arange(self.K)
    line_BxK = self.line_B[:, None] + i * self.K + index_K
    column_K, columns = M + j * self.K + index_K, M + self.layout.segment_length
    drop = self.blocks.drop
    return dropout.block_mask(drop.key, drop.rate, line_BxK, column_K, columns)

  def _product(self, indices, a, b):
    return jnp.einsum(indices, a, b, preferred_element_type=self.wide)


def _slice(tree, first, count):
  """Cuts the arrays [B, T, ...] of a tree."""
  return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, count, 1), tree)


def _add_slice(tree, parts, first):
  """Adds parts to the arrays [B, T, ...] of a tree, where `_slice` cut them."""

  def add(array, part):
    rows = _slice(array, first, part.shape[1]) + part.astype(array.dtype)
    return jax.lax.dynamic_update_slice_in_dim(array, rows, first, 1)

  return jax.tree.map(add, tree, parts)


def _with_dtypes(tree, like):
  return jax.tree.map(lambda array, other: array.astype(other.dtype), tree, like)
