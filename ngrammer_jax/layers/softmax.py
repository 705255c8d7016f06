"""From hidden states to the likelihood of tokens.

The logits of a whole batch need never exist: the vocabulary is taken in chunks, and
the backward pass computes each chunk again.

B batch, T segment length, D model width, V vocabulary, C chunks, R ids of one chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenScores(NamedTuple):
  """Per-token negative log-likelihood in nats, and whether the token was the best guess."""

  nll_BxT: jax.Array
  correct_BxT: jax.Array


class Summary(NamedTuple):
  """What a softmax over the vocabulary comes to: the logits, never all of them, as four numbers."""

  log_sum_BxT: jax.Array  # of exp(logit)
  target_BxT: jax.Array  # logit of the target
  best_logit_BxT: jax.Array
  best_BxT: jax.Array  # lowest id that attains it


class _Running(NamedTuple):
  """What is known of the softmax after some chunks of the vocabulary."""

  max_BxT: jax.Array
  sum_BxT: jax.Array  # of exp(logit - max)
  target_BxT: jax.Array  # logit of the target
  best_BxT: jax.Array  # lowest id that attains the maximum


def full_logits(
  hidden_BxTxD: jax.Array, weight_VxD: jax.Array, bias_V: jax.Array | None
) -> jax.Array:
  """Logits [B, T, V] in at least float32."""
  dtype = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  weight_VxD = weight_VxD.astype(hidden_BxTxD.dtype)
  logits = jnp.einsum('btd,vd->btv', hidden_BxTxD, weight_VxD, preferred_element_type=dtype)
  return logits if bias_V is None else _plus_bias(logits, bias_V)


@jax.custom_vjp
def _plus_bias(logits_BxTxV: jax.Array, bias_V: jax.Array) -> jax.Array:
  return logits_BxTxV + bias_V


def _plus_bias_backward(bias_V, d_logits_BxTxV):
  # Over tokens and then over rows: at once, XLA on a CPU takes several times as long where there
  # are more than some 10,000 words (1.0 s and 0.1 s for 77,000 and 64 x 20 tokens).
  d_bias_BxV = jax.lax.optimization_barrier(d_logits_BxTxV.sum(axis=1))
  return d_logits_BxTxV, d_bias_BxV.sum(axis=0).astype(bias_V.dtype)


_plus_bias.defvjp(lambda logits, bias: (logits + bias, bias), _plus_bias_backward)


def token_scores(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  targets_BxT: jax.Array,
  chunk: int | None = None,
) -> TokenScores:
  """-log softmax(hidden weight^T + bias)[target]; for the arguments see `summary`."""
  of = summary(hidden_BxTxD, weight_VxD, bias_V, targets_BxT, chunk)
  return TokenScores(of.log_sum_BxT - of.target_BxT, of.best_BxT == targets_BxT)


def summary(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  targets_BxT: jax.Array,
  chunk: int | None = None,
) -> Summary:
  """The softmax of hidden weight^T + bias, a part of the vocabulary at a time.

  Args:
    hidden_BxTxD: final hidden states.
    weight_VxD, bias_V: output layer.
    targets_BxT: ids in [0, V).
    chunk: how many logits of each token exist at one time. None: all.
  """
  V, D = weight_VxD.shape
  C = -(-V // (chunk or V))
  R = -(-V // C)
  dtype = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  lowest = jnp.finfo(dtype).min / 4
  bias_V = jnp.zeros(V, dtype) if bias_V is None else bias_V.astype(dtype)
  # What follows of its gradient then reads rows in their order, not in that of the chunks.
  weight_VxD = jax.lax.optimization_barrier(weight_VxD.astype(hidden_BxTxD.dtype))
  # Chunk c holds the ids c, c + C, c + 2 C, ...: a vocabulary sharded over devices then
  # gives every device its share of every chunk, and nothing moves.
  weight_CxRxD = jnp.pad(weight_VxD, ((0, R * C - V), (0, 0))).reshape(R, C, D).swapaxes(0, 1)
  bias_CxR = jnp.pad(bias_V, (0, R * C - V), constant_values=lowest).reshape(R, C).T

  def add_chunk(running: _Running, chunk):
    weight_RxD, bias_R, c = chunk
    logits_BxTxR = full_logits(hidden_BxTxD, weight_RxD, bias_R)
    row_R = jnp.arange(R, dtype=jnp.int32)
    fixed_BxTxR = jax.lax.stop_gradient(logits_BxTxR)
    top_BxT = fixed_BxTxR.max(axis=-1)
    first_BxT = jnp.where(fixed_BxTxR == top_BxT[..., None], row_R, R).min(axis=-1) * C + c
    max_BxT = jnp.maximum(running.max_BxT, top_BxT)
    sum_BxT = jnp.exp(logits_BxTxR - max_BxT[..., None]).sum(axis=-1)
    is_target_BxTxR = (targets_BxT // C)[..., None] == row_R
    target_BxT = jnp.where(is_target_BxTxR, logits_BxTxR, 0).sum(axis=-1)
    better_BxT = (top_BxT > running.max_BxT) | (
      (top_BxT == running.max_BxT) & (first_BxT < running.best_BxT)
    )
    return _Running(
      max_BxT=max_BxT,
      sum_BxT=running.sum_BxT * jnp.exp(running.max_BxT - max_BxT) + sum_BxT,
      target_BxT=jnp.where(targets_BxT % C == c, target_BxT, running.target_BxT),
      best_BxT=jnp.where(better_BxT, first_BxT, running.best_BxT),
    ), None

  start = jnp.zeros(targets_BxT.shape, dtype)
  running = _Running(start + lowest, start, start, jnp.full(targets_BxT.shape, V, jnp.int32))
  if C == 1:
    running, _ = add_chunk(running, (weight_CxRxD[0], bias_CxR[0], 0))
  else:
    chunks = (weight_CxRxD, bias_CxR, jnp.arange(C, dtype=jnp.int32))
    running, _ = jax.lax.scan(jax.checkpoint(add_chunk), running, chunks)
  log_sum_BxT = running.max_BxT + jnp.log(running.sum_BxT)
  return Summary(log_sum_BxT, running.target_BxT, running.max_BxT, running.best_BxT)
