"""Softmax over the vocabulary, in chunks.

  nll = log sum_v exp(h w_v + b_v) - (h w_target + b_target)

The logits of all V words need not exist at once: the log-sum-exp runs over chunks of the
vocabulary, which the backward pass recomputes.

B batch, T segment length, D model width, V vocabulary, C chunks, R ids of one chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenScores(NamedTuple):
  """Negative log-likelihood of each target in nats, and whether it has the highest logit."""

  nll_BxT: jax.Array
  correct_BxT: jax.Array


class Summary(NamedTuple):
  """A softmax over the vocabulary, reduced to four numbers per token."""

  log_sum_BxT: jax.Array  # log of the sum of exp(logit)
  target_BxT: jax.Array  # logit of the target
  best_logit_BxT: jax.Array  # highest logit
  best_BxT: jax.Array  # lowest id that attains it


class _Running(NamedTuple):
  """The softmax over the chunks of the vocabulary so far."""

  max_BxT: jax.Array  # highest logit
  sum_BxT: jax.Array  # sum of exp(logit - max)
  target_BxT: jax.Array  # logit of the target
  best_BxT: jax.Array  # lowest id that attains the maximum


def full_logits(
  hidden_BxTxD: jax.Array, weight_VxD: jax.Array, bias_V: jax.Array | None
) -> jax.Array:
  """Returns logits [B, T, V] in at least float32."""
  dtype = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  weight_VxD = weight_VxD.astype(hidden_BxTxD.dtype)
  logits = jnp.einsum('btd,vd->btv', hidden_BxTxD, weight_VxD, preferred_element_type=dtype)
  return logits if bias_V is None else _add_bias(logits, bias_V)


@jax.custom_vjp
def _add_bias(logits_BxTxV: jax.Array, bias_V: jax.Array) -> jax.Array:
  return logits_BxTxV + bias_V


def _add_bias_backward(bias_V, d_logits_BxTxV):
  # Sums over tokens first, then over rows. With more than about 10,000 words one sum over both is
  # several times slower on a CPU (1.0 s instead of 0.1 s for 77,000 words, 64 x 20 tokens).
  d_bias_BxV = jax.lax.optimization_barrier(d_logits_BxTxV.sum(axis=1))
  return d_logits_BxTxV, d_bias_BxV.sum(axis=0).astype(bias_V.dtype)


_add_bias.defvjp(lambda logits, bias: (logits + bias, bias), _add_bias_backward)


def token_scores(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  targets_BxT: jax.Array,
  chunk: int | None = None,
) -> TokenScores:
  """Returns -log softmax(hidden weight^T + bias)[target], see `summary` for the arguments."""
  total = summary(hidden_BxTxD, weight_VxD, bias_V, targets_BxT, chunk)
  return TokenScores(total.log_sum_BxT - total.target_BxT, total.best_BxT == targets_BxT)


def summary(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  targets_BxT: jax.Array,
  chunk: int | None = None,
) -> Summary:
  """Returns the softmax of hidden weight^T + bias, computed in chunks of the vocabulary.

  Args:
    hidden_BxTxD: final hidden states.
    weight_VxD, bias_V: output layer.
    targets_BxT: ids in [0, V).
    chunk: number of logits per token that exist at once. None means all.
  """
  V, D = weight_VxD.shape
  C = -(-V // (chunk or V))
  R = -(-V // C)
  dtype = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  lowest = jnp.finfo(dtype).min / 4
  bias_V = jnp.zeros(V, dtype) if bias_V is None else bias_V.astype(dtype)
  # The barrier makes the optimiser read the gradient in the order of rows, not of chunks.
  weight_VxD = jax.lax.optimization_barrier(weight_VxD.astype(hidden_BxTxD.dtype))
  # Chunk c has the ids c, c + C, c + 2 C, ..., so that every device has its share of every chunk if
  # the vocabulary is sharded, without communication.
  weight_CxRxD = jnp.pad(weight_VxD, ((0, R * C - V), (0, 0))).reshape(R, C, D).swapaxes(0, 1)
  bias_CxR = jnp.pad(bias_V, (0, R * C - V), constant_values=lowest).reshape(R, C).T

  def add_chunk(running: _Running, chunk):
    weight_RxD, bias_R, c = chunk
    logits_BxTxR = full_logits(hidden_BxTxD, weight_RxD, bias_R)
    row_R = jnp.arange(R, dtype=jnp.int32)
    detached_BxTxR = jax.lax.stop_gradient(logits_BxTxR)
    top_BxT = detached_BxTxR.max(axis=-1)
    top_id_BxT = jnp.where(detached_BxTxR == top_BxT[..., None], row_R, R).min(axis=-1) * C + c
    max_BxT = jnp.maximum(running.max_BxT, top_BxT)
    sum_BxT = jnp.exp(logits_BxTxR - max_BxT[..., None]).sum(axis=-1)
    is_target_BxTxR = (targets_BxT // C)[..., None] == row_R
    target_BxT = jnp.where(is_target_BxTxR, logits_BxTxR, 0).sum(axis=-1)
    better_BxT = (top_BxT > running.max_BxT) | (
      (top_BxT == running.max_BxT) & (top_id_BxT < running.best_BxT)
    )
    return _Running(
      max_BxT=max_BxT,
      sum_BxT=running.sum_BxT * jnp.exp(running.max_BxT - max_BxT) + sum_BxT,
      target_BxT=jnp.where(targets_BxT % C == c, target_BxT, running.target_BxT),
      best_BxT=jnp.where(better_BxT, top_id_BxT, running.best_BxT),
    ), None

  zeros_BxT = jnp.zeros(targets_BxT.shape, dtype)
  no_id_BxT = jnp.full(targets_BxT.shape, V, jnp.int32)
  running = _Running(zeros_BxT + lowest, zeros_BxT, zeros_BxT, no_id_BxT)
  if C == 1:
    running, _ = add_chunk(running, (weight_CxRxD[0], bias_CxR[0], 0))
  else:
    chunks = (weight_CxRxD, bias_CxR, jnp.arange(C, dtype=jnp.int32))
    running, _ = jax.lax.scan(jax.checkpoint(add_chunk), running, chunks)
  log_sum_BxT = running.max_BxT + jnp.log(running.sum_BxT)
  return Summary(log_sum_BxT, running.target_BxT, running.max_BxT, running.best_BxT)
