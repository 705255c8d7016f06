"""Attention with the full score matrix of a segment: the reference, and faster for few scores.

Under the mask m of a learned span, a softmax p over the keys becomes

  m p / (sum(m p) + epsilon)

as in the official code (see `layers.attention.span`).

B batch, T queries, M memory, S = M + T keys, N query heads, C key heads, H head width; x is B or 1.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.config import span as span_config
from ngrammer_jax.layers import document_masks, dropout, products, softmax
from ngrammer_jax.layers.attention import relative, span
from ngrammer_jax.layers.attention.cache import KeyValues
from ngrammer_jax.layers.context import Keys

# Finite, so that a query without visible keys has a finite softmax.
MASKED_SCORE = -0.7 * jnp.finfo(jnp.float32).max


class Heads(NamedTuple):
  """Queries, keys and values by head.

  Attributes:
    query_BxTxNxH: scaled, with the content bias.
    key_BxSxCxH: keys of the memory inputs, then keys of the segment. Query head n attends to the
      keys of head n // (N / C).
    value_BxSxCxH: values of the same tokens.
    distance: the term of the scores that depends on distances (see `relative`). None: no such
      term.
    logit_cap: c, see `softmax.cap_logits`. None: scores are not capped.
  """

  query_BxTxNxH: jax.Array
  key_BxSxCxH: jax.Array
  value_BxSxCxH: jax.Array
  distance: relative.DistanceTerm | None = None
  logit_cap: float | None = None


class SpanMask(NamedTuple):
  """The soft mask of learned spans.

  Attributes:
    z_BxTxN: spans in tokens; B and T may be 1.
    ramp: length of the mask's fall from 1 to 0.
    renormalize: whether masked weights are scaled to add up to 1.
    epsilon_keys: the keys that count in epsilon, `all` or those within the `span` and its ramp.
      `span` matches the trimmed cache of the official code.
  """

  z_BxTxN: jax.Array
  ramp: int
  renormalize: bool
  epsilon_keys: str = 'all'

  @property
  def counts_all_keys(self) -> bool:
    """Whether keys beyond the span count in epsilon."""
    return span_config.counts_all_keys(self.renormalize, self.epsilon_keys)


class PartialAttention(NamedTuple):
  """Attention to some of the keys of a softmax.

  Attributes:
    values_BxTxNxH: weighted sums of the values, in at least float32.
    log_mass_BxNxT: logarithm of the sum of the exponentials. None: not computed.
    weights_BxNxTxS: weights of the values, with sum 1. None: never materialized.
    pair_BxNxT: the most attended earlier key of each query, S for none. None: not computed.
  """

  values_BxTxNxH: jax.Array
  log_mass_BxNxT: jax.Array | None = None
  weights_BxNxTxS: jax.Array | None = None
  pair_BxNxT: jax.Array | None = None


def attend(
  heads: Heads,
  span_mask: SpanMask | None,
  keys: Keys,
  cached: KeyValues | None,
  return_pairs: bool,
  drop: dropout.Dropout,
) -> PartialAttention:
  """Attends to the visible keys of each query.

  Args:
    heads: queries, keys and values.
    span_mask: mask of the learned spans. None: no spans.
    keys: the keys of the segment.
    cached: keys and values of earlier tokens.
    return_pairs: whether to compute pairs.
    drop: dropout of the weights.
  """
  scores_BxNxTxS = _scores(heads, cached, keys)
  scores_BxNxTxS = jnp.where(keys.visible_BxTxS[:, None], scores_BxNxTxS, MASKED_SCORE)
  unclipped_xNxTxS = None
  renormalize = False
  if span_mask is not None:
    unclipped_xNxTxS = _unclipped_mask(span_mask, keys)
    renormalize = span_mask.renormalize
    if renormalize and not span_mask.counts_all_keys:
      scores_BxNxTxS = jnp.where(unclipped_xNxTxS >= 0, scores_BxNxTxS, MASKED_SCORE)
  highest_BxNxTx1 = jax.lax.stop_gradient(scores_BxNxTxS.max(axis=-1, keepdims=True))
  exp_BxNxTxS = jnp.exp(scores_BxNxTxS - highest_BxNxTx1)
  weights_BxNxTxS, masses_BxNxTxS = span.masked_weights(exp_BxNxTxS, unclipped_xNxTxS, renormalize)
  mass_BxNxTx1 = masses_BxNxTxS.sum(axis=-1, keepdims=True)
  scale_BxNxTx1 = 1 / mass_BxNxTx1
  if not keys.sees_itself:
    # Otherwise a query without visible keys would return the mean of all values.
    scale_BxNxTx1 *= keys.visible_BxTxS.any(axis=-1)[:, None, :, None]
  # Dividing the sums takes H numbers per query, dividing the weights S.
  values_BxTxNxH = _weighted_sums(drop(weights_BxNxTxS), heads, cached)
  values_BxTxNxH = values_BxTxNxH * jnp.swapaxes(scale_BxNxTx1, 1, 2)
  log_mass_BxNxTx1 = jnp.log(mass_BxNxTx1) + highest_BxNxTx1
  weights_BxNxTxS = weights_BxNxTxS * scale_BxNxTx1
  pair_BxNxT = None
  if return_pairs:
    pair_BxNxT = _pairs(scores_BxNxTxS, unclipped_xNxTxS, keys)
  return PartialAttention(values_BxTxNxH, log_mass_BxNxTx1[..., 0], weights_BxNxTxS, pair_BxNxT)


def joint_softmax(
  first: PartialAttention, second: PartialAttention, epsilon: float = 0.0
) -> PartialAttention:
  """Merges two parts into one softmax: each has its share of the total mass.

  Args:
    first, second: the parts; the result has the pairs of the first.
    epsilon: of a soft mask m. The mass of the first part is sum m e + epsilon sum e. The second has
      no mask, m = 1, and its mass becomes (1 + epsilon) sum e.
  """
  second_mass_BxNxT = second.log_mass_BxNxT + math.log1p(epsilon)
  log_mass_BxNxT = jnp.logaddexp(first.log_mass_BxNxT, second_mass_BxNxT)
  first_share_BxNxT = jnp.exp(first.log_mass_BxNxT - log_mass_BxNxT)
  second_share_BxNxT = jnp.exp(second.log_mass_BxNxT - log_mass_BxNxT)
  first_values_BxTxNxH = first.values_BxTxNxH * first_share_BxNxT.swapaxes(1, 2)[..., None]
  second_values_BxTxNxH = second.values_BxTxNxH * second_share_BxNxT.swapaxes(1, 2)[..., None]
  values_BxTxNxH = first_values_BxTxNxH + second_values_BxTxNxH
  weights_BxNxTxS = None
  if first.weights_BxNxTxS is not None:
    first_weights_BxNxTxS = first.weights_BxNxTxS * first_share_BxNxT[..., None]
    second_weights_BxNxTxP = second.weights_BxNxTxS * second_share_BxNxT[..., None]
    weights_BxNxTxS = jnp.concatenate([first_weights_BxNxTxS, second_weights_BxNxTxP], axis=-1)
  return PartialAttention(values_BxTxNxH, log_mass_BxNxT, weights_BxNxTxS, first.pair_BxNxT)


def _scores(heads: Heads, cached: KeyValues | None, keys: Keys) -> jax.Array:
  """Returns the capped scores without a mask, [B, N, T, S]."""
  # Concatenating cache and segment would copy the cache.
  scores_BxNxTxS = _query_products(heads.query_BxTxNxH, heads.key_BxSxCxH, 'bsch')
  if cached is not None:
    scores_BxNxTxM = _query_products(heads.query_BxTxNxH, cached.keys, 'bcsh')
    scores_BxNxTxS = jnp.concatenate([scores_BxNxTxM, scores_BxNxTxS], axis=-1)
  if heads.distance is not None:
    scores_BxNxTxS += relative.scores(heads.distance, keys.distance_BxTxS)
  return softmax.cap_logits(scores_BxNxTxS, heads.logit_cap)


def _unclipped_mask(span_mask: SpanMask, keys: Keys) -> jax.Array:
  """Returns `span.unclipped_mask` for all keys, [B or 1, N, T, S]."""
  distance_BxTxS = keys.distance_BxTxS
  if distance_BxTxS is None:
    distance_BxTxS = document_masks.distances(*keys.visible_BxTxS.shape[1:])
  nearest_Bx1xTxS = distance_BxTxS[:, None] - (not keys.sees_itself)
  z_BxNxTx1 = span_mask.z_BxTxN.swapaxes(1, 2)[..., None]
  return span.unclipped_mask(z_BxNxTx1, nearest_Bx1xTxS, span_mask.ramp)


def _weighted_sums(weights_BxNxTxS: jax.Array, heads: Heads, cached: KeyValues | None) -> jax.Array:
  """Returns the weighted sums of the values, in at least float32."""
  weights_BxNxTxS = weights_BxNxTxS.astype(heads.value_BxSxCxH.dtype)
  M = 0 if cached is None else cached.values.shape[2]
  values_BxTxNxH = _weighted_sum(weights_BxNxTxS[..., M:], heads.value_BxSxCxH, 'bsch')
  if cached is not None:
    values_BxTxNxH += _weighted_sum(weights_BxNxTxS[..., :M], cached.values, 'bcsh')
  return values_BxTxNxH


def _query_products(query_BxTxNxH: jax.Array, keys: jax.Array, key_axes: str) -> jax.Array:
  """Returns the products of queries and keys, [B, N, T, S], without a copy of shared keys."""
  B, T, N, H = query_BxTxNxH.shape
  C = keys.shape[key_axes.index('c')]
  if N == C:
    return products.wide_einsum(f'btch,{key_axes}->bcts', query_BxTxNxH, keys)

  # The heads of a key head as further rows of one product take 0.6 to 0.8 of the time of an axis of
  # their own on a CPU, and 0.6 on a GPU. A TPU would transpose the scores.
  def by_rows(query_BxTxNxH, keys):
    query_BxCxRxH = query_BxTxNxH.swapaxes(1, 2).reshape(B, C, -1, H)
    return products.wide_einsum(f'bcrh,{key_axes}->bcrs', query_BxCxRxH, keys).reshape(B, N, T, -1)

  def by_groups(query_BxTxNxH, keys):
    query_BxTxCxGxH = query_BxTxNxH.reshape(B, T, C, N // C, H)
    return products.wide_einsum(f'btcgh,{key_axes}->bcgts', query_BxTxCxGxH, keys).reshape(
      B, N, T, -1
    )

  return jax.lax.platform_dependent(query_BxTxNxH, keys, tpu=by_groups, default=by_rows)


def _weighted_sum(weights_BxNxTxS: jax.Array, values: jax.Array, value_axes: str) -> jax.Array:
  """Returns the weighted sums of the values, [B, T, N, H], without a copy of shared values."""
  B, N, T, S = weights_BxNxTxS.shape
  C = values.shape[value_axes.index('c')]
  if N == C:
    return products.wide_einsum(f'bcts,{value_axes}->btch', weights_BxNxTxS, values)

  def by_rows(weights_BxNxTxS, values):
    weights_BxCxRxS = weights_BxNxTxS.reshape(B, C, -1, S)
    product_BxCxRxH = products.wide_einsum(f'bcrs,{value_axes}->bcrh', weights_BxCxRxS, values)
    return product_BxCxRxH.reshape(B, N, T, -1).swapaxes(1, 2)

  def by_groups(weights_BxNxTxS, values):
    weights_BxCxGxTxS = weights_BxNxTxS.reshape(B, C, N // C, T, S)
    return products.wide_einsum(f'bcgts,{value_axes}->btcgh', weights_BxCxGxTxS, values).reshape(
      B, T, N, -1
    )

  return jax.lax.platform_dependent(weights_BxNxTxS, values, tpu=by_groups, default=by_rows)


def _pairs(scores_BxNxTxS: jax.Array, unclipped_xNxTxS: jax.Array | None, keys: Keys) -> jax.Array:
  """Returns the most attended earlier key of each query; S for none."""
  scores_BxNxTxS = jax.lax.stop_gradient(scores_BxNxTxS)
  if unclipped_xNxTxS is not None:  # the masked weights increase with these scores
    scores_BxNxTxS += jnp.log(jax.lax.stop_gradient(span.unit_clip(unclipped_xNxTxS)))
  T, S = scores_BxNxTxS.shape[2:]
  earlier_TxS = jnp.arange(S) < S - T + jnp.arange(T)[:, None]
  return most_attended(scores_BxNxTxS, keys.visible_BxTxS & earlier_TxS)


def most_attended(scores_BxNxTxS: jax.Array, allowed_BxTxS: jax.Array) -> jax.Array:
  """Returns the position of the allowed key with the highest score, int32 [B, N, T].

  The first of equal scores wins. S if no key is allowed or all scores are minus infinity.
  """
  scores_BxNxTxS = jnp.where(allowed_BxTxS[:, None], scores_BxNxTxS, -jnp.inf)
  best_BxNxT = scores_BxNxTxS.argmax(axis=-1)
  S = scores_BxNxTxS.shape[-1]
  return jnp.where(scores_BxNxTxS.max(axis=-1) > -jnp.inf, best_BxNxT, S)
