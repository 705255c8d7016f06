"""The running softmax of one head over blocks of keys (Dao et al. 2022), and its gradient.

The head loops over the offsets of its visible blocks (see `block_layout`). At offset o every block
i of queries visits block i - o of the keys. The sums over the keys

  numerator_i += e_ij m_ij v_j,   mass_i += e_ij m_ij,   e_ij = exp(s_ij - max_i)

are rescaled when the maximum grows; numerator_i / mass_i is the output o_i. m is the soft mask of a
learned span (see `layers.attention.span`), 1 without one. The loop holds a window of as many keys
as queries. The window moves by one block per offset, and a memory block is projected on entering
it. The epsilon in the mass of a span counts only the keys within the span and its ramp, like the
trimmed cache of the official code.

The gradient visits the offsets in the reverse order and recomputes the scores. With the log mass
L_i in place of max_i the mass is 1, and the gradients of the two sums are do_i and
dL_i - do_i . o_i.

B batch, T queries, H head width, K queries or keys of a block, A blocks of queries in all rows,
R = 2 K - 1 distances between two blocks; x is A or 1.
"""

from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import dropout, products, softmax
from ngrammer_jax.layers.attention import relative, span
from ngrammer_jax.layers.attention.block_layout import BlockLayout
from ngrammer_jax.layers.attention.memory_source import MemorySource


class Queries(NamedTuple):
  """Queries, with all inputs of their scores except the keys.

  Attributes:
    query: scaled, with the content bias, [..., H].
    distance_query: the query of the distances, [..., H]. None: scores do not depend on distances.
    span: learned span in tokens, [...], or [..., 1, 1] if it is the same for all queries. None: no
      spans.
  """

  query: jax.Array
  distance_query: jax.Array | None
  span: jax.Array | None


class Distances(NamedTuple):
  """Encodings [N, S, H] and biases [N, S] of the distances S - 1 down to 0, or None; N may be 1."""

  encoding: jax.Array | None
  bias: jax.Array | None


class KeysAndValues(NamedTuple):
  """Keys and values of the same tokens, [..., H]."""

  key: jax.Array
  value: jax.Array


