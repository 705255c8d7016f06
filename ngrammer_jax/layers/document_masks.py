"""Document numbers of tokens.

N-grams, attention and positions must not cross a document boundary. All derive from the document
number of each token: the number carried in the memory plus the document starts since.

B batch, T segment length, S keys.
"""

import jax
import jax.numpy as jnp

NONE = -1  # document number of an empty memory slot
PADDING = -2  # document number of padding, which attends to padding only


def numbers(starts_BxT: jax.Array, carried_B: jax.Array | int = 0) -> jax.Array:
  """Returns the document number of every token, int32 [B, T].

  Args:
    starts_BxT: true at the first token of a document.
    carried_B: document number of the last token before the segment.
  """
  carried_B = jnp.asarray(carried_B, jnp.int32)
  return carried_B[..., None] + jnp.cumsum(starts_BxT, axis=1, dtype=jnp.int32)


def last_number(
  starts_BxT: jax.Array, valid_BxT: jax.Array | None, carried_B: jax.Array | int
) -> jax.Array:
  """Returns the document number of the last non-padding token, int32 [B].

  The next segment continues its document. For the arguments see `numbers`; `valid_BxT` is 0 at
  padding, where no document starts.
  """
  if valid_BxT is not None:
    starts_BxT = starts_BxT & (valid_BxT > 0)
  return numbers(starts_BxT, carried_B)[:, -1]


def positions(starts_BxT: jax.Array, carried_B: jax.Array | int = 0) -> jax.Array:
  """Returns the position since the last document start, int32 [B, T].

  Args:
    starts_BxT: true at the first token of a document.
    carried_B: position of the first token of the segment, unless it starts a document.
  """
  index_T = jnp.arange(starts_BxT.shape[1], dtype=jnp.int32)
  before_Bx1 = -jnp.asarray(carried_B, jnp.int32)[..., None]
  start_BxT = jnp.where(starts_BxT, index_T, before_Bx1)
  return index_T - jax.lax.cummax(start_BxT, axis=1)


def with_padding(documents_BxT: jax.Array, valid_BxT: jax.Array | None) -> jax.Array:
  """Returns the document numbers, `PADDING` at padding."""
  if valid_BxT is None:
    return documents_BxT
  return jnp.where(valid_BxT.astype(bool), documents_BxT, PADDING)


def distances(T: int, S: int) -> jax.Array:
  """Returns the distances from queries to keys in order, int32 [1, T, S]."""
  return (jnp.arange(S - T, S)[:, None] - jnp.arange(S)[None, :])[None]


def visible(
  query_documents_BxT: jax.Array,
  key_documents_BxS: jax.Array,
  prefix_BxT: jax.Array | None = None,
  window: int | None = None,
  distance_BxTxS: jax.Array | None = None,
  sees_itself: bool = True,
) -> jax.Array:
  """Returns which keys each query attends to, bool [B, T, S].

  Memory keys come first, then the T keys of the segment. A query sees the keys of its document up
  to its own, and the bidirectional prefix of its document.

  Args:
    query_documents_BxT: document numbers of the queries.
    key_documents_BxS: document numbers of the keys.
    prefix_BxT: true at the prefixes of documents. None: no prefixes.
    window: the distance to a key is less than this number. None: no limit.
    distance_BxTxS: from query to key. None: keys are in order.
    sees_itself: whether a token attends to itself.
  """
  T = query_documents_BxT.shape[1]
  S = key_documents_BxS.shape[1]
  causal_TxS = jnp.arange(S)[None, :] <= jnp.arange(S - T, S)[:, None]
  visible_BxTxS = causal_TxS[None]
  if prefix_BxT is not None:
    prefix_BxS = jnp.pad(prefix_BxT.astype(bool), ((0, 0), (S - T, 0)))
    visible_BxTxS = visible_BxTxS | prefix_BxS[:, None, :]
  if distance_BxTxS is None:
    distance_BxTxS = distances(T, S)
  if window is not None:
    visible_BxTxS = visible_BxTxS & (distance_BxTxS < window)
  if not sees_itself:
    visible_BxTxS = visible_BxTxS & (distance_BxTxS != 0)
  same_BxTxS = query_documents_BxT[:, :, None] == key_documents_BxS[:, None, :]
  return visible_BxTxS & same_BxTxS
