"""Softmax over the vocabulary, in chunks.

  nll = log sum_v exp(h w_v + b_v) - (h w_target + b_target)

The logits of all V words are not materialized: the log-sum-exp runs over chunks of the vocabulary,
recomputed in the backward pass. On a CPU the chunks are blocks of tokens with all their logits,
small enough for the cache in every pass.

B batch, T segment length, D model width, V vocabulary, C chunks, R ids of one chunk, F blocks of
t = T / F tokens of every row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import dense, mesh_axes

OUTPUT_AXES = ((2,), (1,)), ((), ())  # of hidden states [B, T, D] and weights [V, D]
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
  stored_dtype = dtype
  if stored is not None:
    stored_dtype = jnp.dtype(stored)
  logits_BxTxV = dense.dot_general(
    hidden_BxTxD,
    weight_VxD,
    OUTPUT_AXES,
    preferred_element_type=stored_dtype,
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
  return d_logits_BxTxV, _sum_over_tokens(d_logits_BxTxV, bias_V.dtype)


def _sum_over_tokens(array_BxTxV: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Returns the sums over rows and tokens in a dtype, [V]."""
  # Sums over tokens first, then over rows. With more than about 10,000 words one sum over both is
  # several times slower on a CPU (1.0 s instead of 0.1 s for 77,000 words, 64 x 20 tokens).
  sums_BxV = jax.lax.optimization_barrier(array_BxTxV.sum(axis=1, dtype=dtype))
  return sums_BxV.sum(axis=0)


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
    stored: dtype of the stored products. None: at least float32.
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

  Blocks of few tokens do not pay, since the gradient of the weight is summed over the blocks.
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
  has_bias = bias_V is not None
  if not has_bias:
    bias_V = jnp.zeros(V, dtype)
  weight_VxD = weight_VxD.astype(hidden_BxTxD.dtype)
  chunks = _split_vocabulary(weight_VxD, bias_V.astype(dtype), C)
  return _summarize(Logits(V, cap, stored, has_bias), hidden_BxTxD, chunks, targets_BxT)


class Chunk(NamedTuple):
  """The output layer of one chunk of the vocabulary, or of all chunks with a leading axis C."""

  weight_RxD: jax.Array
  bias_R: jax.Array
  index: jax.Array  # c, the remainder of the ids of the chunk divided by C


class Logits(NamedTuple):
  """Options of the logits of a chunk.

  Attributes:
    V: size of the vocabulary; logits of ids from V on are `_lowest`.
    cap: see `cap_logits`.
    stored: dtype of the stored products. None: at least float32.
    has_bias: whether the gradient of the biases is needed.
  """

  V: int
  cap: float | None
  stored: str | None
  has_bias: bool

  @property
  def sums_bias_in_product(self) -> bool:
    """Whether the gradients of weight and bias are one product.

    A separate sum stores the gradient of the logits and reads it once more. Without the sum,
    XLA:TPU fuses this gradient into both products. Not used where D is sharded, since one more
    input would make D uneven.
    """
    is_tpu = mesh_axes.device()[0] == 'tpu'
    return is_tpu and self.has_bias and mesh_axes.shards('embed') == 1

  @property
  def keeps_exponentials(self) -> bool:
    """Whether the gradient reads exp(logit - highest logit) instead of the products.

    A CPU reads an exponential in less time than it computes one. Other devices compute it again in
    the pass of the gradient, and store one array of the size of the logits less. A cap needs the
    products.
    """
    is_stored_in_full = self.stored is None or jnp.dtype(self.stored).itemsize >= 4
    return mesh_axes.device()[0] == 'cpu' and self.cap is None and is_stored_in_full

  def products(self, hidden_BxTxD: jax.Array, weight_RxD: jax.Array) -> jax.Array:
    """Returns the products of hidden states and weights, [B, T, R]."""
    dtype = jnp.promote_types(hidden_BxTxD.dtype, jnp.float32)
    if self.stored is not None:
      dtype = jnp.dtype(self.stored)
    return dense.dot_general(hidden_BxTxD, weight_RxD, OUTPUT_AXES, preferred_element_type=dtype)

  def of(self, products_BxTxR: jax.Array, chunk: Chunk, C: int) -> jax.Array:
    """Returns the logits for products in at least float32, [B, T, R]."""
    R = len(chunk.bias_R)
    logits_BxTxR = cap_logits(products_BxTxR + chunk.bias_R, self.cap)
    if self.cap is not None and R * C > self.V:  # the cap is above the lowest logit
      is_word_R = jnp.arange(R) * C + chunk.index < self.V
      logits_BxTxR = jnp.where(is_word_R, logits_BxTxR, _lowest(logits_BxTxR.dtype))
    return logits_BxTxR


def _lowest(dtype: jnp.dtype) -> jax.Array:
  return jnp.finfo(dtype).min / 4