@struct.dataclass
class Constants:
  """The inputs without a gradient.

  Attributes:
    layout: layout of the blocks.
    source: source of the memory, without weights.
    first_query_NxB: index of the first query of each row and head among all queries, for dropout.
    drop: dropout of the weights.
    ramp: length of a span mask's fall from 1 to 0.
    renormalize: whether masked weights are scaled to add up to 1.
    return_pairs: whether to return the most attended earlier key of each query.
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


class QueryHead(NamedTuple):
  """A query head: its queries, its index, and the index of its first query (see `Constants`)."""

  queries: Queries
  index: jax.Array
  first_query_B: jax.Array


class KeyHead(NamedTuple):
  """A key head: its keys and values, its weights of `MemorySource`, its index, and the offsets.

  `offsets` is the number of offsets to visit.
  """

  keys: KeysAndValues
  weights: Any
  index: jax.Array
  offsets: jax.Array


class Running(NamedTuple):
  """The running softmax of the queries, and the best earlier key of each so far."""

  numerator_AxKxH: jax.Array
  mass_AxK: jax.Array
  max_AxK: jax.Array
  pair_score_AxK: jax.Array | None
  pair_AxK: jax.Array | None


class HeadLoop:
  """The loops of one query head over the offsets from blocks of queries to blocks of keys.

  Args:
    constants: inputs without a gradient, of all heads.
    distances: encodings and biases of the distances, of all heads.
    query_head: the query head.
    key_head: its key head.
  """

  def __init__(
    self, constants: Constants, distances: Distances, query_head: QueryHead, key_head: KeyHead
  ):
    self.constants = constants
    self.layout = constants.layout
    self.K = constants.layout.block_size
    self.distances = distances
    self.index = query_head.index
    self.first_query_B = query_head.first_query_B
    self.queries = jax.tree.map(self.layout.to_blocks, query_head.queries)
    self.keys = key_head.keys
    self.weights = key_head.weights
    self.key_head_index = key_head.index
    self.offsets = key_head.offsets
    self.dtype = self.keys.value.dtype
    self.wide = jnp.promote_types(self.dtype, jnp.float32)  # dtype of scores and sums

  def attend(
    self,
  ) -> tuple[tuple[jax.Array, jax.Array, jax.Array | None], KeysAndValues]:
    """Returns the attended values [B, T, H], log masses and pairs [B, T]; and the last window."""

    def visit(offset, carry):
      window, running = carry
      window = jax.tree.map(_push_left, self._read_block(-offset), window)
      return window, self._add(offset, window, running)

    start = self._start()
    after_segment = jax.tree.map(lambda array: jnp.roll(array, -self.K, axis=1), self.keys)
    window, running = jax.lax.fori_loop(0, self.offsets, visit, (after_segment, start))
    mass_AxK = jnp.where(running.mass_AxK > 0, running.mass_AxK, 1)
    values_AxKxH = running.numerator_AxKxH / mass_AxK[..., None]
    log_mass_AxK = running.max_AxK + jnp.log(mass_AxK)
    result = values_AxKxH, log_mass_AxK, running.pair_AxK
    return jax.tree.map(self.layout.from_blocks, result), window

  def gradient(
    self,
    d_distances: Distances,
    window: KeysAndValues,
    values: jax.Array,
    log_mass: jax.Array,
    d_values: jax.Array,
    d_log_mass: jax.Array,
  ) -> tuple[Distances, Queries, tuple[KeysAndValues, Any]]:
    """Returns the gradients of the distances (summed), the queries and the keys.

    Args:
      d_distances: sum of the previous heads.
      window: the last window of `attend`.
      values, log_mass: attended values [B, T, H] and log masses [B, T].
      d_values, d_log_mass: their gradients.
    """
    values_AxKxH = self.layout.to_blocks(values)
    log_mass_AxK = self.layout.to_blocks(log_mass)
    d_values_AxKxH = self.layout.to_blocks(d_values)
    d_log_mass_AxK = self.layout.to_blocks(d_log_mass)
    d_mass_AxK = d_log_mass_AxK - (values_AxKxH * d_values_AxKxH).sum(axis=-1)

    def visit(step, carry):
      offset = self.offsets - 1 - step
      window, d_window, d_queries, d_distances, d_weights = carry
      # The first block leaves the window: no smaller offset reaches it.
      d_weights = self._add_weights(d_weights, d_window, offset + 1)
      last_block = self._read_block(self.layout.segment_blocks - 1 - offset)
      window = jax.tree.map(_push_right, window, last_block)
      d_window = jax.tree.map(_push_right, d_window, wide_zeros(last_block))
      (d_block_queries, d_block_distances), d_keys = self._offset_gradient(
        offset, window, log_mass_AxK, d_mass_AxK, d_values_AxKxH
      )
      d_distances = self._add_distances(d_distances, d_block_distances, offset)
      d_window = add_trees(d_window, d_keys)
      d_queries = add_trees(d_queries, d_block_queries)
      return window, d_window, d_queries, d_distances, d_weights

    window = jax.tree.map(lambda array: jnp.roll(array, self.K, axis=1), window)
    d_window, d_queries, d_weights = wide_zeros((window, self.queries, self.weights))
    start = window, d_window, d_queries, d_distances, d_weights
    end = jax.lax.fori_loop(0, self.offsets, visit, start)
    _, d_keys, d_queries, d_distances, d_weights = end
    d_queries = jax.tree.map(self.layout.from_blocks, d_queries)
    return d_distances, d_queries, (d_keys, d_weights)

  def _start(self) -> Running:
    """Returns the running softmax before the first key."""
    A, K, H = self.queries.query.shape
    pair_score_AxK = pair_AxK = None
    if self.constants.return_pairs:
      S = self.layout.memory_length + self.layout.segment_length
      pair_score_AxK = jnp.full((A, K), -jnp.inf, self.wide)
      pair_AxK = jnp.full((A, K), S, jnp.int32)
    # The initial maximum is finite, so that the difference of two maxima is not NaN.
    lowest = jnp.finfo(self.wide).min / 2
    return Running(
      numerator_AxKxH=jnp.zeros((A, K, H), self.wide),
      mass_AxK=jnp.zeros((A, K), self.wide),
      max_AxK=jnp.full((A, K), lowest, self.wide),
      pair_score_AxK=pair_score_AxK,
      pair_AxK=pair_AxK,
    )

  def _read_block(self, j: jax.Array) -> KeysAndValues:
    """Returns keys and values [B, K, H] of block j."""

    def segment_keys() -> KeysAndValues:
      return _slice(self.keys, j * self.K, self.K)

    def memory_keys() -> KeysAndValues:
      return self._memory_keys(j, self.weights)

    if not self.layout.memory_blocks:
      return segment_keys()
    return jax.lax.cond(j < 0, memory_keys, segment_keys)

  def _memory_keys(self, j: jax.Array, weights: Any) -> KeysAndValues:
    """Returns keys and values [B, K, H] of block j of the memory."""
    first = (j + self.layout.memory_blocks) * self.K
    M = self.layout.memory_blocks * self.K

    def slice_block(array: jax.Array) -> jax.Array:
      return _slice(array, first, self.K + array.shape[1] - M)

    source = self.constants.source
    rows = jax.tree.map(slice_block, source.rows)
    key_BxKxH, value_BxKxH = source.read(weights, rows, source.cache, self.key_head_index)
    return KeysAndValues(key_BxKxH, value_BxKxH)

  def _add_weights(self, d_weights: Any, d_window: KeysAndValues, offset: jax.Array) -> Any:
    """Adds the gradient of the weights from the first block of a window."""
    if not self.layout.memory_blocks:
      return d_weights

    def memory_keys(weights: Any) -> KeysAndValues:
      return self._memory_keys(-offset, weights)

    keys, pullback = jax.vjp(memory_keys, self.weights)
    (d_block_weights,) = pullback(with_dtypes(_slice(d_window, 0, self.K), keys))
    return add_trees(d_weights, d_block_weights)

  def _inputs(self, offset: jax.Array) -> tuple[Queries, Distances]:
    """Returns the queries, and the encodings and biases of the distances of an offset."""
    first = self.layout.first_distance(offset)

    def take(array: jax.Array) -> jax.Array:
      return _slice(array, first, 2 * self.K - 1)[self._distance_row(array)]

    return self.queries, jax.tree.map(take, self.distances)

  def _add_distances(
    self, d_distances: Distances, d_block: Distances, offset: jax.Array
  ) -> Distances:
    """Adds the gradient of the distances of an offset."""

    def add(array: jax.Array, block: jax.Array) -> jax.Array:
      first = self._distance_row(array), self.layout.first_distance(offset)
      first += (0,) * (block.ndim - 1)
      rows = jax.lax.dynamic_slice(array, first, (1, *block.shape)) + block
      return jax.lax.dynamic_update_slice(array, rows, first)

    return jax.tree.map(add, d_distances, d_block)

  def _distance_row(self, array: jax.Array) -> jax.Array | int:
    """Returns the row of an array [N or 1, ...]."""
    return self.index if len(array) > 1 else 0

  def _scores(
    self, offset: jax.Array, inputs: tuple[Queries, Distances], key_AxKxH: jax.Array
  ) -> tuple[jax.Array, jax.Array | None]:
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

  def _weights(
    self, scores_AxKxK: jax.Array, unclipped_xxKxK: jax.Array | None, max_AxK: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of the values, and their mass for the queries."""
    exp_AxKxK = jnp.exp(scores_AxKxK - max_AxK[..., None])
    weights_AxKxK, mass_AxKxK = span.masked_weights(
      exp_AxKxK, unclipped_xxKxK, self.constants.renormalize
    )
    return weights_AxKxK, mass_AxKxK.sum(axis=-1)

  def _add(self, offset: jax.Array, window: KeysAndValues, before: Running) -> Running:
    """Adds the keys of an offset to the running softmax."""
    key_AxKxH = self.layout.to_blocks(window.key)
    value_AxKxH = self.layout.to_blocks(window.value)
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

  def _update_pairs(
    self,
    running: Running,
    offset: jax.Array,
    scores_AxKxK: jax.Array,
    unclipped_xxKxK: jax.Array | None,
  ) -> Running:
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

  def _offset_gradient(
    self,
    offset: jax.Array,
    window: KeysAndValues,
    log_mass_AxK: jax.Array,
    d_mass_AxK: jax.Array,
    d_values_AxKxH: jax.Array,
  ) -> tuple[tuple[Queries, Distances], KeysAndValues]:
    """Returns the gradients of `_inputs`, and of the keys and values of a window."""
    key_AxKxH = self.layout.to_blocks(window.key)
    value_AxKxH = self.layout.to_blocks(window.value)

    def weigh(inputs, key_AxKxH):
      scores_AxKxK, unclipped_xxKxK = self._scores(offset, inputs, key_AxKxH)
      return self._weights(scores_AxKxK, unclipped_xxKxK, log_mass_AxK)

    (weights_AxKxK, _), pullback = jax.vjp(weigh, self._inputs(offset), key_AxKxH)
    mask_AxKxK = self._dropout_mask(offset)
    d_weights_AxKxK = mask_AxKxK * self._product('aqh,akh->aqk', d_values_AxKxH, value_AxKxH)
    d_inputs, d_key_AxKxH = pullback((d_weights_AxKxK, d_mass_AxK))
    dropped_AxKxK = weights_AxKxK * mask_AxKxK
    d_value_AxKxH = self._product('aqk,aqh->akh', dropped_AxKxK, d_values_AxKxH)
    d_keys = KeysAndValues(
      self.layout.from_blocks(d_key_AxKxH), self.layout.from_blocks(d_value_AxKxH)
    )
    return d_inputs, d_keys

  def _dropout_mask(self, offset: jax.Array) -> jax.Array | float:
    """Returns the factors of the weights, [A, K, K]; 1 without dropout."""
    if not self.constants.drop.is_active:
      return 1.0
    T = self.keys.key.shape[1]
    row_AxK = self.layout.to_blocks(self.first_query_B[:, None] + jnp.arange(T))
    column_Ax1xK = self._key_index(offset)[:, None]
    columns = self.layout.memory_length + self.layout.segment_length
    drop = self.constants.drop
    return dropout.block_mask(drop.key, drop.rate, row_AxK, column_Ax1xK, columns)

  def _key_index(self, offset: jax.Array) -> jax.Array:
    """Returns the indices of the keys of an offset, int32 [A, K]; 0 is the first of the memory."""
    B, T = len(self.first_query_B), self.keys.key.shape[1]
    first = self.layout.memory_length - offset * self.K
    return self.layout.to_blocks(jnp.broadcast_to(first + jnp.arange(T), (B, T)))

  def _product(self, indices: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return products.wide_einsum(indices, a.astype(self.dtype), b.astype(self.dtype))


def _push_left(block_BxKxH: jax.Array, window_BxTxH: jax.Array) -> jax.Array:
  """Inserts a block before a window and drops its last block."""
  K, T = block_BxKxH.shape[1], window_BxTxH.shape[1]
  return jnp.concatenate([block_BxKxH, window_BxTxH[:, : T - K]], axis=1)


def _push_right(window_BxTxH: jax.Array, block_BxKxH: jax.Array) -> jax.Array:
  """Inserts a block after a window and drops its first block."""
  return jnp.concatenate([window_BxTxH[:, block_BxKxH.shape[1] :], block_BxKxH], axis=1)


def _slice(tree: Any, first: jax.Array | int, count: int) -> Any:
  """Slices axis 1 of all arrays of a tree."""

  def slice_array(array: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, first, count, 1)

  return jax.tree.map(slice_array, tree)


def add_trees(a: Any, b: Any) -> Any:
  """Adds the corresponding arrays of two trees."""
  return jax.tree.map(jnp.add, a, b)


def wide_zeros(tree: Any) -> Any:
  """Returns zeros of the shapes of a tree, in at least float32."""

  def zeros_like(array: jax.Array) -> jax.Array:
    return jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32))

  return jax.tree.map(zeros_like, tree)


def with_dtypes(tree: Any, like: Any) -> Any:
  """Returns a tree with the dtypes of another one."""
  return jax.tree.map(lambda array, other: array.astype(other.dtype), tree, like)
