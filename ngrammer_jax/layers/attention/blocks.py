"""Attention in blocks of queries and keys, with a running softmax (Dao et al. 2022).

Each head loops over the offsets of the blocks that it sees (see `block_layout`). At offset o every
block i of queries visits block i - o of the keys. The sums over the keys

  numerator_i += e_ij m_ij v_j,   mass_i += e_ij m_ij,   e_ij = exp(s_ij - max_i)

are rescaled when the maximum grows; numerator_i / mass_i is the output o_i. m is the soft mask of a
learned span (see `layers.attention.span`), 1 without one. The full score matrix of a segment never
exists. Nor do all keys and values of a memory: the loop holds a window of as many keys as there are
queries, which moves by one block from offset to offset, and a block of the memory is projected when
it enters the window. The epsilon in the mass of a span counts only the keys within the span and its
ramp, as in the official code, which trims its cache.

The gradient visits the offsets in the reverse order and recomputes the scores. With the log mass
L_i in place of max_i the mass is 1, and the gradients of the two sums are do_i and
dL_i - do_i . o_i.

With fewer key heads than query heads, the query heads of a key head share its keys and its window.

B batch, T queries, M memory, N query heads, C key heads, H head width, K queries or keys of a
block, A blocks of queries in all rows, R = 2 K - 1 distances between two blocks; x is A or 1.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import dropout, mesh_axes, softmax
from ngrammer_jax.layers.attention import block_layout, relative, span
from ngrammer_jax.layers.attention.block_layout import BlockLayout
from ngrammer_jax.layers.attention.cache import KeyValues
from ngrammer_jax.layers.attention.full import Heads, PartialAttention, SpanMask
from ngrammer_jax.layers.context import Keys

BLOCK = 64  # number of queries and keys of a block; 128 and 256 were slower on a CPU


@struct.dataclass
class MemorySource:
  """The source of the keys and values of a memory.

  Attributes:
    read: returns the keys and values [B, K, H] of a key head for a block of tokens. Arguments: the
      weights of the head, a block of `rows`, `cache`, and the index of the head.
    weights: arrays [C, ...] with a gradient.
    rows: arrays [B, M, ...]. An array may begin with further rows: then each block has as many
      rows before its own.
    cache: arrays [B, C, M, H].
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
  return tuple(array_BxCxMxH[rows_Bx1, head, order_BxK] for array_BxCxMxH in cache)


class Operands(NamedTuple):
  """The inputs with a gradient, padded to full blocks.

  Attributes:
    queries: query_NxBxTxH, scaled, with the content bias; distance_query_NxBxTxH, or None; the
      learned span_NxBxT in tokens, [N, 1, 1] if it is the same for all queries, or None.
    keys: key_CxBxTxH and value_CxBxTxH of the segment.
    distances: encoding_NxSxH and bias_NxS of the distances S - 1 down to 0, or None; N may be 1.
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

  layout: BlockLayout
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
  keys: Keys,
  source: MemorySource,
  return_pairs: bool,
  drop: dropout.Dropout,
) -> PartialAttention:
  """Attends to the keys that each query sees, as `full.attend` does but for epsilon.

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
  (B, T, N), layout = heads.query_BxTxNxH.shape[:3], block_layout.make(keys, BLOCK)
  first_query_NxB = (jnp.arange(B) * N + jnp.arange(N)[:, None]) * T
  source = source.replace(rows=jax.tree.map(layout.pad_memory, source.rows))
  operands = _operands(heads, span_mask, source, layout)
  ramp, renormalize = (1, True) if span_mask is None else (span_mask.ramp, span_mask.renormalize)
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


