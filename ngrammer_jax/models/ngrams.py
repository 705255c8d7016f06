"""The n-gram layer of a config, and n-grams of what attention found.

B batch, T segment length, S keys, N heads, H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import ngrammer
from ngrammer_jax.models import view


def layer(
  config: model_config.ModelConfig,
  dtype: jnp.dtype,
  vocabulary_size: int | None = None,
  name: str | None = None,
) -> ngrammer.NGrammer:
  """The n-gram layer of the config. The vocabulary is needed where it has no clusters."""
  n = config.ngram
  # Rows of the embedding to begin at, more of them than there are clusters.
  rows = vocabulary_size if n.layer == 'input' and config.adaptive_softmax is None else 0
  return ngrammer.NGrammer(
    heads=n.heads or config.heads,
    clusters=n.clusters,
    vocabulary_size=n.vocabulary_size,
    dim=n.dim,
    combine=n.combine,
    orders=n.orders,
    distinct_start=n.distinct_start,
    id_vocabulary=vocabulary_size,
    decay=n.decay,
    epsilon=n.epsilon,
    prenormalize=n.prenormalize,
    empty=n.empty,
    initial=n.initial or ('data' if (n.clusters or 0) < (rows or 0) else 'uniform'),
    padding_trains=n.padding_trains,
    exchange=n.exchange,
    dtype=dtype,
    name=name,
  )


def pairs(
  pairing: str, seen: view.View, memory: dict[str, Any], scores_BxNxTxS: jax.Array
) -> dict[str, jax.Array]:
  """With which of the keys of the memory and the segment the tokens pair, `pairs` [B, N, T].

  That is the one that each attends to most, from the scores of a view. Empty where they pair
  with the token before.
  """
  if pairing != 'attended':
    return {}
  M = memory['ids'].shape[2] if 'ids' in memory else 0
  return {'pairs': _most_attended(scores_BxNxTxS, seen, M + seen.documents_BxT.shape[1])}


def joined(
  grams: ngrammer.NGrammer,
  seen: view.View,
  memory: dict[str, Any],
  context_BxTxNxH: jax.Array,
  pairs: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, Any]]:
  """What attention found, joined with its n-grams; and their ids or seam, to be kept."""
  B, T, N, H = context_BxTxNxH.shape
  join = functools.partial(
    grams,
    context_BxTxNxH.reshape(B, T, N * H),
    documents_BxT=seen.documents_BxT,
    valid_BxT=seen.valid_BxT,
  )
  if pairs:
    earlier = None if 'ids' not in memory else memory['ids'].swapaxes(1, 2)
    y_BxTxD, kept = join(pair_ids=pairs['pairs'], earlier_ids=earlier)
  else:
    y_BxTxD, seam = join(memory=memory['ngram'])
    kept = {'ngram': seam}
  return y_BxTxD.reshape(B, T, N, H), kept


def _most_attended(scores_BxNxTxS, seen, S):
  """Of S keys the one before it that each token attends to most; S for none. [B, N, T].

  The view may see the last of them, those in some slots of a cache, or blocks (see
  `layers.local`).
  """
  B = len(seen.documents_BxT)
  (N, b, count), F = scores_BxNxTxS.shape[1:], len(scores_BxNxTxS) // B
  earlier_TxS = jnp.arange(count) < count - b + jnp.arange(b)[:, None]
  best_BxNxT = ngrammer.most_attended(scores_BxNxTxS, seen.visible_BxTxS & earlier_TxS)
  if seen.newest_BxM is not None:
    segment_BxT = jnp.broadcast_to(jnp.arange(S - b, S + 1), (B, b + 1))  # and none
    index_BxS = jnp.concatenate([seen.newest_BxM, segment_BxT], axis=1)
    return jnp.take_along_axis(index_BxS[:, None], best_BxNxT, axis=2)
  first_F = S - count - (F - 1 - jnp.arange(F)) * b  # of the keys of a block
  first_Bx1x1 = jnp.tile(first_F, B)[:, None, None]
  best_BxNxT = jnp.where(best_BxNxT == count, S, first_Bx1x1 + best_BxNxT)
  return best_BxNxT.reshape(B, F, N, b).swapaxes(1, 2).reshape(B, N, F * b)
