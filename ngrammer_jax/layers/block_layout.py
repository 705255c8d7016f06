"""Layout of blocks: which blocks attention visits, and which of their keys the queries see.

Tokens are numbered from the first of the segment; the tokens of a memory have negative numbers.
Block j holds the tokens j K to (j + 1) K - 1: the blocks -J to -1 are the memory, 0 to I - 1 the
segment. The first block of the memory and the last block of the segment are padded.

The keys that a head sees depend on its span, on the documents and on padding. These are data, so
the bounds of the loops over blocks are arrays.

B batch, T queries, M memory, S = M + T keys, N heads, K tokens of a block, J and I see above.
"""

from flax import struct
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import documents
from ngrammer_jax.layers.context import Context

NO_LIMIT = 2**30  # larger than any distance; adding a distance does not overflow
QUERY_PADDING = -3  # document number of the queries that pad the last block; no key has it


@struct.dataclass
class Layout:
  """The blocks of a segment and its memory.

  Attributes:
    query_documents_BxT: document numbers of the queries, padded to a multiple of K.
    key_documents_BxS: document numbers of the keys, padded in the same way.
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

  def distance(self, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the distances [K, K] from the queries of block i to the keys of block j."""
    index_K = jnp.arange(self.block_size)
    return (i - j) * self.block_size + index_K[:, None] - index_K

  def nearest_distance(self, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns these distances, counted from the nearest key that a query may see."""
    return self.distance(i, j) - (not self.sees_itself)

  def visible(self, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns which keys of block j the queries of block i attend to, bool [B, K, K]."""
    K = self.block_size
    visible_KxK = self.nearest_distance(i, j) >= 0
    if self.window is not None:
      visible_KxK &= self.distance(i, j) < self.window
    query_BxK = jax.lax.dynamic_slice_in_dim(self.query_documents_BxT, i * K, K, 1)
    first = (j + self.memory_blocks) * K
    key_BxK = jax.lax.dynamic_slice_in_dim(self.key_documents_BxS, first, K, 1)
    return visible_KxK & (query_BxK[:, :, None] == key_BxK[:, None])

  def max_distance(self, longest_NxB: jax.Array | None, N: int) -> jax.Array:
    """Returns the maximum distance to a key, int32 [N, B].

    `longest_NxB` are the longest spans of the queries; None without learned spans.
    """
    limit = NO_LIMIT if self.window is None else self.window - 1
    limit_NxB = jnp.full((N, len(self.query_documents_BxT)), limit, jnp.int32)
    if longest_NxB is None:
      return limit_NxB
    longest_NxB = jnp.nan_to_num(longest_NxB).astype(jnp.int32) + (not self.sees_itself)
    return jnp.minimum(limit_NxB, longest_NxB)

  def first_block(self, max_distance_NxB: jax.Array) -> jax.Array:
    """Returns the first block of keys that any query sees, int32 [N], at most 0."""
    last_J = jnp.arange(1 - self.memory_blocks, 1) * self.block_size - 1  # last key of each block
    documents_BxT = jnp.where(self.query_documents_BxT < 0, NO_LIMIT, self.query_documents_BxT)
    # Documents and positions increase: if no query sees a block, none sees an earlier one.
    key_documents_BxJ = self.key_documents_BxS[:, self.memory_blocks * self.block_size + last_J]
    same_BxJ = key_documents_BxJ >= documents_BxT.min(axis=1, keepdims=True)
    near_NxBxJ = -last_J <= max_distance_NxB[..., None]
    return -(same_BxJ & near_NxBxJ).any(axis=1).sum(axis=1, dtype=jnp.int32)

  def query_blocks(self, j: jax.Array, max_distance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bounds of the blocks of queries that see keys of block j."""
    farthest = (j + 1) * self.block_size - 1 + max_distance
    return jnp.maximum(j, 0), jnp.minimum(farthest // self.block_size + 1, self.segment_blocks)

  def pad_memory(self, array: jax.Array, value: int = 0) -> jax.Array:
    """Pads the first block of an array [B, M, ...] or [B, S, ...]."""
    return pad(array, 1, (-self.memory_length % self.block_size, 0), value)

  def pad_segment(self, array: jax.Array, axis: int) -> jax.Array:
    """Pads the last block of an axis T."""
    return pad(array, axis, (0, -self.segment_length % self.block_size))

  def pad_distances(self, array_NxSx: jax.Array) -> jax.Array:
    """Pads an array over the distances S - 1 down to 0, so that each pair of blocks has a slice."""
    S = self.key_documents_BxS.shape[1]
    return pad(array_NxSx, 1, (S - array_NxSx.shape[1], self.block_size))

  def first_distance(self, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the index in the padded array at which the 2 K - 1 distances of two blocks begin."""
    return self.key_documents_BxS.shape[1] - (i - j + 1) * self.block_size


def make(context: Context, block_size: int) -> Layout:
  """Returns the layout of a segment."""
  T, S = context.query_documents_BxT.shape[1], context.key_documents_BxS.shape[1]
  before, after = (T - S) % block_size, -T % block_size
  return Layout(
    pad(context.query_documents_BxT, 1, (0, after), QUERY_PADDING),
    pad(context.key_documents_BxS, 1, (before, after), documents.NONE),
    S - T,
    T,
    block_size,
    context.window,
    context.sees_itself,
  )


def pad(array: jax.Array, axis: int, widths: tuple[int, int], value: int = 0) -> jax.Array:
  """Pads an axis with a value, before and after."""
  padding = [(0, 0)] * array.ndim
  padding[axis] = widths
  return jnp.pad(array, padding, constant_values=value)
