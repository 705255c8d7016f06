"""Attention in blocks of queries and keys, with a running softmax (Dao et al. 2022).

For each head, each block of keys that the head reaches, and each block of queries that sees these:
scores, mask, exponentials, and the sums

  numerator = sum_j m_j e_j v_j,   mass = sum_j m_j e_j,   e_j = exp(s_j - max_i s_i)

which are rescaled when the maximum grows. m is the soft mask of a learned span (see `layers.span`),
1 without one. The scores of a whole segment never exist, nor do the keys and values of a whole
memory: they are projected block by block. The epsilon in the mass of a span counts only the keys
that it reaches: no others are looked at, as in the official code, which trims its cache.

The loop bounds are known at run time only: how far a head reaches follows from its span, from the
documents and from padding, in one compiled program. The gradient is written by hand: the backward
pass visits the same blocks and recomputes their scores from the maximum and the mass of each query.

B batch, T queries, M memory, S = M + T keys, oldest first, N heads, H head width, Q queries of a
block, K keys of a block, J blocks of the memory.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import documents, dropout, placement, relative, span
from ngrammer_jax.layers.cache import KeyValues
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.whole_attention import Heads, Part, Spans

BLOCK = 64  # queries and keys of a block
MANY = 2**17  # scores of a head, from which on blocks are faster

BY_QUERY = (
  *('query_NxBxTxH', 'key_NxBxTxH', 'value_NxBxTxH', 'distance_query_NxBxTxH', 'span_NxBxT'),
)
BY_DISTANCE = ('distance_NxSxH', 'distance_bias_NxS')
# Document numbers of what only fills up the last block: no query sees a key.
FILL_QUERY, FILL_KEY = -3, -4
FAR = 2**30  # a distance beyond all keys

# Returns keys and values [B, K, H] of one head and K slots of the memory. Arguments: the weights of
# the head, weights that heads share, `Keys.memory`, `Keys.cache`, the head, the first slot, K.
Project = Callable[..., tuple[jax.Array, jax.Array]]


class Operands(NamedTuple):
  """Arrays that gradients flow to; heads first, except for `shared`.

  Attributes:
    query_NxBxTxH: scaled queries, with their content bias.
    key_NxBxTxH: keys of the segment.
    value_NxBxTxH: values of the segment.
    distance_query_NxBxTxH: queries of the encodings of distances. None: no such scores.
    distance_NxSxH: encodings of the distances S - 1 down to 0.
    distance_bias_NxS: scores that depend on the distance alone. None: no such scores.
    span_NxBxT: learned spans in tokens; B and T may be 1. None: spans are not learned.
    weights: of `Blocks.project`, for each head.
    shared: of `Blocks.project`, for all heads.
  """

  query_NxBxTxH: jax.Array
  key_NxBxTxH: jax.Array
  value_NxBxTxH: jax.Array
  distance_query_NxBxTxH: jax.Array | None = None
  distance_NxSxH: jax.Array | None = None
  distance_bias_NxS: jax.Array | None = None
  span_NxBxT: jax.Array | None = None
  weights: Any = None
  shared: Any = None


class Source(NamedTuple):
  """A memory that keys and values are read from, or made from, block by block.

  Attributes:
    project: see `Project`.
    slots: M, filled up to whole blocks by `fill` slots before the first.
    fill: see above.
    weights: for each head, heads first.
    shared: for all heads.
    memory: arrays with the rows of the batch first.
    cache: arrays [B, N, M, H].
  """

  project: Project | None = None
  slots: int = 0
  fill: int = 0
  weights: Any = None
  shared: Any = None
  memory: Any = None
  cache: Any = None


class Keys(NamedTuple):
  """Arrays that no gradient flows to.

  Attributes:
    query_documents_BxT: document numbers of the queries, padding set apart.
    documents_BxS: document numbers of the keys.
    memory: arrays that `Blocks.project` reads, rows of the batch first.
    cache: arrays [B, N, M, H] that it reads.
    rows_B: numbers of the rows in the whole batch.
    heads_N: numbers of the heads among all.
    dropout_key: to drop probabilities. None: none are dropped.
  """

  query_documents_BxT: jax.Array
  documents_BxS: jax.Array
  memory: Any
  cache: Any
  rows_B: jax.Array
  heads_N: jax.Array
  dropout_key: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Attention over blocks: everything that is known when the program is compiled.

  Attributes:
    project: makes keys and values of the memory.
    memory: M, a multiple of `keys`.
    fill: slots that only fill up the first block of the memory.
    window: keys are less than so many tokens away. None: no such bound.
    sees_itself: a token attends to itself.
    ramp: length over which a span fades out.
    renormalize: weights under the mask of a span add up to 1 again.
    dropout: rate of the probabilities.
    heads: N, on all devices.
    finds_pairs: also find the earlier key that each query attends to most.
    queries: Q.
    keys: K.
    dtype: of the products; scores and sums take at least float32.
  """

  project: Project | None = None
  memory: int = 0
  fill: int = 0
  window: int | None = None
  sees_itself: bool = True
  ramp: int = 1
  renormalize: bool = True
  dropout: float = 0.0
  heads: int = 1
  finds_pairs: bool = False
  queries: int = 128
  keys: int = 128
  dtype: jnp.dtype = jnp.float32

  @property
  def nearest(self) -> int:
    """The distance of the nearest key that is seen."""
    return int(not self.sees_itself)

  def __call__(
    self, operands: Operands, keys: Keys
  ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Attends to the memory and the segment, on each device for its own rows and heads.

    Returns:
      The attended values [N, B, T, H], zeros for a query that sees nothing; the logarithm of the
      mass [N, B, T], so that another part of the same softmax can be added; and where it finds
      pairs, the numbers of their keys [N, B, T], S for none.
    """
    N, B, T = operands.query_NxBxTxH.shape[:3]
    rows, heads = placement.axes('batch', B), placement.axes('heads', N)
    attend = functools.partial(_attend, self)
    if rows or heads:
      by_head, by_row = jax.P(heads), jax.P(rows)
      both = jax.P(heads, rows)
      specs = Operands(both, both, both, both, by_head, by_head, both, by_head, jax.P())
      if operands.span_NxBxT is not None and operands.span_NxBxT.shape[1] == 1:
        specs = specs._replace(span_NxBxT=by_head)
      in_specs = specs, Keys(by_row, by_row, by_row, jax.P(rows, heads), by_row, by_head, jax.P())
      out_specs = both, both, both if self.finds_pairs else None
      attend = jax.shard_map(attend, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return attend(operands, keys)


def is_faster(T: int, M: int, learns_spans: bool) -> bool:
  """Whether blocks are faster than whole scores, for T queries after a memory of M.

  Learned spans leave most of the scores out. Without, few large products are faster than many small
  ones.
  """
  return learns_spans and T >= BLOCK and T * (M + T) >= MANY


def fill_of(slots: int) -> int:
  """Slots to put before the first so that the memory has whole blocks."""
  return -slots % BLOCK


def fill_before(array: jax.Array, axis: int, count: int, value: int = 0) -> jax.Array:
  """Puts slots before an array that fill up the first block."""
  return jnp.pad(array, _padding(array, axis, count, 0), constant_values=value)


def of_cache(cached: KeyValues, order_BxM: jax.Array) -> Source:
  """A memory of keys and values in the slots of a cache, read in the order of their tokens."""
  M = order_BxM.shape[1]
  order_BxM = jnp.pad(order_BxM, ((0, 0), (fill_of(M), 0)))

  def read(weights, shared, order_BxM, cache, head, first, count):
    del weights, shared
    slots_BxK = _slice(order_BxM, first, count, 1)
    rows_Bx1 = jnp.arange(len(slots_BxK))[:, None]
    return tuple(array_BxNxMxH[rows_Bx1, head, slots_BxK] for array_BxNxMxH in cache)

  arrays = cached.keys, cached.values
  return Source(read, M, fill_of(M), memory=order_BxM, cache=arrays)


def attend(
  heads: Heads,
  spans: Spans | None,
  context: Context,
  source: Source,
  finds_pairs: bool,
  drop: dropout.Dropout,
) -> Part:
  """Attends to the keys that each query sees; the same as `whole_attention.attend`.

  Args:
    heads: of the segment, without a memory.
    spans: learned spans. None: none are learned.
    context: of the segment.
    source: the memory.
    finds_pairs: find pairs too.
    drop: dropout of the weights.
  """
  B, T, N = heads.query_BxTxNxH.shape[:3]
  by_head = lambda array_BxTxNxH: jnp.moveaxis(array_BxTxNxH, 2, 0)
  more, distance = {}, heads.distance
  if distance is not None:
    encoding_NxSxH = distance.encoding_SxNxH.swapaxes(0, 1)
    shape = N, *encoding_NxSxH.shape[1:]  # all heads may have the same
    more['distance_query_NxBxTxH'] = by_head(distance.query_BxTxNxH)
    more['distance_NxSxH'] = fill_before(jnp.broadcast_to(encoding_NxSxH, shape), 1, source.fill)
    if distance.bias_SxN is not None:
      more['distance_bias_NxS'] = fill_before(distance.bias_SxN.T, 1, source.fill)
  if spans is not None:
    more['span_NxBxT'] = by_head(spans.z_BxTxN)
  rows = heads.query_BxTxNxH, heads.key_BxSxNxH, heads.value_BxSxNxH
  operands = Operands(*map(by_head, rows), **more, weights=source.weights, shared=source.shared)
  documents_BxS = fill_before(context.key_documents_BxS, 1, source.fill, documents.NONE)
  numbers = jnp.arange(B), jnp.arange(N)
  arrays = context.query_documents_BxT, documents_BxS, source.memory, source.cache, *numbers
  blocks = Blocks(
    project=source.project,
    memory=source.slots + source.fill,
    fill=source.fill,
    window=context.window,
    sees_itself=context.sees_itself,
    ramp=1 if spans is None else spans.ramp,
    renormalize=spans is None or spans.renormalize,
    dropout=drop.rate,
    heads=N,
    finds_pairs=finds_pairs,
    queries=BLOCK,
    keys=BLOCK,
    dtype=heads.value_BxSxNxH.dtype,
  )
  values, log_mass, pair = blocks(operands, Keys(*arrays, drop.key if drop.is_active else None))
  pair_BxNxT = None if pair is None else _pairs(pair.swapaxes(0, 1), context, source)
  return Part(jnp.moveaxis(values, 0, 2), log_mass.swapaxes(0, 1), None, pair_BxNxT)


def _pairs(pair_BxNxT, context, source):
  """Pairs as numbers of keys in the order of the context, without the slots that fill up."""
  pair_BxNxT -= source.fill
  if context.order_BxM is None:
    return pair_BxNxT
  index_BxNxT = jnp.minimum(pair_BxNxT, source.slots - 1)
  slot_BxNxT = jnp.take_along_axis(context.order_BxM[:, None], index_BxNxT, axis=2)
  return jnp.where(pair_BxNxT < source.slots, slot_BxNxT, pair_BxNxT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks, operands, keys):
  return _forward(blocks, operands, keys)[0]


def _forward(blocks, operands, keys):
  """The result, and what the backward pass needs."""
  layout = _Layout(blocks, operands, keys)
  operands, shared = layout.padded(operands)

  def of_head(head):
    operands, number, first, reach = head
    return _Head(layout, operands, shared, number, first, reach).attend()

  context, log_mass, pair = jax.lax.map(of_head, (operands, *layout.by_head))
  result = jax.tree.map(lambda array: array[:, :, : layout.T], (context, log_mass, pair))
  return result, (context, log_mass)


def _forward_rule(blocks, operands, keys):
  result, saved = _forward(blocks, operands, keys)
  return result, (operands, keys, saved)


def _backward_rule(blocks, residuals, cotangents):
  operands, keys, saved = residuals
  layout = _Layout(blocks, operands, keys)
  padded, shared = layout.padded(operands)
  cotangents = tuple(map(layout.pad_queries, cotangents[:2]))

  def of_head(shared_gradient, head):
    (operands, number, first, reach), saved, cotangents = head
    head = _Head(layout, operands, shared, number, first, reach)
    gradient, shared_part = head.gradient(*saved, *cotangents)
    return jax.tree.map(jnp.add, shared_gradient, shared_part), gradient

  zeros = jax.tree.map(_wide_zeros, shared)
  heads = (padded, *layout.by_head), saved, cotangents
  shared_gradient, gradient = jax.lax.scan(of_head, zeros, heads)
  gradient = layout.cropped(gradient, operands)
  return gradient._replace(shared=_with_dtypes(shared_gradient, shared)), None


_attend.defvjp(_forward_rule, _backward_rule)


class _Layout:
  """Where blocks begin and end, and which of them each head visits."""

  def __init__(self, blocks: Blocks, operands: Operands, keys: Keys):
    self.blocks, self.keys = blocks, keys
    self.M, self.T = blocks.memory, operands.query_NxBxTxH.shape[2]
    self.fill = -self.T % max(blocks.queries, blocks.keys)
    self.query_blocks = (self.T + self.fill) // blocks.queries
    self.memory_blocks = self.M // blocks.keys
    self.segment_blocks = (self.T + self.fill) // blocks.keys
    filled = lambda array_BxT, value: jnp.pad(
      array_BxT, _padding(array_BxT, 1, 0, self.fill), constant_values=value
    )
    self.query_documents_BxT = filled(keys.query_documents_BxT, FILL_QUERY)
    self.documents_BxS = filled(keys.documents_BxS, FILL_KEY)
    reach_NxB = self._reach(operands)
    first_N, reach_N = self._first(reach_NxB), reach_NxB.max(axis=1)
    self.by_head = jnp.arange(len(reach_NxB)), first_N, reach_N

  def _reach(self, operands):
    """The largest distance of a key that counts, int32 [N, B]."""
    window, span_NxBxT = self.blocks.window, operands.span_NxBxT
    shape = operands.query_NxBxTxH.shape[:2]
    reach_NxB = jnp.full(shape, FAR if window is None else window - 1, jnp.int32)
    if span_NxBxT is None or not self.blocks.renormalize:  # then all keys are in the softmax
      return reach_NxB
    longest_NxB = jnp.nan_to_num(span_NxBxT.max(axis=2)) + self.blocks.ramp
    return jnp.minimum(reach_NxB, longest_NxB.astype(jnp.int32) + self.blocks.nearest)

  def _first(self, reach_NxB):
    """The first block of the memory that a query of any row sees, int32 [N]."""
    last_J = jnp.arange(1, self.memory_blocks + 1) * self.blocks.keys - 1
    query_documents_BxT = self.keys.query_documents_BxT
    is_padding_BxT = query_documents_BxT == documents.PADDING
    first_Bx1 = jnp.where(is_padding_BxT, FAR, query_documents_BxT).min(axis=1, keepdims=True)
    # Documents and positions increase: no query sees what comes before a block that none sees.
    same_BxJ = self.documents_BxS[:, last_J] >= first_Bx1
    near_NxBxJ = self.M - last_J <= reach_NxB[..., None]
    return self.memory_blocks - (same_BxJ & near_NxBxJ).any(axis=1).sum(axis=1, dtype=jnp.int32)

  def pad_queries(self, array_NxBxTx: jax.Array) -> jax.Array:
    """Zeros for the queries that fill up the last block."""
    return jnp.pad(array_NxBxTx, _padding(array_NxBxTx, 2, 0, self.fill))

  def padded(self, operands: Operands) -> tuple[Operands, Any]:
    """Operands by head, filled up to whole blocks, and those that heads share."""
    after = self.blocks.queries + self.blocks.keys  # distances of later keys, which are masked
    arrays = {}
    for name, array in operands._asdict().items():
      if name in BY_QUERY and array is not None:
        is_constant = name == 'span_NxBxT' and array.shape[2] == 1
        arrays[name] = array if is_constant else self.pad_queries(array)
      elif name in BY_DISTANCE and array is not None:
        arrays[name] = jnp.pad(array, _padding(array, 1, self.fill, after))
    return operands._replace(shared=None, **arrays), operands.shared

  def cropped(self, gradient: Operands, operands: Operands) -> Operands:
    """The gradient of padded operands, without what fills them up, in the dtypes of these."""
    arrays = {}
    for name, array in operands._asdict().items():
      if name in BY_QUERY and array is not None:
        arrays[name] = getattr(gradient, name)[:, :, : array.shape[2]]
      elif name in BY_DISTANCE and array is not None:
        arrays[name] = getattr(gradient, name)[:, self.fill : self.fill + array.shape[1]]
    return _with_dtypes(gradient._replace(**arrays), operands._replace(shared=None))


class _Running(NamedTuple):
  """The running softmax of a head: its sums, the highest score, and the pair so far."""

  numerator_BxTxH: jax.Array
  mass_BxT: jax.Array
  highest_BxT: jax.Array
  best_BxT: jax.Array | None
  pair_BxT: jax.Array | None


class _Mask(NamedTuple):
  """What is not differentiated of a block: what is visible, distances, and dropout."""

  visible_BxQxK: jax.Array
  distance_QxK: jax.Array
  kept_BxQxK: jax.Array | float


class _Head:
  """One head: its loops over blocks, forward and backward."""

  def __init__(self, layout, operands, shared, number, first, reach):
    self.layout, self.blocks, self.operands, self.shared = layout, layout.blocks, operands, shared
    self.number, self.first, self.reach = number, first, reach
    self.wide = jnp.promote_types(self.blocks.dtype, jnp.float32)

  def attend(self):
    """The attended values [B, T, H], the logarithms of the masses [B, T], and pairs [B, T]."""
    B, T, H = self.operands.query_NxBxTxH.shape
    full = lambda value, *shape: jnp.full((B, T, *shape), value, self.wide)
    # Finite, so that a difference of two of them is a number.
    running = _Running(full(0, H), full(0), full(jnp.finfo(self.wide).min / 2), None, None)
    if self.blocks.finds_pairs:
      none_BxT = jnp.full((B, T), self.layout.M + self.layout.T, jnp.int32)
      running = running._replace(best_BxT=full(-jnp.inf), pair_BxT=none_BxT)

    def visit(load):
      def of_keys(j, running):
        start, key_BxKxH, value_BxKxH = load(j)
        add = lambda i, running: self._add(
          running, i * self.blocks.queries, start, key_BxKxH, value_BxKxH
        )
        return jax.lax.fori_loop(*self._query_blocks(start), add, running)

      return of_keys

    if self.layout.M:
      running = jax.lax.fori_loop(
        self.first, self.layout.memory_blocks, visit(self._memory_block), running
      )
    running = jax.lax.fori_loop(0, self.layout.segment_blocks, visit(self._segment_block), running)
    mass_BxT = jnp.where(running.mass_BxT > 0, running.mass_BxT, 1)
    context_BxTxH = running.numerator_BxTxH / mass_BxT[..., None]
    return context_BxTxH, running.highest_BxT + jnp.log(mass_BxT), running.pair_BxT

  def gradient(self, context_BxTxH, log_mass_BxT, cotangent_BxTxH, log_mass_cotangent_BxT):
    """The gradients of the operands of this head, and of those that heads share."""
    # What reaches all keys of a query alike: the weights are divided by the mass.
    delta_BxT = (context_BxTxH * cotangent_BxTxH).sum(axis=-1) - log_mass_cotangent_BxT
    saved = log_mass_BxT, delta_BxT, cotangent_BxTxH
    total = jax.tree.map(_wide_zeros, (self.operands, self.shared))

    def of_keys(start, key_BxKxH, value_BxKxH, total):
      none = jnp.zeros_like(key_BxKxH, self.wide), jnp.zeros_like(value_BxKxH, self.wide)

      def of_queries(i, carry):
        (operands, shared), of_block = carry
        first = i * self.blocks.queries
        operands, more = self._block_gradient(operands, saved, first, start, key_BxKxH, value_BxKxH)
        return (operands, shared), jax.tree.map(jnp.add, of_block, more)

      return jax.lax.fori_loop(*self._query_blocks(start), of_queries, (total, none))

    def of_memory(j, total):
      make = lambda weights, shared: self._memory_block(j, weights, shared)[1:]
      keys_values, pull = jax.vjp(make, self.operands.weights, self.shared)
      start = j * self.blocks.keys
      (operands, shared), of_block = of_keys(start, *keys_values, total)
      as_made = lambda gradient, made: gradient.astype(made.dtype)
      weights, more = pull(jax.tree.map(as_made, of_block, keys_values))
      weights = jax.tree.map(jnp.add, operands.weights, weights)
      return operands._replace(weights=weights), jax.tree.map(jnp.add, shared, more)

    def of_segment(j, total):
      start, *keys_values = self._segment_block(j)
      (operands, shared), (key, value) = of_keys(start, *keys_values, total)
      first = j * self.blocks.keys
      operands = operands._replace(
        key_NxBxTxH=_add_slice(operands.key_NxBxTxH, key, first, 1),
        value_NxBxTxH=_add_slice(operands.value_NxBxTxH, value, first, 1),
      )
      return operands, shared

    if self.layout.M:
      total = jax.lax.fori_loop(self.first, self.layout.memory_blocks, of_memory, total)
    return jax.lax.fori_loop(0, self.layout.segment_blocks, of_segment, total)

  def _memory_block(self, j, weights=None, shared=None):
    """The number of the first key, keys and values [B, K, H] of a block of the memory."""
    keys, start = self.layout.keys, j * self.blocks.keys
    weights = self.operands.weights if weights is None else weights
    shared = self.shared if shared is None else shared
    args = weights, shared, keys.memory, keys.cache, self.number, start, self.blocks.keys
    return start, *self.blocks.project(*args)

  def _segment_block(self, j):
    """The same of the segment."""
    K = self.blocks.keys
    of_segment = lambda array_BxTxH: _slice(array_BxTxH, j * K, K, 1)
    key_BxTxH, value_BxTxH = self.operands.key_NxBxTxH, self.operands.value_NxBxTxH
    return self.layout.M + j * K, of_segment(key_BxTxH), of_segment(value_BxTxH)

  def _query_blocks(self, start):
    """The first block of queries that sees a block of keys, and the one after the last."""
    M, Q = self.layout.M, self.blocks.queries
    farthest = start + self.blocks.keys - 1 - M + self.reach
    return jnp.maximum(start - M, 0) // Q, jnp.minimum(farthest // Q + 1, self.layout.query_blocks)

  def _slices(self, operands, first, start):
    """The differentiable parts of a block beside keys and values."""
    Q, K = self.blocks.queries, self.blocks.keys
    at = {'query': ('query_NxBxTxH', first, Q, 1)}
    if operands.distance_query_NxBxTxH is not None:
      # Of the distances S - 1 down to 0 those from the first query, or the last, to the keys.
      nearest_last = start + self.layout.T + self.layout.fill - first - Q
      at['distance_query'] = ('distance_query_NxBxTxH', first, Q, 1)
      at['distance'] = ('distance_NxSxH', nearest_last, Q + K - 1, 0)
      if operands.distance_bias_NxS is not None:
        at['distance_bias'] = ('distance_bias_NxS', nearest_last, Q + K - 1, 0)
    if operands.span_NxBxT is not None:
      varies = operands.span_NxBxT.shape[1] > 1
      at['span'] = ('span_NxBxT', first if varies else 0, Q if varies else 1, 1)
    return at

  def _scores(self, slices, key_BxKxH, distance_QxK):
    """Scores [B, Q, K] before the mask, and how far keys are inside of the spans, see `span`."""
    K = key_BxKxH.shape[1]
    product = functools.partial(jnp.einsum, preferred_element_type=self.wide)
    scores_BxQxK = product('bqh,bkh->bqk', slices['query'], key_BxKxH)
    if 'distance' in slices:
      by_distance = product('bqh,dh->bqd', slices['distance_query'], slices['distance'])
      by_distance += slices.get('distance_bias', 0)
      scores_BxQxK += relative.shift(by_distance[:, None])[:, 0, :, :K]
    if 'span' not in slices:
      return scores_BxQxK, None
    nearest_QxK = distance_QxK - self.blocks.nearest
    inside_BxQxK = span.inside(slices['span'][..., None], nearest_QxK, self.blocks.ramp)
    return scores_BxQxK, jnp.broadcast_to(inside_BxQxK, scores_BxQxK.shape)

  def _mask(self, first, start):
    """What queries `first` on see of the keys `start` on."""
    layout, blocks, (Q, K) = self.layout, self.blocks, (self.blocks.queries, self.blocks.keys)
    distance_QxK = layout.M + first + jnp.arange(Q)[:, None] - start - jnp.arange(K)
    seen_QxK = distance_QxK >= blocks.nearest
    if blocks.window is not None:
      seen_QxK &= distance_QxK < blocks.window
    query_BxQx1 = _slice(layout.query_documents_BxT, first, Q, 1)[:, :, None]
    key_Bx1xK = _slice(layout.documents_BxS, start, K, 1)[:, None]
    kept, key = 1.0, layout.keys.dropout_key
    if key is not None and blocks.dropout:
      rows, head = layout.keys.rows_B, layout.keys.heads_N[self.number]
      lines_BxQ = (rows[:, None] * blocks.heads + head) * layout.T + first + jnp.arange(Q)
      columns_K = start - blocks.fill + jnp.arange(K)
      columns = layout.M - blocks.fill + layout.T
      kept = dropout.kept(key, blocks.dropout, lines_BxQ, columns_K, columns)
    return _Mask(seen_QxK & (query_BxQx1 == key_Bx1xK), distance_QxK, kept)

  def _masked(self, scores_BxQxK, inside_BxQxK, mask):
    """Scores, minus infinity for what is not visible or out of the reach of a span."""
    counts_BxQxK = mask.visible_BxQxK
    if inside_BxQxK is not None and self.blocks.renormalize:
      counts_BxQxK = counts_BxQxK & (inside_BxQxK >= 0)
    return jnp.where(counts_BxQxK, scores_BxQxK, -jnp.inf)

  def _add(self, running, first, start, key_BxKxH, value_BxKxH):
    """The running softmax with one block more."""
    Q, mask = self.blocks.queries, self._mask(first, start)
    take = lambda array: _slice(array, first, Q, 1)
    slices = {
      name: _slice(getattr(self.operands, array), *where)
      for name, (array, *where) in self._slices(self.operands, first, start).items()
    }
    scores_BxQxK, inside_BxQxK = self._scores(slices, key_BxKxH, mask.distance_QxK)
    scores_BxQxK = self._masked(scores_BxQxK, inside_BxQxK, mask)
    before = jax.tree.map(take, running)
    highest_BxQ = jnp.maximum(before.highest_BxT, scores_BxQxK.max(axis=-1))
    exp_BxQxK = jnp.exp(scores_BxQxK - highest_BxQ[..., None])
    weights_BxQxK, mass_BxQ = self._weights(exp_BxQxK, inside_BxQxK)
    rescale_BxQ = jnp.exp(before.highest_BxT - highest_BxQ)
    values_BxQxH = jnp.einsum(
      'bqk,bkh->bqh',
      (weights_BxQxK * mask.kept_BxQxK).astype(self.blocks.dtype),
      value_BxKxH,
      preferred_element_type=self.wide,
    )
    after = before._replace(
      numerator_BxTxH=before.numerator_BxTxH * rescale_BxQ[..., None] + values_BxQxH,
      mass_BxT=before.mass_BxT * rescale_BxQ + mass_BxQ,
      highest_BxT=highest_BxQ,
    )
    if self.blocks.finds_pairs:
      earlier_BxQxK = mask.visible_BxQxK & (mask.distance_QxK > 0)
      if inside_BxQxK is not None:
        scores_BxQxK += jnp.log(span.unit_clip(inside_BxQxK))
      scores_BxQxK = jnp.where(earlier_BxQxK, scores_BxQxK, -jnp.inf)
      best_BxQ = scores_BxQxK.max(axis=-1)
      pair_BxQ = (start + scores_BxQxK.argmax(axis=-1)).astype(jnp.int32)
      better_BxQ = best_BxQ > before.best_BxT
      after = after._replace(
        best_BxT=jnp.where(better_BxQ, best_BxQ, before.best_BxT),
        pair_BxT=jnp.where(better_BxQ, pair_BxQ, before.pair_BxT),
      )
    put = lambda array, part: jax.lax.dynamic_update_slice_in_dim(array, part, first, 1)
    return jax.tree.map(put, running, after)

  def _weights(self, exp_BxQxK, inside_BxQxK):
    """Weights of the values, and what they add to the mass of the queries."""
    if inside_BxQxK is None:
      return exp_BxQxK, exp_BxQxK.sum(axis=-1)
    weights_BxQxK = exp_BxQxK * span.unit_clip(inside_BxQxK)
    if not self.blocks.renormalize:
      return weights_BxQxK, exp_BxQxK.sum(axis=-1)
    return weights_BxQxK, (weights_BxQxK + span.EPSILON * exp_BxQxK).sum(axis=-1)

  def _block_gradient(self, total, saved, first, start, key_BxKxH, value_BxKxH):
    """Adds a block to the gradients of the operands; returns them, and those of keys and values."""
    mask, where = self._mask(first, start), self._slices(self.operands, first, start)
    log_mass_BxQ, delta_BxQ, cotangent_BxQxH = (
      _slice(array, first, self.blocks.queries, 1) for array in saved
    )
    slices = {
      name: _slice(getattr(self.operands, array), *at) for name, (array, *at) in where.items()
    }
    score = lambda slices, key_BxKxH: self._scores(slices, key_BxKxH, mask.distance_QxK)
    (scores_BxQxK, inside_BxQxK), pull = jax.vjp(score, slices, key_BxKxH)
    scores_BxQxK = self._masked(scores_BxQxK, inside_BxQxK, mask)
    probs_BxQxK = jnp.exp(scores_BxQxK - log_mass_BxQ[..., None])
    of_value_BxQxK = mask.kept_BxQxK * jnp.einsum(
      'bqh,bkh->bqk', cotangent_BxQxH, value_BxKxH, preferred_element_type=self.wide
    )
    delta_BxQx1 = delta_BxQ[..., None]
    if inside_BxQxK is None:
      weights_BxQxK, pulled = probs_BxQxK, (probs_BxQxK * (of_value_BxQxK - delta_BxQx1), None)
    else:
      soft_BxQxK, clip_pull = jax.vjp(span.unit_clip, inside_BxQxK)
      weights_BxQxK = probs_BxQxK * soft_BxQxK
      if self.blocks.renormalize:
        of_soft_BxQxK = of_value_BxQxK - delta_BxQx1
        of_exp_BxQxK = soft_BxQxK * of_soft_BxQxK
        of_exp_BxQxK -= span.EPSILON * delta_BxQx1
      else:
        of_soft_BxQxK = of_value_BxQxK
        of_exp_BxQxK = soft_BxQxK * of_value_BxQxK - delta_BxQx1
      pulled = probs_BxQxK * of_exp_BxQxK, *clip_pull(probs_BxQxK * of_soft_BxQxK)
    of_slices, of_key_BxKxH = pull(pulled)
    for name, (array, at, _, axis) in where.items():
      added = _add_slice(getattr(total, array), of_slices[name], at, axis)
      total = total._replace(**{array: added})
    of_value_BxKxH = jnp.einsum(
      'bqk,bqh->bkh',
      weights_BxQxK * mask.kept_BxQxK,
      cotangent_BxQxH,
      preferred_element_type=self.wide,
    )
    return total, (of_key_BxKxH.astype(self.wide), of_value_BxKxH)


def _wide_zeros(array):
  """Zeros to sum gradients of an array in, of at least float32."""
  return jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32))


def _with_dtypes(tree, like):
  return jax.tree.map(lambda array, other: array.astype(other.dtype), tree, like)


def _padding(array, axis, before, after):
  return [(before, after) if number == axis else (0, 0) for number in range(array.ndim)]


def _slice(array, first, count, axis):
  return jax.lax.dynamic_slice_in_dim(array, first, count, axis)


def _add_slice(array, part, first, axis):
  """Adds a part to some rows of an array."""
  rows = _slice(array, first, part.shape[axis], axis) + part.astype(array.dtype)
  return jax.lax.dynamic_update_slice_in_dim(array, rows, first, axis)
