"""The context of a segment, the same for all layers: documents, positions, visibility, cache slots.

B batch, T segment length, M memory, S = M + T keys, P tokens with a position: the segment memory
and the segment.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.config import kernels
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.attention import cache as caches
from ngrammer_jax.layers.attention.cache import CacheSlots
from ngrammer_jax.layers.attention.position import Rotation


@struct.dataclass
class Segment:
  """The inputs of a segment.

  Attributes:
    documents_BxT: document number of each token (see `document_masks.numbers`).
    starts_BxT: true at the first token of a document.
    valid_BxT: 0 at padding. None: no padding.
    prefix_BxT: true where attention is bidirectional. None: nowhere.
    tokens_BxT: ids, for memories.
  """

  documents_BxT: jax.Array
  starts_BxT: jax.Array
  valid_BxT: jax.Array | None = None
  prefix_BxT: jax.Array | None = None
  tokens_BxT: jax.Array | None = None


class EmbeddingLookup(NamedTuple):
  """The embedding lookup of the inputs: x = rows_VxD[tokens_BxT].

  rows_VxD may be None if the codebook holds `token_ids` (see `quantizer.ProductQuantizer`), and
  x_BxTxD outside of a model.
  """

  rows_VxD: jax.Array | None
  tokens_BxT: jax.Array
  x_BxTxD: jax.Array | None = None


@struct.dataclass
class Keys:
  """The keys of a segment and their visibility.

  Attributes:
    visible_BxTxS: true where a query may attend to a key; memory keys come first. None: attention
      works in blocks, with visibility from the document numbers.
    query_documents_BxT: document number of each query, `document_masks.PADDING` at padding. None:
      only `visible_BxTxS` is used.
    key_documents_BxS: document numbers of the keys; in blocks, oldest first.
    distance_BxTxS: from query to key, for keys in the order of cache slots. None: keys are in the
      order of tokens.
    order_BxM: cache slots, oldest first, for attention in blocks.
    window: the distance to a key is less than this number. None: no limit.
    sees_itself: whether a token attends to itself. If not, the nearest key is the previous token.
    has_prefix: whether some tokens attend to later ones.
    is_plain_causal: whether the mask is exactly causal within documents and the window.
    skips_cache: whether attention ignores the KV cache because it is empty.
  """

  visible_BxTxS: jax.Array | None = None
  query_documents_BxT: jax.Array | None = None
  key_documents_BxS: jax.Array | None = None
  distance_BxTxS: jax.Array | None = None
  order_BxM: jax.Array | None = None
  window: int | None = struct.field(pytree_node=False, default=None)
  sees_itself: bool = struct.field(pytree_node=False, default=True)
  has_prefix: bool = struct.field(pytree_node=False, default=False)
  is_plain_causal: bool = struct.field(pytree_node=False, default=False)
  skips_cache: bool = struct.field(pytree_node=False, default=False)

  @property
  def count(self) -> int:
    """S, number of keys."""
    if self.in_blocks:
      return self.key_documents_BxS.shape[1]
    return self.visible_BxTxS.shape[2]

  @property
  def in_blocks(self) -> bool:
    """Whether attention works in blocks of queries and keys."""
    return self.visible_BxTxS is None

  @property
  def is_short_prompt(self) -> bool:
    """Whether the KV cache is empty, and there are few queries (see `config.kernels`)."""
    return self.skips_cache and self.query_documents_BxT.shape[1] < kernels.MIN_PROMPT


@struct.dataclass
class Positions:
  """Positions, and their encodings shared by all layers.

  Attributes:
    position_BxP: position in its document of each token with a key or convolution. Without a
      memory, attention counts from the start of the segment. Memories count their own positions,
      see `document_masks.positions`.
    rotation: rotary angles of the same tokens (see `position.rotation`).
    params: parameters shared by all layers: u and v of `relative.RelativePosition`, the vectors of
      `relative.TablePosition`.
    distance_key: key of the dropout of distance encodings. None: no dropout.
    sink_shift_BxS: shift of the attention sinks (see `layers.attention.cache`). None: no sinks.
    sink_rotation: rotary angles of this shift.
  """

  position_BxP: jax.Array | None = None
  rotation: Rotation | None = None
  params: tuple[jax.Array, ...] | None = None
  distance_key: jax.Array | None = None
  sink_shift_BxS: jax.Array | None = None
  sink_rotation: Rotation | None = None


@struct.dataclass
class Context:
  """The layer-independent inputs of attention and memories.

  Memories read the tokens, attention the keys and their positions. A model always sets the tokens,
  starts, documents and vocabulary; a Transformer also sets the keys and positions. Layers used
  outside of a model may leave them None.

  Attributes:
    tokens_BxT: ids of the segment.
    starts_BxT: true at the first token of a document. At padding it may be true or false.
    documents_BxT: document number of each token.
    valid_BxT: 0 at padding. None, also in a model: no padding.
    vocabulary: the embedding lookup.
    pair_BxNxT: the most attended key of each query. A model sets it only after attention, for
      memories that need it.
    inputs_BxPxD: the normed inputs of attention for all tokens with computed values: segment
      memory, then segment. A model sets it only for memories in the values.
    shared: data read by several memories, by name. Shared table: vectors looked up by the last P
      tokens, [B, P, I, E], the segment last (see `ngram.memory`). Product keys: the tables (see
      `product_keys.memory`). Copies: their vectors (see `copy_memory`).
    slots_BxT: the cache slot of each token (see `layers.attention.cache`). None, also in a model:
      no KV cache.
    keys: the keys of attention.
    positions: the positions of queries and keys.
  """

  tokens_BxT: jax.Array | None = None
  starts_BxT: jax.Array | None = None
  documents_BxT: jax.Array | None = None
  valid_BxT: jax.Array | None = None
  vocabulary: EmbeddingLookup | None = None
  pair_BxNxT: jax.Array | None = None
  inputs_BxPxD: jax.Array | None = None
  shared: Mapping[str, Any] = struct.field(default_factory=dict)
  slots_BxT: jax.Array | None = None
  keys: Keys = Keys()
  positions: Positions = Positions()


def with_window(context: Context, window: int, prefix_BxT: jax.Array | None) -> Context:
  """Returns a context with at most `window` keys per token, including itself.

  Args:
    context: context of a segment.
    window: number of keys.
    prefix_BxT: prefix of the segment.
  """
  keys = context.keys
  narrower = window if keys.window is None else min(window, keys.window)
  keys = keys.replace(window=narrower)
  if not keys.in_blocks:
    keys = _with_visible(keys, prefix_BxT)
  return context.replace(keys=keys)


def _with_visible(keys: Keys, prefix_BxT: jax.Array | None) -> Keys:
  """Returns the keys with `visible_BxTxS`."""
  visible_BxTxS = document_masks.visible(
    keys.query_documents_BxT,
    keys.key_documents_BxS,
    prefix_BxT,
    keys.window,
    keys.distance_BxTxS,
    keys.sees_itself,
  )
  return keys.replace(visible_BxTxS=visible_BxTxS)


@struct.dataclass
class RecentTokens:
  """The tokens of a segment memory, the same for all layers.

  Attributes:
    documents: document number of each token, int32 [B, M].
    positions: position of each token in its document, int32 [B, M].
    position: position of the next token, int32 [B].
  """

  documents: jax.Array
  positions: jax.Array
  position: jax.Array

  def advance(
    self, documents_BxT: jax.Array, positions_BxT: jax.Array, valid_BxT: jax.Array | None
  ) -> 'RecentTokens':
    """Returns the tokens after a segment."""
    documents_BxM = caches.keep_last(self.documents, documents_BxT, valid_BxT)
    positions_BxM = caches.keep_last(self.positions, positions_BxT, valid_BxT)
    position_Bx1 = caches.keep_last(self.position[:, None], positions_BxT + 1, valid_BxT)
    return RecentTokens(documents_BxM, positions_BxM, position_Bx1[:, 0])


def empty_tokens(batch: int, length: int) -> RecentTokens:
  """Returns the tokens of a segment memory before the first segment."""
  return RecentTokens(
    documents=jnp.full((batch, length), document_masks.NONE, jnp.int32),
    positions=jnp.full((batch, length), document_masks.NONE, jnp.int32),
    position=jnp.zeros((batch,), jnp.int32),
  )


@struct.dataclass
class Visibility:
  """The mask options of a model (see `Context`)."""

  window: int | None = None
  sees_itself: bool = True
  across_documents: bool = False


def make(
  segment: Segment,
  visibility: Visibility,
  tokens: RecentTokens | CacheSlots | None = None,
  in_blocks: bool = False,
) -> tuple[Context, RecentTokens | CacheSlots | None]:
  """Returns the context of a segment, and the earlier tokens for the next segment.

  Args:
    segment: the inputs.
    visibility: mask options of the model.
    tokens: the earlier tokens, of a segment memory or of a KV cache. None: no earlier tokens.
    in_blocks: whether attention works in blocks.
  """
  documents_BxT = segment.documents_BxT
  starts_BxT = segment.starts_BxT
  if visibility.across_documents:  # attention sees one document, with consecutive positions
    documents_BxT = jnp.zeros_like(documents_BxT)
    starts_BxT = jnp.zeros_like(starts_BxT)
  keys = Keys(
    query_documents_BxT=document_masks.with_padding(documents_BxT, segment.valid_BxT),
    window=visibility.window,
    sees_itself=visibility.sees_itself,
    has_prefix=segment.prefix_BxT is not None,
  )
  has_mask = not keys.sees_itself or keys.has_prefix
  if tokens is None:
    position_BxT = document_masks.positions(starts_BxT)
  else:
    position_BxT = document_masks.positions(starts_BxT, tokens.position)
  position_BxP = position_BxT
  slots_BxT = None
  sink_shift_BxS = None
  if isinstance(tokens, CacheSlots):
    counted_BxT = segment.valid_BxT
    if counted_BxT is None:
      counted_BxT = jnp.ones(documents_BxT.shape, bool)
    if tokens.is_empty:
      keys = keys.replace(
        key_documents_BxS=keys.query_documents_BxT,
        is_plain_causal=not has_mask,
        skips_cache=True,
      )
    else:
      keys = _with_cache(keys, tokens, counted_BxT, in_blocks)
      sink_shift_BxS = tokens.sink_shift()
    slots_BxT = tokens.token_slots(documents_BxT, position_BxT, counted_BxT)
    tokens = tokens.advance(documents_BxT, position_BxT, counted_BxT)
  elif tokens is not None:
    key_documents_BxS = jnp.concatenate([tokens.documents, keys.query_documents_BxT], axis=1)
    keys = keys.replace(key_documents_BxS=key_documents_BxS)
    position_BxP = jnp.concatenate([tokens.positions, position_BxT], axis=1)
    tokens = tokens.advance(documents_BxT, position_BxT, segment.valid_BxT)
  else:
    keys = keys.replace(key_documents_BxS=keys.query_documents_BxT, is_plain_causal=not has_mask)
  if not in_blocks:
    keys = _with_visible(keys, segment.prefix_BxT)
  context = Context(
    tokens_BxT=segment.tokens_BxT,
    starts_BxT=segment.starts_BxT,
    documents_BxT=segment.documents_BxT,
    valid_BxT=segment.valid_BxT,
    slots_BxT=slots_BxT,
    keys=keys,
    positions=Positions(position_BxP, sink_shift_BxS=sink_shift_BxS),
  )
  return context, tokens


def _with_cache(keys: Keys, cache: CacheSlots, counted_BxT: jax.Array, in_blocks: bool) -> Keys:
  """Returns the keys in cache slots and the keys of the segment."""
  slot_documents_BxM = cache.documents
  order_BxM = None
  distance_BxTxS = None
  if in_blocks:
    order_BxM = cache.order()
    slot_documents_BxM = jnp.take_along_axis(slot_documents_BxM, order_BxM, axis=1)
  else:
    index_BxT = cache.indices(counted_BxT)
    index_BxS = jnp.concatenate([cache.index, index_BxT], axis=1)
    distance_BxTxS = index_BxT[:, :, None] - index_BxS[:, None, :]
  return keys.replace(
    key_documents_BxS=jnp.concatenate([slot_documents_BxM, keys.query_documents_BxT], axis=1),
    distance_BxTxS=distance_BxTxS,
    order_BxM=order_BxM,
  )
