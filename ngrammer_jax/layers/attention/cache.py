"""The KV cache of evaluation and decoding.

Every row of a batch has M slots. The first S are for attention sinks: the first tokens of the last
document, kept permanently (StreamingLLM, Xiao et al. 2023). The others are a ring buffer: the slot
of a token is S plus its index in the stream modulo M - S, not counting padding. Keys are stored
after rotation by the position of their token. Once a document has left the ring, its sinks are
rotated further when they are read, to the positions right before the oldest token left.

B batch, T segment length, M slots, S sinks, N heads, H head width, R rows before a convolution.
"""

from collections.abc import Mapping

from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.attention import position


@struct.dataclass
class CacheSlots:
  """The tokens in the cache slots, the same for all layers.

  Attributes:
    documents: document number of each slot, int32 [B, M].
    index: index of its token in the stream, int32 [B, M].
    count: number of tokens in the stream so far, int32 [B].
    position: position of the next token in its document, int32 [B].
    sinks: S.
    is_empty: whether the cache is statically empty; attention then skips the slots.
  """

  documents: jax.Array
  index: jax.Array
  count: jax.Array
  position: jax.Array
  sinks: int = struct.field(pytree_node=False, default=0)
  is_empty: bool = struct.field(pytree_node=False, default=False)

  def indices(self, valid_BxT: jax.Array) -> jax.Array:
    """Returns the stream index of every token; padding has the index of the token before it."""
    rank_BxT = jnp.cumsum(valid_BxT.astype(bool), axis=1, dtype=jnp.int32)
    return self.count[:, None] + rank_BxT - 1

  def token_slots(
    self, documents_BxT: jax.Array, positions_BxT: jax.Array, valid_BxT: jax.Array
  ) -> jax.Array:
    """Returns the slot of every token, int32 [B, T]; M, out of range, if it is not stored."""
    M, S = self.documents.shape[1], self.sinks
    index_BxT = self.indices(valid_BxT)
    is_valid_BxT = valid_BxT.astype(bool)
    is_stored_BxT = is_valid_BxT & (index_BxT > index_BxT[:, -1:] - (M - S))
    slots_BxT = jnp.where(is_stored_BxT, S + index_BxT % (M - S), M)
    if not S:
      return slots_BxT
    valid_documents_BxT = jnp.where(is_valid_BxT, documents_BxT, document_masks.NONE)
    last_Bx1 = valid_documents_BxT.max(axis=1, keepdims=True)
    is_sink_BxT = is_valid_BxT & (positions_BxT < S) & (documents_BxT == last_Bx1)
    return jnp.where(is_sink_BxT, positions_BxT, slots_BxT)

  def order(self) -> jax.Array:
    """Returns the slots in the order of their tokens, empty ones first, int32 [B, M]."""
    is_empty_BxM = self.documents == document_masks.NONE
    return jnp.argsort(jnp.where(is_empty_BxM, -1, self.index), axis=1)

  def sink_shift(self) -> jax.Array | None:
    """Returns by how many positions the sinks are moved, int32 [B, S]; None without sinks."""
    if not self.sinks:
      return None
    shift_Bx1 = jnp.maximum(self.position[:, None] - self.documents.shape[1], 0)
    return jnp.broadcast_to(shift_Bx1, (len(shift_Bx1), self.sinks))

  def advance(
    self, documents_BxT: jax.Array, positions_BxT: jax.Array, valid_BxT: jax.Array
  ) -> 'CacheSlots':
    """Returns the slots after a segment."""
    row_Bx1 = jnp.arange(len(self.count))[:, None]
    slots_BxT = self.token_slots(documents_BxT, positions_BxT, valid_BxT)

    def put(old_BxM: jax.Array, new_BxT: jax.Array) -> jax.Array:
      return old_BxM.at[row_Bx1, slots_BxT].set(new_BxT, mode='drop')

    return self.replace(
      documents=put(self.documents, documents_BxT),
      index=put(self.index, self.indices(valid_BxT)),
      count=self.count + (valid_BxT > 0).sum(axis=1, dtype=jnp.int32),
      position=keep_last(self.position[:, None], positions_BxT + 1, valid_BxT)[:, 0],
      is_empty=False,
    )


