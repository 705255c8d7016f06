"""The n-gram layer of a config, and n-grams of the outputs of attention.

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
  """Returns the n-gram layer of the config; without clusters it needs the vocabulary size."""
  n = config.ngram
  # Rows of the embedding, which centroids start from if there are more rows than clusters.
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
  """Returns `pairs` [B, N, T], the earlier key that each token attends to most.

  Keys are those of memory and segment; the scores are those of a view. The dict is empty if tokens
  pair with their predecessor.
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
  """Returns the outputs of attention combined with their n-grams, and the n-gram memory."""
  B, T, N, H = context_BxTxNxH.shape
  combine = functools.partial(
    grams,
    context_BxTxNxH.reshape(B, T, N * H),
    documents_BxT=seen.documents_BxT,
    valid_BxT=seen.valid_BxT,
  )
  if pairs:
    earlier_ids = None if 'ids' not in memory else memory['ids'].swapaxes(1, 2)
    y_BxTxD, next_memory = combine(pair_ids=pairs['pairs'], earlier_ids=earlier_ids)
  else:
    y_BxTxD, ngram_memory = combine(memory=memory['ngram'])
    next_memory = {'ngram': ngram_memory}
  return y_BxTxD.reshape(B, T, N, H), next_memory


def _most_attended(scores_BxNxTxS, seen, S):
  """Returns the earlier one of S keys that each token attends to most, S for none, [B, N, T].

  The view may contain the last keys, those in some slots of a cache, or blocks (see
  `layers.local`).
  """
  B = len(seen.documents_BxT)
  (N, b, count), F = scores_BxNxTxS.shape[1:], len(scores_BxNxTxS) // B
  earlier_TxS = jnp.arange(count) < count - b + jnp.arange(b)[:, None]
  best_BxNxT = ngrammer.most_attended(scores_BxNxTxS, seen.visible_BxTxS & earlier_TxS)
  if seen.newest_BxM is not None:
    segment_BxT = jnp.broadcast_to(jnp.arange(S - b, S + 1), (B, b + 1))  # S for none
    index_BxS = jnp.concatenate([seen.newest_BxM, segment_BxT], axis=1)
    return jnp.take_along_axis(index_BxS[:, None], best_BxNxT, axis=2)
  first_F = S - count - (F - 1 - jnp.arange(F)) * b  # first key of each block
  first_Bx1x1 = jnp.tile(first_F, B)[:, None, None]
  best_BxNxT = jnp.where(best_BxNxT == count, S, first_Bx1x1 + best_BxNxT)
  return best_BxNxT.reshape(B, F, N, b).swapaxes(1, 2).reshape(B, N, F * b)
