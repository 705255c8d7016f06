"""Softmax over the vocabulary, in chunks.

  nll = log sum_v exp(h w_v + b_v) - (h w_target + b_target)

The logits of all V words need not exist at once: the log-sum-exp runs over chunks of the
vocabulary, which the backward pass recomputes. On a CPU all logits of a block of tokens exist at
once, but not those of all tokens: every pass over the logits of a block finds them in the cache.

B batch, T segment length, D model width, V vocabulary, C chunks, R ids of one chunk, F blocks of
t = T / F tokens of every row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import dense, mesh_axes

MIN_BLOCK = 2**21  # logits; with fewer, loops and sums of gradients take longer than they save


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


def cap_logits(logits: jax.Array, cap: float | None) -> jax.Array:
  """Returns c tanh(logits / c) for a cap c; the logits without one."""
  if cap is None:
    return logits
  return cap * jnp.tanh(logits / cap)


def full_logits(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  cap: float | None = None,
  stored: str | None = None,
) -> jax.Array:
  """Returns logits [B, T, V] in at least float32, see `summary` for the arguments."""
  dtype = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  weight_VxD = weight_VxD.astype(hidden_BxTxD.dtype)
  logits_BxTxV = dense.dot_general(
    hidden_BxTxD,
    weight_VxD,
    dimension_numbers=(((2,), (1,)), ((), ())),
    preferred_element_type=dtype if stored is None else jnp.dtype(stored),
  )
  logits_BxTxV = logits_BxTxV.astype(dtype)
  if bias_V is not None:
    logits_BxTxV = _add_bias(logits_BxTxV, bias_V)
  return cap_logits(logits_BxTxV, cap)


@jax.custom_vjp
def _add_bias(logits_BxTxV: jax.Array, bias_V: jax.Array) -> jax.Array:
  return logits_BxTxV + bias_V


def _add_bias_forward(logits_BxTxV: jax.Array, bias_V: jax.Array) -> tuple[jax.Array, jax.Array]:
  return logits_BxTxV + bias_V, bias_V


def _add_bias_backward(bias_V: jax.Array, d_logits_BxTxV: jax.Array) -> tuple[jax.Array, jax.Array]:
  # Sums over tokens first, then over rows. With more than about 10,000 words one sum over both is
  # several times slower on a CPU (1.0 s instead of 0.1 s for 77,000 words, 64 x 20 tokens).
  d_bias_BxV = jax.lax.optimization_barrier(d_logits_BxTxV.sum(axis=1))
  return d_logits_BxTxV, d_bias_BxV.sum(axis=0).astype(bias_V.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def token_scores(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  targets_BxT: jax.Array,
  chunk: int | None = None,
  cap: float | None = None,
  stored: str | None = None,
) -> TokenScores:
  """Returns -log softmax(hidden weight^T + bias)[target], see `summary` for the arguments."""
  total = summary(hidden_BxTxD, weight_VxD, bias_V, targets_BxT, chunk, cap, stored)
  return TokenScores(total.log_sum_BxT - total.target_BxT, total.best_BxT == targets_BxT)


def summary(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  targets_BxT: jax.Array,
  chunk: int | None = None,
  cap: float | None = None,
  stored: str | None = None,
) -> Summary:
  """Returns the softmax of hidden weight^T + bias.

  Args:
    hidden_BxTxD: final hidden states.
    weight_VxD, bias_V: output layer.
    targets_BxT: ids in [0, V).
    chunk: number of logits per token that exist at once. None means all.
    cap: see `cap_logits`. None: logits are not capped.
    stored: dtype in which the products are stored. None: at least float32.
  """
  B, T = targets_BxT.shape
  V, D = weight_VxD.shape
  C = -(-V // (chunk or V))
  F = _block_count(B, T, V, D) if C == 1 else 1
  if F == 1:
    return _chunked_summary(hidden_BxTxD, weight_VxD, bias_V, targets_BxT, C, cap, stored)

  def split(array_BxTx):
    array_BxFxtx = array_BxTx.reshape(B, F, T // F, *array_BxTx.shape[2:])
    return jnp.moveaxis(array_BxFxtx, 1, 0)

  def summarize(block):
    hidden_BxtxD, targets_Bxt = block
    return _chunked_summary(hidden_BxtxD, weight_VxD, bias_V, targets_Bxt, C, cap, stored)

  summary_FxBxt = jax.lax.map(summarize, (split(hidden_BxTxD), split(targets_BxT)))
  return jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1).reshape(B, T), summary_FxBxt)


def _block_count(B: int, T: int, V: int, D: int) -> int:
  """Returns F for tokens [B, T] and a weight [V, D]; 1 if the passes over logits are not blocked.

  The gradient of the weight is summed over the blocks, which a block of few tokens is not worth.
  """
  if mesh_axes.device()[0] != 'cpu' or mesh_axes.shards('batch') > 1:
    return 1
  min_tokens = max(-(-MIN_BLOCK // V), 2 * D)
  for F in range(B * T // min_tokens, 1, -1):
    if T % F == 0:
      return F
  return 1


def _chunked_summary(
  hidden_BxTxD: jax.Array,
  weight_VxD: jax.Array,
  bias_V: jax.Array | None,
  targets_BxT: jax.Array,
  C: int,
  cap: float | None,
  stored: str | None,
) -> Summary:
  """Returns the same as `summary`, in C chunks of the vocabulary."""
  V = len(weight_VxD)
  dtype = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
  lowest = jnp.finfo(dtype).min / 4
  if bias_V is None:
    bias_V = jnp.zeros(V, dtype)
  else:
    bias_V = bias_V.astype(dtype)
  weight_VxD = weight_VxD.astype(hidden_BxTxD.dtype)
  weight_CxRxD, bias_CxR = _split_vocabulary(weight_VxD, bias_V, C, lowest)
  R = bias_CxR.shape[1]

  def add_chunk(
    running: Summary, chunk: tuple[jax.Array, jax.Array, jax.Array | int]
  ) -> tuple[Summary, None]:
    weight_RxD, bias_R, c = chunk
    logits_BxTxR = full_logits(hidden_BxTxD, weight_RxD, bias_R, cap, stored)
    if cap is not None and R * C > V:  # the cap is above `lowest`
      logits_BxTxR = jnp.where(jnp.arange(R) * C + c < V, logits_BxTxR, lowest)
    log_sum_BxT, target_BxT = _log_sum_and_logit(logits_BxTxR, targets_BxT // C)
    top_row_BxT, top_BxT = _first_maximum(logits_BxTxR)
    top_id_BxT = top_row_BxT * C + c
    is_higher_BxT = top_BxT > running.best_logit_BxT
    is_equal_BxT = top_BxT == running.best_logit_BxT
    is_better_BxT = is_higher_BxT | (is_equal_BxT & (top_id_BxT < running.best_BxT))
    running = Summary(
      log_sum_BxT=jnp.logaddexp(running.log_sum_BxT, log_sum_BxT),
      target_BxT=jnp.where(targets_BxT % C == c, target_BxT, running.target_BxT),
      best_logit_BxT=jnp.maximum(running.best_logit_BxT, top_BxT),
      best_BxT=jnp.where(is_better_BxT, top_id_BxT, running.best_BxT),
    )
    return running, None

  lowest_BxT = jnp.full(targets_BxT.shape, lowest, dtype)
  no_id_BxT = jnp.full(targets_BxT.shape, V, jnp.int32)
  running = Summary(lowest_BxT, jnp.zeros_like(lowest_BxT), lowest_BxT, no_id_BxT)
  if C == 1:
    total, _ = add_chunk(running, (weight_CxRxD[0], bias_CxR[0], 0))
    return total
  chunks = (weight_CxRxD, bias_CxR, jnp.arange(C, dtype=jnp.int32))
  total, _ = jax.lax.scan(jax.checkpoint(add_chunk), running, chunks)
  return total


def _split_vocabulary(
  weight_VxD: jax.Array, bias_V: jax.Array, C: int, lowest: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the weights [C, R, D] and biases [C, R] of the chunks; padding has the bias `lowest`.

  Chunk c has the ids c, c + C, c + 2 C, ..., so that every device has its share of every chunk if
  the vocabulary is sharded, without communication.
  """
  V, D = weight_VxD.shape
  R = -(-V // C)
  # The barrier makes the optimizer read the gradient in the order of rows, not of chunks.
  weight_VxD = jax.lax.optimization_barrier(weight_VxD)
  weight_CxRxD = jnp.pad(weight_VxD, ((0, R * C - V), (0, 0))).reshape(R, C, D).swapaxes(0, 1)
  bias_CxR = jnp.pad(bias_V, (0, R * C - V), constant_values=lowest).reshape(R, C).T
  return weight_CxRxD, bias_CxR


def _first_maximum(logits_BxTxR: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the first row with the highest logit, and this logit without a gradient; [B, T]."""
  R = logits_BxTxR.shape[-1]
  row_R = jnp.arange(R, dtype=jnp.int32)
  logits_BxTxR = jax.lax.stop_gradient(logits_BxTxR)
  top_BxT = logits_BxTxR.max(axis=-1)
  row_BxT = jnp.where(logits_BxTxR == top_BxT[..., None], row_R, R).min(axis=-1)
  return row_BxT, top_BxT


# The gradient is written out: the exponentials serve both passes, and one pass makes the gradient.
@jax.custom_vjp
def _log_sum_and_logit(logits_BxTxR: jax.Array, row_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the log of the sum of exp(logit), and the logit of one row; both [B, T]."""
  result, _ = _forward(logits_BxTxR, row_BxT)
  return result


def _forward(
  logits_BxTxR: jax.Array, row_BxT: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
  """Returns the result of `_log_sum_and_logit`, and what its gradient needs."""
  max_BxTx1 = logits_BxTxR.max(axis=-1, keepdims=True)
  exp_BxTxR = jnp.exp(logits_BxTxR - max_BxTx1)
  sum_BxTx1 = exp_BxTxR.sum(axis=-1, keepdims=True)
  if mesh_axes.device()[0] == 'cpu':
    row_BxTx1 = row_BxT[..., None]
    logit_BxTx1 = jnp.take_along_axis(logits_BxTxR, row_BxTx1, axis=-1, mode='clip')
    logit_BxT = logit_BxTx1[..., 0]
  else:  # in the pass of the sum
    logit_BxT = jnp.where(_is_row(row_BxT, logits_BxTxR), logits_BxTxR, 0).sum(axis=-1)
  log_sum_BxT = (max_BxTx1 + jnp.log(sum_BxTx1))[..., 0]
  return (log_sum_BxT, logit_BxT), (exp_BxTxR, sum_BxTx1, row_BxT)


def _backward(
  residuals: tuple[jax.Array, jax.Array, jax.Array], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
  """Returns the gradient of the logits."""
  exp_BxTxR, sum_BxTx1, row_BxT = residuals
  d_log_sum_BxT, d_logit_BxT = gradients
  d_logits_BxTxR = exp_BxTxR * (d_log_sum_BxT[..., None] / sum_BxTx1)
  d_logits_BxTxR += jnp.where(_is_row(row_BxT, exp_BxTxR), d_logit_BxT[..., None], 0)
  return d_logits_BxTxR, None


_log_sum_and_logit.defvjp(_forward, _backward)


def _is_row(row_BxT: jax.Array, array_BxTxR: jax.Array) -> jax.Array:
  """Returns where the last axis of an array has the index of a row, bool [B, T, R]."""
  return row_BxT[..., None] == jnp.arange(array_BxTxR.shape[-1], dtype=jnp.int32)
