"""Layout of blocks: the blocks visited by attention, and the visible keys in them.

Tokens are numbered from the first of the segment; the tokens of a memory have negative numbers.
Block j holds the tokens j K to (j + 1) K - 1: the blocks -J to -1 are the memory, 0 to I - 1 the
segment. The first block of the memory and the last block of the segment are padded. At an offset o,
every block i of queries is paired with block i - o of the keys; some are before the memory.

The visible keys of a head depend on its span, the documents and padding. All three are data, so the
number of offsets is an array.

B batch, T queries, M memory, S = M + T keys, N heads, K tokens of a block, J and I see above,
A = B I blocks of queries in all rows.
"""

from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.context import Keys

QUERY_PADDING = -3  # document number of the queries that pad the last block; no key has it


@struct.dataclass
class BlockLayout:
  """The blocks of a segment and its memory.

  Attributes:
    query_documents_BxT: document numbers of the queries, padded to a multiple of K.
    key_documents_BxS: document numbers of the keys, padded in the same way, preceded by as many
      keys without a document as there are queries.
    memory_length: M, without padding.
    segment_length: T, without padding.
    block_size: K.
    window: the distance to a key is less than this number. None: no limit.
    sees_itself: whether a token attends to itself.
  """

  query_documents_BxT: jax.Array
  key_documents_BxS: jax.Array
  memory_length: int = struct.field(pytree_node=False)
  segment_length: int = struct.field(pytree_node=False)
  block_size: int = struct.field(pytree_node=False)
  window: int | None = struct.field(pytree_node=False)
  sees_itself: bool = struct.field(pytree_node=False)

  @property
  def memory_blocks(self) -> int:
    """J, number of blocks of the memory."""
    return -(-self.memory_length // self.block_size)

  @property
  def segment_blocks(self) -> int:
    """I, number of blocks of the segment."""
    return -(-self.segment_length // self.block_size)

  @property
  def padded_keys(self) -> int:
    """Number of tokens of all blocks."""
    return (self.memory_blocks + self.segment_blocks) * self.block_size

  def distance(self, offset: jax.Array) -> jax.Array:
    """Returns the distances [K, K] from the queries of a block to the keys of an offset."""
    index_K = jnp.arange(self.block_size)
    return offset * self.block_size + index_K[:, None] - index_K

  def nearest_distance(self, offset: jax.Array) -> jax.Array:
    """Returns the same distances, counted from the nearest visible key."""
    return self.distance(offset) - (not self.sees_itself)

  def visible(self, offset: jax.Array) -> jax.Array:
    """Returns which keys of an offset the queries attend to, bool [A, K, K]."""
    visible_KxK = self.nearest_distance(offset) >= 0
    if self.window is not None:
      visible_KxK &= self.distance(offset) < self.window
    T = self.query_documents_BxT.shape[1]
    first = (self.memory_blocks - offset) * self.block_size + T
    key_BxT = jax.lax.dynamic_slice_in_dim(self.key_documents_BxS, first, T, 1)
    query_AxK = self.to_blocks(self.query_documents_BxT)
    key_AxK = self.to_blocks(key_BxT)
    return visible_KxK & (query_AxK[:, :, None] == key_AxK[:, None])

  def offsets(self, longest_NxB: jax.Array | None, N: int) -> jax.Array:
    """Returns the number of offsets that each head visits, int32 [N].

    `longest_NxB` are the longest spans of the queries; None without learned spans.
    """
    K = self.block_size
    documents_BxS = self.key_documents_BxS
    index_S = jnp.arange(documents_BxS.shape[1])
    is_first_BxS = jnp.diff(documents_BxS, axis=1, prepend=documents_BxS[:, :1]) != 0
    first_BxS = jax.lax.cummax(jnp.where(is_first_BxS, index_S, 0), axis=1)
    reach_B = (index_S - first_BxS)[:, -self.query_documents_BxT.shape[1] :].max(axis=1)
    if self.window is not None:
      reach_B = jnp.minimum(reach_B, self.window - 1)
    reach_NxB = jnp.broadcast_to(reach_B, (N, len(reach_B)))
    if longest_NxB is not None:
      longest_NxB = jnp.nan_to_num(longest_NxB).astype(jnp.int32) + (not self.sees_itself)
      reach_NxB = jnp.minimum(reach_NxB, longest_NxB)
    # The nearest pair of an offset o > 0 is (o - 1) K + 1 tokens apart.
    offsets_N = (reach_NxB.max(axis=1) - 1) // K + 2
    return jnp.minimum(offsets_N, self.memory_blocks + self.segment_blocks)

  def to_blocks(self, array_BxTx: jax.Array) -> jax.Array:
    """Reshapes [B, I K, ...] to [A, K, ...]; [1, 1] (equal for all queries) is unchanged."""
    if array_BxTx.shape == (1, 1):
      return array_BxTx
    return array_BxTx.reshape(-1, self.block_size, *array_BxTx.shape[2:])

  def from_blocks(self, array_AxKx: jax.Array) -> jax.Array:
    """Reverts `to_blocks`."""
    if array_AxKx.shape == (1, 1):
      return array_AxKx
    B, T = self.query_documents_BxT.shape
    return array_AxKx.reshape(B, T, *array_AxKx.shape[2:])

  def pad_memory(self, array: jax.Array) -> jax.Array:
    """Pads the first block of an array [B, M, ...] or [B, S, ...]."""
    return pad(array, 1, (-self.memory_length % self.block_size, 0))

  def pad_segment(self, array: jax.Array, axis: int) -> jax.Array:
    """Pads the last block of an axis T."""
    return pad(array, axis, (0, -self.segment_length % self.block_size))

  def pad_distances(self, array_NxSx: jax.Array) -> jax.Array:
    """Pads an array over the distances S - 1 down to 0, so that each pair of blocks has a slice."""
    before = self.padded_keys - array_NxSx.shape[1]
    return pad(array_NxSx, 1, (before, self.block_size))

  def first_distance(self, offset: jax.Array) -> jax.Array:
    """Returns the first index of the 2 K - 1 distances of an offset in the padded array."""
    return self.padded_keys - (offset + 1) * self.block_size


def make(keys: Keys, block_size: int) -> BlockLayout:
  """Returns the layout of a segment."""
  T = keys.query_documents_BxT.shape[1]
  S = keys.key_documents_BxS.shape[1]
  after = -T % block_size
  before = (T - S) % block_size + T + after
  return BlockLayout(
    query_documents_BxT=pad(keys.query_documents_BxT, 1, (0, after), QUERY_PADDING),
    key_documents_BxS=pad(keys.key_documents_BxS, 1, (before, after), document_masks.NONE),
    memory_length=S - T,
    segment_length=T,
    block_size=block_size,
    window=keys.window,
    sees_itself=keys.sees_itself,
  )


def pad(array: jax.Array, axis: int, widths: tuple[int, int], value: int = 0) -> jax.Array:
  """Pads an axis with a value, before and after."""
  padding = [(0, 0)] * array.ndim
  padding[axis] = widths
  return jnp.pad(array, padding, constant_values=value)