def _operands(heads, span_mask, source, layout):
  """Returns the operands of all heads, padded to full blocks."""
  by_head = lambda array_BxTxNx: layout.pad_segment(jnp.moveaxis(array_BxTxNx, 2, 0), axis=2)
  distance_query = span_NxBxT = encoding = bias = None
  if heads.distance is not None:
    query_BxTxNxH, encoding_SxNxH, bias_SxN = heads.distance
    distance_query = by_head(query_BxTxNxH)
    encoding = layout.pad_distances(encoding_SxNxH.swapaxes(0, 1))
    bias = None if bias_SxN is None else layout.pad_distances(bias_SxN.T)
  if span_mask is not None:
    z_BxTxN = span_mask.z_BxTxN
    span_NxBxT = z_BxTxN.T if z_BxTxN.shape[:2] == (1, 1) else by_head(z_BxTxN)
  queries = by_head(heads.query_BxTxNxH), distance_query, span_NxBxT
  keys = by_head(heads.key_BxSxCxH), by_head(heads.value_BxSxCxH)
  return Operands(queries, keys, (encoding, bias), source.weights)


def _attend_sharded(operands, constants):
  """Each device attends for its own rows and heads."""
  (N, B), C = constants.first_query_NxB.shape, len(operands.keys[0])
  rows, (heads, key_heads) = mesh_axes.axes('batch', B), mesh_axes.head_axes(N, C)
  if not rows and not heads:
    return _attend(operands, constants)
  by_head, by_row, by_both = jax.P(heads), jax.P(rows), jax.P(heads, rows)
  by_key_head, by_row_and_key_head = jax.P(key_heads), jax.P(key_heads, rows)
  source = constants.source.replace(rows=by_row, cache=jax.P(rows, key_heads))
  spans, encoding = operands.queries[2], operands.distances[0]
  span_spec = by_head if spans is not None and spans.shape[1:] == (1, 1) else by_both
  encoding_spec = jax.P() if encoding is not None and len(encoding) == 1 else by_head
  specs = (
    Operands(
      *((by_both, by_both, span_spec), by_row_and_key_head, (encoding_spec, by_head), by_key_head)
    ),
    constants.replace(layout=by_row, source=source, first_query_NxB=by_both, drop=jax.P()),
  )
  out_specs = by_both, by_both, by_both if constants.return_pairs else None

  def attend(operands, constants):
    if heads != key_heads:  # every device has all key heads
      own = functools.partial(mesh_axes.own_key_heads, heads, N)
      keys, weights = own((operands.keys, operands.weights), 0)
      operands = operands._replace(keys=keys, weights=weights)
      source = constants.source.replace(cache=own(constants.source.cache, 1))
      constants = constants.replace(source=source)
    return _attend(operands, constants)

  run = jax.shard_map(attend, in_specs=specs, out_specs=out_specs, check_vma=False)
  return run(operands, constants)


def _slot_pairs(pair_BxNxT, keys):
  """Maps pairs from the order of tokens to that of the cache slots."""
  if keys.order_BxM is None:
    return pair_BxNxT
  M = keys.order_BxM.shape[1]
  index_BxNxT = jnp.minimum(pair_BxNxT, M - 1)
  slot_BxNxT = jnp.take_along_axis(keys.order_BxM[:, None], index_BxNxT, axis=2)
  return jnp.where(pair_BxNxT < M, slot_BxNxT, pair_BxNxT)


@jax.custom_vjp
def _attend(operands, constants):
  """Returns values [N, B, T, H], log masses [N, B, T], and pairs [N, B, T] or None.

  The values of a query that sees no key are 0; the pair of one that sees no earlier key is S.
  """
  return _attend_forward(operands, constants)[0]


def _attend_forward(operands, constants):
  distances = operands.distances

  def attend(arguments):
    queries, key = arguments
    attend_head = lambda _, query: (None, _Head(constants, distances, query, key).attend())
    _, (results, windows) = _scan_group(attend_head, None, queries)
    return results, jax.tree.map(lambda window_Gx: window_Gx[0], windows)

  result, window = jax.lax.map(attend, _head_arguments(operands, constants))
  result, window = checkpoint_name((_join_groups(result), window), 'attended')
  return result, (operands, constants, result[:2], window)


