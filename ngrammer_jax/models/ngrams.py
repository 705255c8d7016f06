"""The N-Grammer layer as a memory of a model (see `layers.memory`).

B batch, T segment length, M slots, N heads, D model width.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.memory import Place
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.memory import PlacedMemory
from ngrammer_jax.layers.ngram import ngrammer


class NGrammerMemory(ngrammer.NGrammer):
  """N-grams of consecutive tokens. The state is their ids (see `ngrammer.empty_memory`).

  Attributes:
    is_at_input: whether the input of the layer is the embedding.
  """

  is_at_input: bool = False

  def empty_state(self, batch: int, slots: int | None) -> dict[str, jax.Array]:
    """Returns the state before the first segment."""
    del slots
    return ngrammer.empty_memory(batch, self.heads, self.orders)

  def __call__(
    self, x_BxTxD: jax.Array, context: Context, state: dict[str, jax.Array]
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns [B, T, D] and the next state."""
    return super().__call__(
      x_BxTxD,
      ids=context.tokens_BxT,
      documents_BxT=context.documents_BxT,
      valid_BxT=context.valid_BxT,
      vocabulary=context.vocabulary if self.is_at_input else None,
      memory=state,
    )


class AttendedNGrammerMemory(ngrammer.NGrammer):
  """Bi-grams of each token and the token that its head attends to most (praxis).

  The state is the cluster ids [B, N, M] of the tokens in the memory of the layers.
  """

  def empty_state(self, batch: int, slots: int | None) -> jax.Array | None:
    """Returns the state before the first segment."""
    return None if slots is None else jnp.zeros((batch, self.heads, slots), jnp.int32)

  def __call__(
    self, x_BxTxD: jax.Array, context: Context, state: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns [B, T, D] and the next state."""
    ids_BxMxN = None if state is None else state.swapaxes(1, 2)
    y_BxTxD, segment = super().__call__(
      x_BxTxD,
      documents_BxT=context.documents_BxT,
      valid_BxT=context.valid_BxT,
      pair_ids=context.pair_BxNxT,
      earlier_ids=ids_BxMxN,
    )
    if state is not None and context.slots_BxT is not None:
      state = cache.write(state, context.slots_BxT, segment['ids'], y_BxTxD)
    elif state is not None:
      state = cache.keep_last(ids_BxMxN, segment['ids'], context.valid_BxT).swapaxes(1, 2)
    return y_BxTxD, state


def memory(
  config: model_config.ModelConfig, place: Place, dtype: jnp.dtype, vocabulary_size: int | None
) -> PlacedMemory:
  """Returns the n-gram layer at a place, see `memories.MEMORIES`."""
  is_attended = config.ngram.pairing_of(place.block) == 'attended'
  kind, state_name = AttendedNGrammerMemory, 'ids'
  if not is_attended:
    kind = functools.partial(NGrammerMemory, is_at_input=place.point == 'input')
    state_name = 'ngram'
  make_module = functools.partial(make, config, dtype, vocabulary_size, kind)
  return PlacedMemory('ngrammer', place, make_module, state_name, needs_pairs=is_attended)


def make(
  config: model_config.ModelConfig,
  dtype: jnp.dtype,
  vocabulary_size: int | None = None,
  kind: Callable[..., ngrammer.NGrammer] = ngrammer.NGrammer,
  **fields: Any,
) -> ngrammer.NGrammer:
  """Returns the n-gram layer of a config; without clusters it needs the vocabulary size."""
  n = config.ngram
  # Centroids start from rows of the embedding if there are more rows than clusters.
  rows = vocabulary_size if n.layer == 'input' and config.adaptive_softmax is None else 0
  return kind(
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
    **fields,
  )
