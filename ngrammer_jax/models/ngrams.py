"""The n-gram layer of a config, and n-grams of the outputs of attention.

B batch, T segment length, N heads, H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import ngrammer
from ngrammer_jax.layers.context import Context


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


def join(
  grams: ngrammer.NGrammer,
  context: Context,
  memory: dict[str, Any],
  attended_BxTxNxH: jax.Array,
  pair_BxNxT: jax.Array | None,
) -> tuple[jax.Array, dict[str, Any]]:
  """What attention found, joined with its n-grams; and what a memory keeps of these.

  Args:
    grams: the layer.
    context: of the segment.
    memory: of the block.
    attended_BxTxNxH: what attention found.
    pair_BxNxT: the key that each token pairs with, of the memory and the segment. None: each pairs
      with the token before.
  """
  B, T, N, H = attended_BxTxNxH.shape
  add = functools.partial(
    grams,
    attended_BxTxNxH.reshape(B, T, N * H),
    documents_BxT=context.documents_BxT,
    valid_BxT=context.valid_BxT,
  )
  if pair_BxNxT is not None:
    earlier = memory['ids'].swapaxes(1, 2) if 'ids' in memory else None
    y_BxTxD, kept = add(pair_ids=pair_BxNxT, earlier_ids=earlier)
  else:
    y_BxTxD, state = add(memory=memory['ngram'])
    kept = {'ngram': state}
  return y_BxTxD.reshape(B, T, N, H), kept