def _attend_backward(residuals, cotangents):
  operands, constants, result, window = residuals
  arguments = _head_arguments(operands, constants)
  saved = _split_groups((*result, *cotangents[:2]), len(operands.keys[0]))

  def visit(d_distances, arguments):
    (queries, key), window, saved = arguments

    def visit_query(sums, arguments):
      (query, saved), (d_distances, d_key) = arguments, sums
      head = _Head(constants, operands.distances, query, key)
      d_distances, d_query, d_own_key = head.gradient(d_distances, window, *saved)
      return (d_distances, jax.tree.map(jnp.add, d_key, d_own_key)), d_query

    start = d_distances, _wide_zeros((key.keys, key.weights))
    (d_distances, d_key), d_queries = _scan_group(visit_query, start, (queries, saved))
    return d_distances, (d_queries, d_key)

  start = _wide_zeros(operands.distances)
  d_distances, d_heads = jax.lax.scan(visit, start, (arguments, window, saved))
  d_queries, (d_keys, d_weights) = d_heads
  d_operands = Operands(_join_groups(d_queries), d_keys, d_distances, d_weights)
  return _with_dtypes(d_operands, operands), None


_attend.defvjp(_attend_forward, _attend_backward)


class _QueryHead(NamedTuple):
  """A query head: its queries, its index, and the index of its first query (see `Constants`)."""

  queries: Any
  index: jax.Array
  first_query_B: jax.Array


class _KeyHead(NamedTuple):
  """A key head: its keys and values, its weights, its index, and the offsets that it visits."""

  keys: Any
  weights: Any
  index: jax.Array
  offsets: jax.Array


def _head_arguments(operands, constants):
  """Returns all query heads, grouped by their key heads, and all key heads."""
  layout, N, C = constants.layout, len(constants.first_query_NxB), len(operands.keys[0])
  span_NxBxT, longest_NxB = operands.queries[2], None
  if span_NxBxT is not None and constants.renormalize:  # otherwise all keys are in the softmax
    longest_NxB = span_NxBxT.max(axis=2) + constants.ramp
  queries = _QueryHead(operands.queries, jnp.arange(N), constants.first_query_NxB)
  # As many for all query heads of a key head, so that they share the window.
  offsets_C = layout.offsets(longest_NxB, N).reshape(C, -1).max(axis=1)
  keys = _KeyHead(operands.keys, operands.weights, jnp.arange(C), offsets_C)
  return _split_groups(queries, C), keys


def _split_groups(tree, C):
  """[N, ...] -> [C, N / C, ...]"""
  return jax.tree.map(lambda leaf: leaf.reshape(C, -1, *leaf.shape[1:]), tree)


def _join_groups(tree):
  """[C, N / C, ...] -> [N, ...]"""
  return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _scan_group(visit, sums, heads):
  """Scans over the query heads of a key head, `jax.lax.scan(visit, sums, heads)`."""
  if len(jax.tree.leaves(heads)[0]) > 1:
    return jax.lax.scan(visit, sums, heads)
  sums, result = visit(sums, jax.tree.map(lambda leaf: leaf[0], heads))
  return sums, jax.tree.map(lambda leaf: leaf[None], result)


class _Running(NamedTuple):
  """The running softmax of the queries, and the best earlier key of each so far."""

  numerator_AxKxH: jax.Array
  mass_AxK: jax.Array
  max_AxK: jax.Array
  pair_score_AxK: jax.Array | None
  pair_AxK: jax.Array | None


