"""Where one document ends and the next begins.

Everything that must not cross a document border (the n-gram predecessor, what a
query attends to, positions) is derived from the document number of each token,
and the document number only here: the number carried in the memory plus the
document starts seen since.

B batch, T segment length, S keys.
"""

import jax
import jax.numpy as jnp

NONE = -1  # document number of a memory slot that holds nothing
PADDING = -2  # document number of padding: it sees, and is seen by, padding only


def numbers(starts_BxT: jax.Array, carried_B: jax.Array | int = 0) -> jax.Array:
  """Document number of every token, int32 [B, T].

  Args:
    starts_BxT: true at the first token of a document.
    carried_B: number of the document that the memory ended in.
  """
  carried_B = jnp.asarray(carried_B, jnp.int32)
  return carried_B[..., None] + jnp.cumsum(starts_BxT, axis=1, dtype=jnp.int32)


def positions(starts_BxT: jax.Array, carried_B: jax.Array | int = 0) -> jax.Array:
  """Position since the last document start, int32 [B, T].

  Args:
    starts_BxT: true at the first token of a document.
    carried_B: position of the first token, where it starts no document. 0 counts from the
      beginning of the segment.
  """
  index_T = jnp.arange(starts_BxT.shape[1], dtype=jnp.int32)
  before_Bx1 = -jnp.asarray(carried_B, jnp.int32)[..., None]
  start_BxT = jnp.where(starts_BxT, index_T, before_Bx1)
  return index_T - jax.lax.cummax(start_BxT, axis=1)


def with_padding(documents_BxT: jax.Array, valid_BxT: jax.Array | None) -> jax.Array:
  """Document numbers with padding set apart."""
  if valid_BxT is None:
    return documents_BxT
  return jnp.where(valid_BxT.astype(bool), documents_BxT, PADDING)


def distances(T: int, S: int) -> jax.Array:
  """How many tokens a key is behind a query, int32 [1, T, S], where they stand in order."""
  return (jnp.arange(S - T, S)[:, None] - jnp.arange(S)[None, :])[None]


def visible(
  query_documents_BxT: jax.Array,
  key_documents_BxS: jax.Array,
  prefix_BxT: jax.Array | None = None,
  window: int | None = None,
  distance_BxTxS: jax.Array | None = None,
  sees_itself: bool = True,
) -> jax.Array:
  """Which keys each query attends to, bool [B, T, S].

  The last T keys are the queries' own positions, whatever comes before them is
  memory. A query sees its own document, up to and including itself, and beside
  that the whole bidirectional prefix of its document. With a `window` it sees keys less than so
  many tokens away; distances tell how far back a key is where they stand in no order.
  """
  T, S = query_documents_BxT.shape[1], key_documents_BxS.shape[1]
  causal_TxS = jnp.arange(S)[None, :] <= jnp.arange(S - T, S)[:, None]
  seen_BxTxS = causal_TxS[None]
  if prefix_BxT is not None:
    prefix_BxS = jnp.pad(prefix_BxT.astype(bool), ((0, 0), (S - T, 0)))
    seen_BxTxS = seen_BxTxS | prefix_BxS[:, None, :]
  if distance_BxTxS is None:
    distance_BxTxS = distances(T, S)
  if window is not None:
    seen_BxTxS = seen_BxTxS & (distance_BxTxS < window)
  if not sees_itself:
    seen_BxTxS = seen_BxTxS & (distance_BxTxS != 0)
  same_BxTxS = query_documents_BxT[:, :, None] == key_documents_BxS[:, None, :]
  return seen_BxTxS & same_BxTxS