@struct.dataclass
class KeyValues:
  """The KV cache of one layer.

  Attributes:
    keys, values: keys and values of the tokens in the slots, [B, N, M, H].
    rows: the last inputs of each convolution, [B, R, N, H], by name: `query`, `key` or `value`.
  """

  keys: jax.Array
  values: jax.Array
  rows: dict[str, jax.Array]

  def with_rotated_sinks(self, rotation: position.Rotation | None) -> 'KeyValues':
    """Returns the cache to read, with sinks rotated further; unchanged for None."""
    if rotation is None:
      return self
    sinks_BxSxNxH = self.keys[:, :, : rotation.sin.shape[1]].swapaxes(1, 2)
    sinks_BxNxSxH = position.rotate(sinks_BxSxNxH, rotation).swapaxes(1, 2)
    return self.replace(keys=jax.lax.dynamic_update_slice(self.keys, sinks_BxNxSxH, (0, 0, 0, 0)))


def empty_slots(batch: int, slots: int, sinks: int = 0) -> CacheSlots:
  """Returns slots without tokens."""
  return CacheSlots(
    documents=jnp.full((batch, slots), document_masks.NONE, jnp.int32),
    index=jnp.zeros((batch, slots), jnp.int32),
    count=jnp.zeros((batch,), jnp.int32),
    position=jnp.zeros((batch,), jnp.int32),
    sinks=min(sinks, slots - 1),
  )


def empty_layer(
  shape: tuple[int, int, int, int], dtype: jnp.dtype, rows: Mapping[str, tuple[int, int]]
) -> KeyValues:
  """Returns the KV cache of a layer before the first segment.

  Args:
    shape: B, N, M and H.
    dtype: dtype of the activations.
    rows: R and N of each convolution, by name.
  """
  B, _, _, H = shape
  rows = {name: jnp.zeros((B, *size, H), dtype) for name, size in rows.items()}
  return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), rows)


def write(
  old_BxNxMxH: jax.Array, slots_BxT: jax.Array, new_BxTxNxH: jax.Array, after_BxTxD: jax.Array
) -> jax.Array:
  """Writes the keys, the values or (without H) the ids of tokens into their slots, in place.

  `after_BxTxD` was computed from the old values. If XLA cannot prove that the old values are read
  before they are overwritten, it copies all of them for every token. An optimization barrier does
  not help; a zero that depends on the result does.
  """
  first_B = after_BxTxD[:, 0, 0]
  zero_Bx1 = (jnp.isnan(first_B) & jnp.isinf(first_B)).astype(jnp.int32)[:, None]
  row_Bx1 = jnp.arange(old_BxNxMxH.shape[0])[:, None]
  return old_BxNxMxH.at[row_Bx1, :, slots_BxT + zero_Bx1].set(new_BxTxNxH, mode='drop')


def keep_last(
  before_BxRx: jax.Array, new_BxTx: jax.Array, valid_BxT: jax.Array | None
) -> jax.Array:
  """Returns the last R of the earlier rows and the valid rows of a segment, oldest first."""
  R, T = before_BxRx.shape[1], new_BxTx.shape[1]
  joined_BxSx = jnp.concatenate([before_BxRx, new_BxTx], axis=1)
  if valid_BxT is None:
    return joined_BxSx[:, T:]
  # The next segment continues after the last valid token, which may be in an earlier segment.
  end_B = jnp.where(valid_BxT > 0, jnp.arange(1, T + 1), 0).max(axis=1)

  def take_rows(rows_Sx: jax.Array, end: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows_Sx, end, R)

  return jax.vmap(take_rows)(joined_BxSx, end_B)