# The gradient is written out: it needs one array of the size of the logits, reads it once, and is
# rounded to the dtype of the hidden states before both of its products.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summarize(
  logits: Logits, hidden_BxTxD: jax.Array, chunks: Chunk, targets_BxT: jax.Array
) -> Summary:
  """Returns the softmax over all chunks; log-sum and target have a gradient."""
  total, _ = _forward(logits, hidden_BxTxD, chunks, targets_BxT)
  return total


def _forward(
  logits: Logits, hidden_BxTxD: jax.Array, chunks: Chunk, targets_BxT: jax.Array
) -> tuple[Summary, tuple]:
  """Returns the result of `_summarize`, and the residuals of its gradient.

  The residuals are the inputs, the summary, and the products or exponentials of a single chunk (see
  `Logits.keeps_exponentials`). The products of several chunks are recomputed.
  """
  C = len(chunks.index)
  dtype = chunks.bias_R.dtype

  def add_chunk(running: Summary, chunk: Chunk) -> tuple[Summary, jax.Array]:
    products_BxTxR = logits.products(hidden_BxTxD, chunk.weight_RxD)
    logits_BxTxR = logits.of(products_BxTxR.astype(dtype), chunk, C)
    part, exponentials_BxTxR = _summarize_chunk(logits_BxTxR, targets_BxT // C)
    top_id_BxT = part.best_BxT * C + chunk.index
    is_higher_BxT = part.best_logit_BxT > running.best_logit_BxT
    is_equal_BxT = part.best_logit_BxT == running.best_logit_BxT
    is_better_BxT = is_higher_BxT | (is_equal_BxT & (top_id_BxT < running.best_BxT))
    has_target_BxT = targets_BxT % C == chunk.index
    running = Summary(
      log_sum_BxT=jnp.logaddexp(running.log_sum_BxT, part.log_sum_BxT),
      target_BxT=jnp.where(has_target_BxT, part.target_BxT, running.target_BxT),
      best_logit_BxT=jnp.maximum(running.best_logit_BxT, part.best_logit_BxT),
      best_BxT=jnp.where(is_better_BxT, top_id_BxT, running.best_BxT),
    )
    if logits.keeps_exponentials:
      return running, exponentials_BxTxR
    return running, products_BxTxR

  lowest_BxT = jnp.full(targets_BxT.shape, _lowest(dtype), dtype)
  no_id_BxT = jnp.full(targets_BxT.shape, logits.V, jnp.int32)
  running = Summary(lowest_BxT, jnp.zeros_like(lowest_BxT), lowest_BxT, no_id_BxT)
  if C == 1:
    total, kept_BxTxR = add_chunk(running, _only(chunks))
  else:
    total, _ = jax.lax.scan(lambda *carry: (add_chunk(*carry)[0], None), running, chunks)
    kept_BxTxR = None
  return total, (hidden_BxTxD, chunks, targets_BxT, total, kept_BxTxR)


def _backward(logits: Logits, residuals: tuple, gradient: Summary) -> tuple:
  """Returns the gradients of hidden states and chunks."""
  hidden_BxTxD, chunks, targets_BxT, total, kept_BxTxR = residuals
  C = len(chunks.index)
  dtype = chunks.bias_R.dtype

  def differentiate_products(chunk: Chunk, products_BxTxR: jax.Array) -> jax.Array:
    logits_BxTxR, pull_back = jax.vjp(
      lambda products_BxTxR: logits.of(products_BxTxR, chunk, C), products_BxTxR.astype(dtype)
    )
    probabilities_BxTxR = jnp.exp(logits_BxTxR - total.log_sum_BxT[..., None])
    d_logits_BxTxR = probabilities_BxTxR * gradient.log_sum_BxT[..., None]
    (d_products_BxTxR,) = pull_back(add_target(chunk, d_logits_BxTxR))
    return d_products_BxTxR

  def differentiate_exponentials(chunk: Chunk, exponentials_BxTxR: jax.Array) -> jax.Array:
    inverse_sum_BxT = jnp.exp(total.best_logit_BxT - total.log_sum_BxT)
    factor_BxT = inverse_sum_BxT * gradient.log_sum_BxT
    return add_target(chunk, exponentials_BxTxR * factor_BxT[..., None])

  def add_target(chunk: Chunk, d_logits_BxTxR: jax.Array) -> jax.Array:
    row_BxT = jnp.where(targets_BxT % C == chunk.index, targets_BxT // C, -1)
    d_target_BxTx1 = gradient.target_BxT[..., None]
    return d_logits_BxTxR + jnp.where(_is_row(row_BxT, d_logits_BxTxR), d_target_BxTx1, 0)

  def differentiate_chunk(
    chunk: Chunk, d_products_BxTxR: jax.Array
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    d_products_BxTxR = d_products_BxTxR.astype(hidden_BxTxD.dtype)
    d_hidden_BxTxD, d_weight_RxD = dense.gradients(
      hidden_BxTxD, chunk.weight_RxD, OUTPUT_AXES, d_products_BxTxR
    )
    if logits.sums_bias_in_product:
      d_weight_RxD, d_bias_R = _weight_and_bias_gradients(hidden_BxTxD, d_products_BxTxR)
    else:
      d_bias_R = _sum_over_tokens(d_products_BxTxR, dtype)
    return d_hidden_BxTxD, (d_weight_RxD, d_bias_R.astype(dtype))

  def add_chunk(sum_BxTxD: jax.Array, chunk: Chunk) -> tuple[jax.Array, Any]:
    products_BxTxR = logits.products(hidden_BxTxD, chunk.weight_RxD)
    d_products_BxTxR = differentiate_products(chunk, products_BxTxR)
    d_hidden_BxTxD, d_output = differentiate_chunk(chunk, d_products_BxTxR)
    return sum_BxTxD + d_hidden_BxTxD, d_output

  if C == 1:
    chunk = _only(chunks)
    if logits.keeps_exponentials:
      d_products_BxTxR = differentiate_exponentials(chunk, kept_BxTxR)
    else:
      d_products_BxTxR = differentiate_products(chunk, kept_BxTxR)
    d_hidden_BxTxD, d_output = differentiate_chunk(chunk, d_products_BxTxR)
    d_output = jax.tree.map(lambda array: array[None], d_output)
  else:
    sum_BxTxD = jnp.zeros(hidden_BxTxD.shape, dtype)
    sum_BxTxD, d_output = jax.lax.scan(add_chunk, sum_BxTxD, chunks)
    d_hidden_BxTxD = sum_BxTxD.astype(hidden_BxTxD.dtype)
  return d_hidden_BxTxD, Chunk(*d_output, None), None


_summarize.defvjp(_forward, _backward)


def _weight_and_bias_gradients(
  hidden_BxTxD: jax.Array, d_products_BxTxR: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the gradients of weight [R, D] and bias [R]; a bias is the weight of an input of 1."""
  one_BxTx1 = jnp.ones_like(hidden_BxTxD[..., :1])
  inputs_BxTxD = jnp.concatenate([hidden_BxTxD, one_BxTx1], axis=-1)
  tokens = (0, 1)
  d_output_RxD = jax.lax.dot_general(d_products_BxTxR, inputs_BxTxD, ((tokens, tokens), ((), ())))
  return d_output_RxD[:, :-1], d_output_RxD[:, -1]


def _only(chunks: Chunk) -> Chunk:
  """Returns the only one of the chunks."""
  return jax.tree.map(lambda array: array[0], chunks)


def _summarize_chunk(logits_BxTxR: jax.Array, row_BxT: jax.Array) -> tuple[Summary, jax.Array]:
  """Returns the softmax over the rows of one chunk, and exp(logit - highest logit) [B, T, R].

  The first row with the highest logit is best. `row_BxT` are the rows of the targets.
  """
  R = logits_BxTxR.shape[-1]
  max_BxTx1 = logits_BxTxR.max(axis=-1, keepdims=True)
  exponentials_BxTxR = jnp.exp(logits_BxTxR - max_BxTx1)
  sum_BxT = exponentials_BxTxR.sum(axis=-1)
  if mesh_axes.device()[0] == 'cpu':
    row_BxTx1 = row_BxT[..., None]
    target_BxTx1 = jnp.take_along_axis(logits_BxTxR, row_BxTx1, axis=-1, mode='clip')
    target_BxT = target_BxTx1[..., 0]
  else:  # in the pass of the sum
    target_BxT = jnp.where(_is_row(row_BxT, logits_BxTxR), logits_BxTxR, 0).sum(axis=-1)
  max_BxT = max_BxTx1[..., 0]
  best_BxT = jnp.where(logits_BxTxR == max_BxTx1, jnp.arange(R, dtype=jnp.int32), R).min(axis=-1)
  part = Summary(max_BxT + jnp.log(sum_BxT), target_BxT, max_BxT, best_BxT)
  return part, exponentials_BxTxR


def _split_vocabulary(weight_VxD: jax.Array, bias_V: jax.Array, C: int) -> Chunk:
  """Returns the C chunks; the biases of padding are `_lowest`.

  Chunk c has the ids c, c + C, c + 2 C, ..., so that every device has its share of every chunk if
  the vocabulary is sharded, without communication.
  """
  V, D = weight_VxD.shape
  R = -(-V // C)
  # The barrier makes the optimizer read the gradient in the order of rows, not of chunks.
  weight_VxD = jax.lax.optimization_barrier(weight_VxD)
  weight_CxRxD = jnp.pad(weight_VxD, ((0, R * C - V), (0, 0))).reshape(R, C, D).swapaxes(0, 1)
  padded = jnp.pad(bias_V, (0, R * C - V), constant_values=_lowest(bias_V.dtype))
  return Chunk(weight_CxRxD, padded.reshape(R, C).T, jnp.arange(C, dtype=jnp.int32))


def _is_row(row_BxT: jax.Array, array_BxTxR: jax.Array) -> jax.Array:
  """Returns where the last axis of an array has the index of a row, bool [B, T, R]."""
  return row_BxT[..., None] == jnp.arange(array_BxTxR.shape[-1], dtype=jnp.int32)
