"""The ids of each token and of the most attended token of each head (N-Grammer in praxis).

B batch, T segment length, M tokens before it, S = M + T, N heads.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.state import State


def paired_ids(
  ids_BxSxN: jax.Array, pair_ids: jax.Array, continues_BxT: jax.Array | None = None, start: int = 0
) -> jax.Array:
  """Returns the ids at the paired positions of the tokens, [B, T, N].

  Args:
    ids_BxSxN: cluster or token ids of the memory and the segment.
    pair_ids: [B, T] or [B, N, T] positions to pair with, S for no pair.
    continues_BxT: false at document starts (no pair). None ignores documents.
    start: the id in place of a missing pair.
  """
  if pair_ids.ndim == 2:
    index_BxTxN = pair_ids[..., None]
  else:
    index_BxTxN = pair_ids.swapaxes(1, 2)
  padded = jnp.pad(ids_BxSxN, ((0, 0), (0, 1), (0, 0)), constant_values=start)
  pairs_BxTxN = jnp.take_along_axis(padded, index_BxTxN, axis=1)
  if continues_BxT is None:
    return pairs_BxTxN
  return jnp.where(continues_BxT[..., None], pairs_BxTxN, start)


@dataclasses.dataclass(frozen=True)
class AttendedPairs:
  """Bi-grams of each token and its most attended token, over a stream of segments.

  The state is {`ids`: [B, N, M]}, the ids of the tokens in the memory of the layers.

  Attributes:
    fill_id: the id in place of a missing pair.
  """

  fill_id: int = 0

  def empty_state(self, batch: int, heads: int, slots: int | None) -> State | None:
    """Returns the state before the first segment; None if the layers have no memory."""
    if slots is None:
      return None
    return {'ids': jnp.zeros((batch, heads, slots), jnp.int32)}

  def __call__(
    self, ids_BxTxN: jax.Array, context: Context, state: State | None
  ) -> list[jax.Array]:
    """Returns the ids of the tokens of a segment and of their pairs, [B, T, N] each.

    Pairs may cross document boundaries, but the first token of a document has no pair.
    """
    ids_BxSxN = ids_BxTxN
    continues_BxT = None
    if state is not None:
      ids_BxSxN = jnp.concatenate([state['ids'].swapaxes(1, 2), ids_BxTxN], axis=1)
    elif context.documents_BxT is not None:
      continues_BxT = jnp.diff(context.documents_BxT, axis=1, prepend=document_masks.NONE) == 0
    return [ids_BxTxN, paired_ids(ids_BxSxN, context.pair_BxNxT, continues_BxT, self.fill_id)]

  def advance(
    self, ids_BxTxN: jax.Array, context: Context, state: State | None, after_BxTxD: jax.Array
  ) -> State | None:
    """Returns the state after a segment; for `after_BxTxD` see `cache.write`."""
    if state is None:
      return None
    if context.slots_BxT is not None:
      return {'ids': cache.write(state['ids'], context.slots_BxT, ids_BxTxN, after_BxTxD)}
    ids_BxMxN = cache.keep_last(state['ids'].swapaxes(1, 2), ids_BxTxN, context.valid_BxT)
    return {'ids': ids_BxMxN.swapaxes(1, 2)}
