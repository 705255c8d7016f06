"""Keys and values of the tokens already seen, so that no token is computed twice.

Every row of a batch has M slots, filled in turn and then, the oldest first, filled again.
Which slot a token takes depends on the tokens before it in its own row alone: padding takes
none. A slot knows the document of its token. Keys are kept as they were when their token
came, turned by its position: a position stays what it is, and no key is turned again.

B batch, T segment length, M slots, N heads, H head width.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import documents

Cache = dict[str, Any]


def empty(batch: int, slots: int) -> Cache:
  """What all layers know of the slots of a cache that holds nothing.

  Keys: `documents` int32 [B, M] of each slot, and `index`, the number of its token from the
  first on; `count` int32 [B], tokens seen; `position` int32 [B] of the next token.
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
  """What one layer keeps, still empty.

  Keys: `keys` and `values` [B, N, M, H], and by the names of `rows`, which have R and N, the last
  R inputs of what looks back so far, [B, R, N, H].
  """
  kept = {name: jnp.zeros((batch, heads, slots, H), dtype) for name in ('keys', 'values')}
  rows = rows or {}
  return kept | {name: jnp.zeros((batch, *rows[name], H), dtype) for name in rows}


def slots(cache: Cache, valid_BxT: jax.Array) -> jax.Array:
  """The slot of every token, int32 [B, T]; M, where there is none, for what is not kept."""
  M = cache['documents'].shape[1]
  index_BxT = indices(cache, valid_BxT)
  kept_BxT = valid_BxT.astype(bool) & (index_BxT > index_BxT[:, -1:] - M)
  return jnp.where(kept_BxT, index_BxT % M, M)


def indices(cache: Cache, valid_BxT: jax.Array) -> jax.Array:
  """The number of every token from the first that was seen on; of padding, that before it."""
  rank_BxT = jnp.cumsum(valid_BxT.astype(bool), axis=1, dtype=jnp.int32)
  return cache['count'][:, None] + rank_BxT - 1


def newest(cache: Cache, count: int) -> jax.Array:
  """The slots of the last `count` tokens, oldest first, int32 [B, count]."""
  M = cache['documents'].shape[1]
  return (cache['count'][:, None] + jnp.arange(-count, 0)) % M


def write(
  old_BxNxMxH: jax.Array, slots_BxT: jax.Array, new_BxTxNxH: jax.Array, after_BxTxD: jax.Array
) -> jax.Array:
  """Puts the keys, the values or (without H) the ids of tokens into their slots, in place.

  `after_BxTxD` is what was computed from the old ones. Where XLA does not see that they are
  read before they are overwritten, it copies all of them at every token; an optimization
  barrier does not tell it, a zero that depends on the result does.
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
  # The next segment continues after the last token that is one, maybe one of those before.
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
  """What the cache knows of its tokens after a segment."""
  row_Bx1 = jnp.arange(slots_BxT.shape[0])[:, None]
  put = lambda name, new: cache[name].at[row_Bx1, slots_BxT].set(new, mode='drop')
  return {
    'documents': put('documents', documents_BxT),
    'index': put('index', indices(cache, valid_BxT)),
    'count': cache['count'] + (valid_BxT > 0).sum(axis=1, dtype=jnp.int32),
    'position': last(cache['position'][:, None], positions_BxT + 1, valid_BxT)[:, 0],
  }