class _Head:
  """The loops of one head over the offsets from blocks of queries to blocks of keys.

  Args:
    constants: inputs without a gradient, of all heads.
    distances: `Operands.distances`, of all heads.
    query: the query head.
    key: its key head.
  """

  def __init__(self, constants, distances, query, key):
    self.constants, self.layout, self.distances = constants, constants.layout, distances
    self.K, self.index, self.first_query_B = self.layout.block_size, *query[1:]
    self.keys, self.weights, self.key_head, self.offsets = key
    self.queries = jax.tree.map(self.layout.to_blocks, query.queries)
    self.dtype = self.keys[1].dtype
    self.wide = jnp.promote_types(self.dtype, jnp.float32)  # dtype of scores and sums

  def attend(self):
    """Returns the attended values [B, T, H], log masses and pairs [B, T]; and the last window."""
    A, K, H = self.queries[0].shape
    full = lambda value, *shape: jnp.full((A, K, *shape), value, self.wide)
    pairs = None, None
    if self.constants.return_pairs:
      S = self.layout.memory_length + self.layout.segment_length
      pairs = full(-jnp.inf), jnp.full((A, K), S, jnp.int32)
    # The initial maximum is finite, so that the difference of two maxima is not NaN.
    running = _Running(full(0, H), full(0), full(jnp.finfo(self.wide).min / 2), *pairs)

    def visit(offset, carry):
      window, running = carry
      window = jax.tree.map(_push_left, self._read_block(-offset), window)
      return window, self._add(offset, window, running)

    after_segment = jax.tree.map(lambda array: jnp.roll(array, -K, axis=1), self.keys)
    window, running = jax.lax.fori_loop(0, self.offsets, visit, (after_segment, running))
    mass_AxK = jnp.where(running.mass_AxK > 0, running.mass_AxK, 1)
    values_AxKxH = running.numerator_AxKxH / mass_AxK[..., None]
    result = values_AxKxH, running.max_AxK + jnp.log(mass_AxK), running.pair_AxK
    return jax.tree.map(self.layout.from_blocks, result), window

  def gradient(self, d_distances, window, *saved):
    """Returns the sums of the gradients of the distances, and those of queries, and of keys.

    Args:
      d_distances: sum of the previous heads.
      window: the last window of `attend`.
      saved: values [B, T, H] and log masses [B, T], and their gradients.
    """
    values_AxKxH, log_mass_AxK, d_values_AxKxH, d_log_mass_AxK = map(self.layout.to_blocks, saved)
    d_mass_AxK = d_log_mass_AxK - (values_AxKxH * d_values_AxKxH).sum(axis=-1)
    saved = log_mass_AxK, d_mass_AxK, d_values_AxKxH
    add = functools.partial(jax.tree.map, jnp.add)

    def visit(step, carry):
      offset = self.offsets - 1 - step
      window, d_window, d_queries, d_distances, d_weights = carry
      # The first block leaves the window: no smaller offset reaches it.
      d_weights = self._add_weights(d_weights, d_window, offset + 1)
      last_block = self._read_block(self.layout.segment_blocks - 1 - offset)
      window = jax.tree.map(_push_right, window, last_block)
      d_window = jax.tree.map(_push_right, d_window, _wide_zeros(last_block))
      d_inputs, d_keys = self._offset_gradient(offset, window, saved)
      d_distances = self._add_distances(d_distances, d_inputs[1], offset)
      return window, add(d_window, d_keys), add(d_queries, d_inputs[0]), d_distances, d_weights

    window = jax.tree.map(lambda array: jnp.roll(array, self.K, axis=1), window)
    zeros = _wide_zeros((window, self.queries, self.weights))
    start = window, zeros[0], zeros[1], d_distances, zeros[2]
    _, d_keys, d_queries, d_distances, d_weights = jax.lax.fori_loop(0, self.offsets, visit, start)
    return d_distances, jax.tree.map(self.layout.from_blocks, d_queries), (d_keys, d_weights)

  def _read_block(self, j):
    """Returns keys and values [B, K, H] of block j."""
    segment = lambda: _slice(self.keys, j * self.K, self.K)
    if not self.layout.memory_blocks:
      return segment()
    return jax.lax.cond(j < 0, lambda: self._memory_keys(j, self.weights), segment)

  def _memory_keys(self, j, weights):
    """Returns keys and values [B, K, H] of block j of the memory."""
    first, M = (j + self.layout.memory_blocks) * self.K, self.layout.memory_blocks * self.K
    slice_block = lambda array: _slice(array, first, self.K + array.shape[1] - M)
    source = self.constants.source
    rows = jax.tree.map(slice_block, source.rows)
    return source.read(weights, rows, source.cache, self.key_head)

  def _add_weights(self, d_weights, d_window, offset):
    """Adds the gradient of the weights from the first block of a window."""
    if not self.layout.memory_blocks:
      return d_weights
    keys, pullback = jax.vjp(functools.partial(self._memory_keys, -offset), self.weights)
    (d_block_weights,) = pullback(_with_dtypes(_slice(d_window, 0, self.K), keys))
    return jax.tree.map(jnp.add, d_weights, d_block_weights)

  def _inputs(self, offset):
    """Returns the queries, and the encodings and biases of the distances of an offset."""
    first = self.layout.first_distance(offset)
    take = lambda array: _slice(array, first, 2 * self.K - 1)[self._distance_row(array)]
    return self.queries, jax.tree.map(take, self.distances)

  def _add_distances(self, d_distances, d_block, offset):
    """Adds the gradient of the distances of an offset."""

    def add(array, part):
      first = self._distance_row(array), self.layout.first_distance(offset)
      first += (0,) * (part.ndim - 1)
      rows = jax.lax.dynamic_slice(array, first, (1, *part.shape)) + part
      return jax.lax.dynamic_update_slice(array, rows, first)

    return jax.tree.map(add, d_distances, d_block)

  def _distance_row(self, array):
    """Returns the row of an array [N or 1, ...]."""
    return self.index if len(array) > 1 else 0

  def _scores(self, offset, inputs, key_AxKxH):
    """Returns scores [A, K, K], minus infinity if masked, and the unclipped mask of the spans.

    The mask (see `span.unclipped_mask`) is None without learned spans.
    """
    (query_AxKxH, distance_query_AxKxH, span_xxK), (encoding_RxH, bias_R) = inputs
    visible_AxKxK = self.layout.visible(offset)
    scores_AxKxK = self._product('aqh,akh->aqk', query_AxKxH, key_AxKxH)
    if distance_query_AxKxH is not None:
      scores_AxKxR = self._product('aqh,rh->aqr', distance_query_AxKxH, encoding_RxH)
      scores_AxKxR += 0 if bias_R is None else bias_R
      scores_AxKxK += relative.shift_block(scores_AxKxR)
    scores_AxKxK = softmax.cap_logits(scores_AxKxK, self.constants.logit_cap)
    unclipped_xxKxK = None
    if span_xxK is not None:
      distance_KxK = self.layout.nearest_distance(offset)
      unclipped_xxKxK = span.unclipped_mask(span_xxK[..., None], distance_KxK, self.constants.ramp)
      if self.constants.renormalize:
        visible_AxKxK &= unclipped_xxKxK >= 0
    return jnp.where(visible_AxKxK, scores_AxKxK, -jnp.inf), unclipped_xxKxK

  def _weights(self, scores_AxKxK, unclipped_xxKxK, max_AxK):
    """Returns the weights of the values, and the mass that they add to the queries."""
    exp_AxKxK = jnp.exp(scores_AxKxK - max_AxK[..., None])
    weights_AxKxK, mass_AxKxK = span.masked_weights(
      exp_AxKxK, unclipped_xxKxK, self.constants.renormalize
    )
    return weights_AxKxK, mass_AxKxK.sum(axis=-1)

  def _add(self, offset, window, before):
    """Adds the keys of an offset to the running softmax."""
    key_AxKxH, value_AxKxH = map(self.layout.to_blocks, window)
    scores_AxKxK, unclipped_xxKxK = self._scores(offset, self._inputs(offset), key_AxKxH)
    max_AxK = jnp.maximum(before.max_AxK, scores_AxKxK.max(axis=-1))
    weights_AxKxK, mass_AxK = self._weights(scores_AxKxK, unclipped_xxKxK, max_AxK)
    dropped_AxKxK = (weights_AxKxK * self._dropout_mask(offset)).astype(self.dtype)
    numerator_AxKxH = self._product('aqk,akh->aqh', dropped_AxKxK, value_AxKxH)
    rescale_AxK = jnp.exp(before.max_AxK - max_AxK)
    after = before._replace(
      numerator_AxKxH=before.numerator_AxKxH * rescale_AxK[..., None] + numerator_AxKxH,
      mass_AxK=before.mass_AxK * rescale_AxK + mass_AxK,
      max_AxK=max_AxK,
    )
    if self.constants.return_pairs:
      after = self._update_pairs(after, offset, scores_AxKxK, unclipped_xxKxK)
    return after

  def _update_pairs(self, running, offset, scores_AxKxK, unclipped_xxKxK):
    """Replaces the pairs of the queries by keys of an offset with higher scores."""
    if unclipped_xxKxK is not None:
      scores_AxKxK += jnp.log(span.unit_clip(unclipped_xxKxK))
    scores_AxKxK = jnp.where(self.layout.distance(offset) > 0, scores_AxKxK, -jnp.inf)
    score_AxK = scores_AxKxK.max(axis=-1)
    pair_AxK = scores_AxKxK.argmax(axis=-1) + self._key_index(offset)[:, :1]
    # Of equal scores, the earlier key counts.
    is_better_AxK = (score_AxK >= running.pair_score_AxK) & (score_AxK > -jnp.inf)
    return running._replace(
      pair_score_AxK=jnp.where(is_better_AxK, score_AxK, running.pair_score_AxK),
      pair_AxK=jnp.where(is_better_AxK, pair_AxK.astype(jnp.int32), running.pair_AxK),
    )

  def _offset_gradient(self, offset, window, saved):
    """Returns the gradients of `_inputs`, and of the keys and values of a window."""
    key_AxKxH, value_AxKxH = map(self.layout.to_blocks, window)
    log_mass_AxK, d_mass_AxK, d_values_AxKxH = saved
    weigh = lambda *inputs: self._weights(*self._scores(offset, *inputs), log_mass_AxK)
    (weights_AxKxK, _), pullback = jax.vjp(weigh, self._inputs(offset), key_AxKxH)
    mask_AxKxK = self._dropout_mask(offset)
    d_weights_AxKxK = mask_AxKxK * self._product('aqh,akh->aqk', d_values_AxKxH, value_AxKxH)
    d_inputs, d_key_AxKxH = pullback((d_weights_AxKxK, d_mass_AxK))
    dropped_AxKxK = weights_AxKxK * mask_AxKxK
    d_value_AxKxH = self._product('aqk,aqh->akh', dropped_AxKxK, d_values_AxKxH)
    return d_inputs, tuple(map(self.layout.from_blocks, (d_key_AxKxH, d_value_AxKxH)))

  def _dropout_mask(self, offset):
    """Returns the factors of the weights, [A, K, K]; 1 without dropout."""
    if not self.constants.drop.is_active:
      return 1.0
    T = self.keys[0].shape[1]
    row_AxK = self.layout.to_blocks(self.first_query_B[:, None] + jnp.arange(T))
    column_Ax1xK = self._key_index(offset)[:, None]
    columns = self.layout.memory_length + self.layout.segment_length
    drop = self.constants.drop
    return dropout.block_mask(drop.key, drop.rate, row_AxK, column_Ax1xK, columns)

  def _key_index(self, offset):
    """Returns the indices of the keys of an offset, int32 [A, K]; 0 is the first of the memory."""
    B, T = len(self.first_query_B), self.keys[0].shape[1]
    first = self.layout.memory_length - offset * self.K
    return self.layout.to_blocks(jnp.broadcast_to(first + jnp.arange(T), (B, T)))

  def _product(self, indices, a, b):
    return jnp.einsum(indices, a, b, preferred_element_type=self.wide)


def _push_left(block_BxKxH, window_BxTxH):
  """Inserts a block before a window, whose last block is dropped."""
  K, T = block_BxKxH.shape[1], window_BxTxH.shape[1]
  return jnp.concatenate([block_BxKxH, window_BxTxH[:, : T - K]], axis=1)


def _push_right(window_BxTxH, block_BxKxH):
  """Inserts a block after a window, whose first block is dropped."""
  return jnp.concatenate([window_BxTxH[:, block_BxKxH.shape[1] :], block_BxKxH], axis=1)


def _slice(tree, first, count):
  """Slices axis 1 of all arrays of a tree."""
  return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, count, 1), tree)


def _wide_zeros(tree):
  """Returns zeros of the shapes of a tree, in at least float32."""
  wide = lambda array: jnp.promote_types(array.dtype, jnp.float32)
  return jax.tree.map(lambda array: jnp.zeros(array.shape, wide(array)), tree)


def _with_dtypes(tree, like):
  return jax.tree.map(lambda array, other: array.astype(other.dtype), tree, like)
