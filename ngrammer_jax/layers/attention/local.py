"""Attention in blocks of queries, each with the visible keys of its queries.

In a sliding window no query sees more than M earlier keys, the length of the memory: a block of b
queries needs only M + b of the M + T keys. Blocks become rows of the batch, so the cost of a query
depends on the window and not on the segment length.

Without a window a block needs the keys up to its last query. On a CPU each of these products is as
fast as a larger one, and with many blocks half of the scores are never computed.

B batch, T queries, M memory, S = M + T keys, b queries of a block, F = T / b blocks, N heads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import dropout, mesh_axes
from ngrammer_jax.layers.attention import full
from ngrammer_jax.layers.attention.cache import KeyValues
from ngrammer_jax.layers.context import Keys

BLOCK = 64  # minimum number of queries of a block, if the segment has as many
# Queries of a block without a window. Forward and backward pass of 512 queries, 9 heads of 64, take
# 0.42 of the time of full scores with 128, 0.38 with 64 and 0.75 with 256 (two rows, one core).
CAUSAL_BLOCK = 128


def block_count(T: int, M: int) -> int:
  """Returns F, for blocks of about a quarter of the window whose length divides T and M."""
  longest = max(M // 4, BLOCK)
  common = math.gcd(T, M)
  b = next((n for n in range(min(longest, common), 0, -1) if common % n == 0), T)
  if b * 2 < min(BLOCK, T):
    return 1  # one block instead of many small ones
  return T // b


def applies(keys: Keys) -> bool:
  """Whether keys are in order, and every window fits the memory."""
  T, S = keys.visible_BxTxS.shape[1:]
  is_ordered = keys.distance_BxTxS is None and not keys.has_prefix
  return is_ordered and keys.window is not None and T < S and keys.window <= S - T + 1


def has_causal_blocks(keys: Keys, cached: KeyValues | None, drop: dropout.Dropout) -> bool:
  """Whether each block of queries reads the keys up to its last query.

  Keys are in order and no query sees later ones. The dropout mask has one shape for all scores.
  """
  T = keys.visible_BxTxS.shape[1]
  is_causal = cached is None and keys.distance_BxTxS is None and not keys.has_prefix
  is_cpu = mesh_axes.device()[0] == 'cpu'
  return is_cpu and is_causal and not drop.is_active and T >= 2 * CAUSAL_BLOCK


def attend(
  heads: full.Heads,
  span_mask: full.SpanMask | None,
  keys: Keys,
  cached: KeyValues | None,
  return_pairs: bool,
  drop: dropout.Dropout,
) -> full.PartialAttention:
  """Returns the same as `full.attend`, in blocks of queries if they need fewer keys.

  For the arguments see `full.attend`.
  """
  T = heads.query_BxTxNxH.shape[1]
  S = heads.key_BxSxCxH.shape[1]
  options = cached, return_pairs, drop
  F = block_count(T, S - T) if applies(keys) else 1
  if F > 1:
    return _attend_in_windows(heads, span_mask, keys, F, *options)
  if has_causal_blocks(keys, cached, drop):
    return _attend_in_causal_blocks(heads, span_mask, keys, *options)
  return full.attend(heads, span_mask, keys, *options)


def _attend_in_causal_blocks(
  heads: full.Heads, span_mask: full.SpanMask | None, keys: Keys, *options: Any
) -> full.PartialAttention:
  """Attends block by block, each to the keys up to its last query."""
  T = heads.query_BxTxNxH.shape[1]
  S = heads.key_BxSxCxH.shape[1]
  parts = []
  for first in range(0, T, CAUSAL_BLOCK):
    end = min(first + CAUSAL_BLOCK, T)
    part = _attend_to_prefix(heads, span_mask, keys, slice(first, end), *options)
    if part.pair_BxNxT is not None:
      is_none_BxNxT = part.pair_BxNxT == S - T + end
      part = part._replace(pair_BxNxT=jnp.where(is_none_BxNxT, S, part.pair_BxNxT))
    parts.append(part._replace(weights_BxNxTxS=None))
  values_BxTxNxH = jnp.concatenate([part.values_BxTxNxH for part in parts], axis=1)
  log_mass_BxNxT = jnp.concatenate([part.log_mass_BxNxT for part in parts], axis=2)
  pair_BxNxT = None
  if parts[0].pair_BxNxT is not None:
    pair_BxNxT = jnp.concatenate([part.pair_BxNxT for part in parts], axis=2)
  return full.PartialAttention(values_BxTxNxH, log_mass_BxNxT, None, pair_BxNxT)


def _attend_to_prefix(
  heads: full.Heads, span_mask: full.SpanMask | None, keys: Keys, queries: slice, *options: Any
) -> full.PartialAttention:
  """Attends from some queries to the keys up to the last of them."""
  T = heads.query_BxTxNxH.shape[1]
  count = heads.key_BxSxCxH.shape[1] - T + queries.stop
  distance = heads.distance
  if distance is not None:
    nearest = slice(T - queries.stop, None)
    bias_SxN = distance.bias_SxN
    if bias_SxN is not None:
      bias_SxN = bias_SxN[nearest]
    distance = distance._replace(
      query_BxTxNxH=distance.query_BxTxNxH[:, queries],
      encoding_SxNxH=distance.encoding_SxNxH[nearest],
      bias_SxN=bias_SxN,
    )
  prefix = full.Heads(
    heads.query_BxTxNxH[:, queries],
    heads.key_BxSxCxH[:, :count],
    heads.value_BxSxCxH[:, :count],
    distance,
    heads.logit_cap,
  )
  if span_mask is not None and span_mask.z_BxTxN.shape[1] > 1:
    span_mask = span_mask._replace(z_BxTxN=span_mask.z_BxTxN[:, queries])
  keys = keys.replace(visible_BxTxS=keys.visible_BxTxS[:, queries, :count])
  return full.attend(prefix, span_mask, keys, *options)


def _attend_in_windows(
  heads: full.Heads, span_mask: full.SpanMask | None, keys: Keys, F: int, *options: Any
) -> full.PartialAttention:
  """Attends in F blocks, each to the keys in the windows of its queries."""
  B, T = heads.query_BxTxNxH.shape[:2]
  S = heads.key_BxSxCxH.shape[1]
  b = T // F
  distance = heads.distance
  if distance is not None:
    bias_SxN = distance.bias_SxN
    if bias_SxN is not None:
      bias_SxN = bias_SxN[T - b :]
    distance = distance._replace(
      query_BxTxNxH=_fold_queries(distance.query_BxTxNxH, F),
      encoding_SxNxH=distance.encoding_SxNxH[T - b :],  # the nearest M + b
      bias_SxN=bias_SxN,
    )
  blocks = full.Heads(
    _fold_queries(heads.query_BxTxNxH, F),
    _fold_keys(heads.key_BxSxCxH, F, T),
    _fold_keys(heads.value_BxSxCxH, F, T),
    distance,
    heads.logit_cap,
  )
  if span_mask is not None and span_mask.z_BxTxN.shape[1] > 1:
    span_mask = span_mask._replace(z_BxTxN=_fold_queries(span_mask.z_BxTxN, F))
  windows = [
    keys.visible_BxTxS[:, first : first + b, first : first + S - T + b] for first in range(0, T, b)
  ]
  visible_BxTxS = jnp.stack(windows, axis=1).reshape(-1, *windows[0].shape[1:])
  part = full.attend(blocks, span_mask, keys.replace(visible_BxTxS=visible_BxTxS), *options)

  def unfold_by_head(array: jax.Array) -> jax.Array:
    return _unfold(array.swapaxes(1, 2), F).swapaxes(1, 2)

  pair_BxNxT = part.pair_BxNxT
  if pair_BxNxT is not None:
    first_Bx1x1 = jnp.tile(jnp.arange(0, T, b), B)[:, None, None]
    is_none = pair_BxNxT == S - T + b
    pair_BxNxT = unfold_by_head(jnp.where(is_none, S, first_Bx1x1 + pair_BxNxT))
  values_BxTxNxH = _unfold(part.values_BxTxNxH, F)
  log_mass_BxNxT = unfold_by_head(part.log_mass_BxNxT)
  return full.PartialAttention(values_BxTxNxH, log_mass_BxNxT, None, pair_BxNxT)


def _fold_queries(x_BxTx: jax.Array, F: int) -> jax.Array:
  """[B, T, ...] -> [B F, b, ...]"""
  B, T = x_BxTx.shape[:2]
  return x_BxTx.reshape(B * F, T // F, *x_BxTx.shape[2:])


def _fold_keys(x_BxSx: jax.Array, F: int, T: int) -> jax.Array:
  """[B, S, ...] -> [B F, M + b, ...]: the keys of each block, and the M before it."""
  B, S = x_BxSx.shape[:2]
  b = T // F
  blocks = x_BxSx.reshape(B, S // b, b, *x_BxSx.shape[2:])
  before = (S - T) // b
  windows = jnp.stack([blocks[:, first : first + F] for first in range(before + 1)], axis=2)
  return windows.reshape(B * F, S - T + b, *x_BxSx.shape[2:])


def _unfold(array: jax.Array, F: int) -> jax.Array:
  """[B F, b, ...] -> [B, T, ...]"""
  return array.reshape(array.shape[0] // F, F * array.shape[1], *array.shape[2:])
