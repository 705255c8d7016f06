"""The KV cache.

Every row of a batch has a ring of M slots: the slot of a token is its number in the row modulo M,
where padding is not counted. Keys are stored as they are used, rotated by the position of their
token.

B batch, T segment length, M slots, N heads, H head width.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import documents

Cache = dict[str, Any]


def empty(batch: int, slots: int) -> Cache:
  """The slots of an empty cache, the same for all layers.

  Keys: `documents` int32 [B, M], document numbers of the tokens in the slots; `index` int32 [B, M],
  numbers of these tokens in their row; `count` int32 [B], tokens so far; `position` int32 [B] of
  the next token in its document.
  """
  return {
    'documents': jnp.full((batch, slots), documents.NONE, jnp.int32),
    'index': jnp.zeros((batch, slots), jnp.int32),
    'count': jnp.zeros((batch,), jnp.int32),
    'position': jnp.zeros((batch,), jnp.int32),
  }


def empty_layer(
  batch: int,
  slots: int,
  heads: int,
  H: int,
  dtype: jnp.dtype,
  rows: Mapping[str, tuple[int, int]] | None = None,
) -> Cache:
  """The empty cache of one layer.

  Keys: `keys` and `values` [B, N, M, H]; and for each name in `rows`, which gives R and N, the last
  R inputs of a convolution, [B, R, N, H].
  """
  shapes = {'keys': (heads, slots), 'values': (heads, slots), **(rows or {})}
  return {name: jnp.zeros((batch, *shape, H), dtype) for name, shape in shapes.items()}


def slots(cache: Cache, valid_BxT: jax.Array) -> jax.Array:
  """The slot of every token, int32 [B, T]; M for padding and tokens that are not stored."""
  M = cache['documents'].shape[1]
  index_BxT = indices(cache, valid_BxT)
  is_stored_BxT = valid_BxT.astype(bool) & (index_BxT > index_BxT[:, -1:] - M)
  return jnp.where(is_stored_BxT, index_BxT % M, M)


def indices(cache: Cache, valid_BxT: jax.Array) -> jax.Array:
  """The number of every token in its row; that of padding is the number of the token before."""
  rank_BxT = jnp.cumsum(valid_BxT.astype(bool), axis=1, dtype=jnp.int32)
  return cache['count'][:, None] + rank_BxT - 1


def order(cache: Cache) -> jax.Array:
  """The slots in the order of their tokens, oldest first, int32 [B, M]."""
  M = cache['documents'].shape[1]
  return (cache['count'][:, None] + jnp.arange(M)) % M


def write(
  old_BxNxMxH: jax.Array, slots_BxT: jax.Array, new_BxTxNxH: jax.Array, after_BxTxD: jax.Array
) -> jax.Array:
  """Puts the keys, the values or (without H) the ids of tokens into their slots, in place.

  `after_BxTxD` was computed from the old ones. If XLA does not know that these are read before they
  are overwritten, it copies all of them at every token. An optimization barrier does not help, a
  zero that depends on the result does.
  """
  first_B = after_BxTxD[:, 0, 0]
  zero_Bx1 = (jnp.isnan(first_B) & jnp.isinf(first_B)).astype(jnp.int32)[:, None]
  row_Bx1 = jnp.arange(old_BxNxMxH.shape[0])[:, None]
  return old_BxNxMxH.at[row_Bx1, :, slots_BxT + zero_Bx1].set(new_BxTxNxH, mode='drop')


def last(before_BxRx: jax.Array, new_BxTx: jax.Array, valid_BxT: jax.Array | None) -> jax.Array:
  """The last R of what came before and the valid tokens of a segment, oldest first."""
  R, T = before_BxRx.shape[1], new_BxTx.shape[1]
  joined_BxSx = jnp.concatenate([before_BxRx, new_BxTx], axis=1)
  if valid_BxT is None:
    return joined_BxSx[:, T:]
  # Without a valid token in the segment, this is all of what came before.
  end_Bx1 = jnp.where(valid_BxT > 0, jnp.arange(1, T + 1), 0).max(axis=1, keepdims=True)
  index_BxR = end_Bx1 + jnp.arange(R)
  return jnp.take_along_axis(
    joined_BxSx, index_BxR.reshape(*index_BxR.shape, *[1] * (new_BxTx.ndim - 2)), axis=1
  )


def advance(
  cache: Cache,
  slots_BxT: jax.Array,
  documents_BxT: jax.Array,
  positions_BxT: jax.Array,
  valid_BxT: jax.Array,
) -> Cache:
  """The slots after a segment, see `empty`."""
  row_Bx1 = jnp.arange(slots_BxT.shape[0])[:, None]
  put = lambda name, new: cache[name].at[row_Bx1, slots_BxT].set(new, mode='drop')
  return {
    'documents': put('documents', documents_BxT),
    'index': put('index', indices(cache, valid_BxT)),
    'count': cache['count'] + (valid_BxT > 0).sum(axis=1, dtype=jnp.int32),
    'position': last(cache['position'][:, None], positions_BxT + 1, valid_BxT)[:, 0],
  }
