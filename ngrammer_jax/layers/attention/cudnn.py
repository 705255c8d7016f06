"""Causal attention of cuDNN within documents, for GPUs.

Three calls give the same result. The documents of the rows decide on the device which one runs:

  causal   every row is one document: the causal mask of cuDNN, without a bias
  packed   each document is a sequence of its own, given by its offset and length
  masked   a bias [B, 1, T, T] hides other documents; it has no gradient

A sliding window is the window of cuDNN, in `masked` a part of the bias. The output and the
statistics of the softmax are named `attended`: with `remat=minimal` the forward call runs once.

The calls are private functions of JAX. `cudnn_support` compares each with full scores before its
first use.

B batch, T queries and keys, N query heads, C key heads, H head width, R sequences of a row,
S = B R.
"""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import document_masks

CALLS = ('causal', 'packed', 'masked')
MAX_DOCUMENTS = 16  # R: statistics of the softmax take R N T numbers a row while a call runs
# The bias of hidden keys: cuDNN subtracts it from itself, so that JAX takes no larger one.
HIDDEN = {'bfloat16': -(2.0**41), 'float16': -(2.0**15)}


class Options(NamedTuple):
  """What does not depend on the arrays.

  Attributes:
    calls: those of CALLS that may run, in this order.
    window: the distance to a key is less than this number. None: no limit.
    number: calls of one program with different numbers are compiled on their own, see
      `models.transformer`.
  """

  calls: tuple[str, ...]
  window: int | None = None
  number: int = 0


class Sequences(NamedTuple):
  """The documents of rows, as sequences of equal document numbers.

  Attributes:
    starts_BxT: true at the first token of each.
    lengths_BxR, offsets_BxR: length and first token of each; -1 for none.
    can_pack: whether each row has at most R, and no document continues after another.
    is_one: whether each row is one document.
  """

  starts_BxT: jax.Array
  lengths_BxR: jax.Array
  offsets_BxR: jax.Array
  can_pack: jax.Array
  is_one: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  options: Options,
  q_BxTxNxH: jax.Array,
  k_BxTxCxH: jax.Array,
  v_BxTxCxH: jax.Array,
  documents_BxT: jax.Array,
) -> jax.Array:
  """Returns softmax(q k^T) v within documents, causal and in a window, [B, T, N, H].

  Args:
    options: the calls that may run, and the window.
    q_BxTxNxH: scaled queries.
    k_BxTxCxH: keys. Query head n attends to the keys of head n // (N / C).
    v_BxTxCxH: values.
    documents_BxT: document numbers.
  """
  return _forward(options, q_BxTxNxH, k_BxTxCxH, v_BxTxCxH, documents_BxT)[0]


def _forward(
  options: Options,
  q_BxTxNxH: jax.Array,
  k_BxTxCxH: jax.Array,
  v_BxTxCxH: jax.Array,
  documents_BxT: jax.Array,
) -> tuple[jax.Array, Any]:
  """Returns [B, T, N, H], and what the gradient needs."""
  sequences = find_sequences(documents_BxT)

  def run(call):
    def branch():
      heads = (q_BxTxNxH, k_BxTxCxH, v_BxTxCxH)
      arrays = _arrays(call, options.window, heads, documents_BxT, sequences)
      _, (*_, statistics, output_BxTxNxH) = _call_rule(
        '_dot_product_attention_fwd_rule', arrays | _static(call, options)
      )
      if call == 'packed':
        statistics = _of_tokens(statistics, sequences)
      return output_BxTxNxH, statistics

    return branch

  output_BxTxNxH, statistics_BxNxT = _switch(options.calls, sequences, run)
  output_BxTxNxH, statistics_BxNxT = checkpoint_name((output_BxTxNxH, statistics_BxNxT), 'attended')
  heads = (q_BxTxNxH, k_BxTxCxH, v_BxTxCxH)
  return output_BxTxNxH, (heads, documents_BxT, statistics_BxNxT, output_BxTxNxH)


def _backward(options: Options, saved: Any, gradient_BxTxNxH: jax.Array) -> tuple[Any, ...]:
  """Returns the gradients of queries, keys and values."""
  heads, documents_BxT, statistics_BxNxT, output_BxTxNxH = saved
  sequences = find_sequences(documents_BxT)

  def run(call):
    def branch():
      statistics = statistics_BxNxT
      if call == 'packed':
        statistics = _of_sequences(statistics, sequences)
      arrays = _arrays(call, options.window, heads, documents_BxT, sequences)
      names = _parameters('_dot_product_attention_fwd_rule')
      inputs = [arrays[name] for name in names if name in arrays]
      residuals = (*inputs, statistics, output_BxTxNxH)
      of_gradient = {'res': residuals, 'grad_output': gradient_BxTxNxH}
      gradients = _call_rule(
        '_dot_product_attention_bwd_rule', of_gradient | _static(call, options)
      )
      return tuple(gradients[:3])

    return branch

  return *_switch(options.calls, sequences, run), None


attend.defvjp(_forward, _backward)


def _switch(
  calls: Sequence[str], sequences: Sequences, run: Callable[[str], Callable[[], Any]]
) -> Any:
  """Returns the result of the first call that may compute attention to these documents."""
  index = jnp.int32(len(calls) - 1)
  may_run = {'causal': sequences.is_one, 'packed': sequences.can_pack}
  for number in reversed(range(len(calls) - 1)):
    index = jnp.where(may_run[calls[number]], number, index)
  return jax.lax.switch(index, [run(call) for call in calls])


def find_sequences(documents_BxT: jax.Array) -> Sequences:
  """Returns the documents of rows as sequences; at most R of each row."""
  T = documents_BxT.shape[1]
  R = MAX_DOCUMENTS
  is_new_BxT = documents_BxT[:, 1:] != documents_BxT[:, :-1]
  starts_BxT = jnp.pad(is_new_BxT, ((0, 0), (1, 0)), constant_values=True)
  sequence_BxT = jnp.cumsum(starts_BxT, axis=1) - 1
  count_B = sequence_BxT[:, -1] + 1
  # The first token of sequence r comes after all tokens of earlier ones.
  offsets_BxR = (sequence_BxT[:, None] < jnp.arange(R)[:, None]).sum(axis=2, dtype=jnp.int32)
  ends_BxR = jnp.pad(offsets_BxR[:, 1:], ((0, 0), (0, 1)), constant_values=T)
  exists_BxR = jnp.arange(R) < count_B[:, None]
  # Padding attends to padding only, and nothing reads it: it may be in several sequences.
  highest_BxT = jax.lax.cummax(documents_BxT, axis=1)
  goes_on_BxT = starts_BxT[:, 1:] & (documents_BxT[:, 1:] <= highest_BxT[:, :-1])
  goes_on_BxT &= documents_BxT[:, 1:] != document_masks.PADDING
  return Sequences(
    starts_BxT=starts_BxT,
    lengths_BxR=jnp.where(exists_BxR, ends_BxR - offsets_BxR, -1),
    offsets_BxR=jnp.where(exists_BxR, offsets_BxR, -1),
    can_pack=(count_B <= R).all() & ~goes_on_BxT.any(),
    is_one=(count_B == 1).all(),
  )


def _arrays(
  call: str,
  window: int | None,
  heads: tuple[jax.Array, ...],
  documents_BxT: jax.Array,
  sequences: Sequences,
) -> dict[str, Any]:
  """Returns the arrays of a call, by the names of the private functions of JAX."""
  query_BxTxNxH = heads[0]
  T = documents_BxT.shape[1]
  none = jnp.zeros(0, query_BxTxNxH.dtype)
  arrays = dict.fromkeys(
    ('bias', 'q_seqlen', 'kv_seqlen', 'q_offsets', 'kv_offsets', 'page_table_k', 'page_table_v'),
    none,
  )
  arrays |= zip(('query', 'key', 'value'), heads, strict=True)
  arrays['score_mod_args'] = ()
  if call == 'packed':
    offsets_BxR1 = jnp.pad(sequences.offsets_BxR, ((0, 0), (0, 1)), constant_values=-1)
    arrays |= {'q_seqlen': sequences.lengths_BxR, 'kv_seqlen': sequences.lengths_BxR}
    arrays |= {'q_offsets': offsets_BxR1, 'kv_offsets': offsets_BxR1}
  elif call == 'masked':
    hidden_BxTxT = documents_BxT[:, :, None] != documents_BxT[:, None]
    if window is not None:
      hidden_BxTxT |= document_masks.distances(T, T) >= window
    dtype = query_BxTxNxH.dtype
    bias_BxTxT = jnp.where(hidden_BxTxT, HIDDEN[dtype.name], 0.0)
    arrays['bias'] = bias_BxTxT[:, None].astype(dtype)
  return arrays


def _static(call: str, options: Options) -> dict[str, Any]:
  """Returns the other arguments of a call, by the names of the private functions of JAX."""
  jax_calls = _jax_calls()
  masks = jax_calls.MaskType
  version = jax_calls.check_cudnn_version()
  mask_type = masks.CAUSAL
  if call == 'packed':
    mask_type = masks.PADDING_CAUSAL
  window = options.window
  if call == 'masked':  # its bias has the window
    window = None
  return {
    'scale': 1.0,
    'seed': options.number,  # of a dropout that there is not
    'dropout_rate': 0.0,
    'variadic_args': (call == 'masked', False),  # whether there is a bias, and its gradient
    'mask_type': mask_type,
    'layout': jax_calls.AttentionLayout.BTNH.value,
    'sliding_window_length': window,
    'score_mod': None,
    'cudnn_version': version,
    'is_training': version,  # so jax 0.10 calls this argument of the gradient
    'return_residual': False,
  }


def _jax_calls() -> Any:
  """Returns the private module of JAX that calls cuDNN."""
  from jax._src.cudnn import fused_attention_stablehlo

  return fused_attention_stablehlo


def _parameters(name: str) -> tuple[str, ...]:
  """Returns the names of the arguments of a private function."""
  return tuple(inspect.signature(getattr(_jax_calls(), name)).parameters)


def _call_rule(name: str, arguments: dict[str, Any]) -> Any:
  """Calls a private function with those of the arguments that it has; KeyError: it has others."""
  return getattr(_jax_calls(), name)(*(arguments[parameter] for parameter in _parameters(name)))


def _of_tokens(statistics_SxNxT: jax.Array, sequences: Sequences) -> jax.Array:
  """Returns the statistics of tokens, [B, N, T], of those of sequences, which begin at 0."""
  starts_BxT = sequences.starts_BxT
  B, T = starts_BxT.shape
  sequence_BxT = jnp.cumsum(starts_BxT.reshape(-1)).reshape(B, T) - 1
  index_T = jnp.arange(T)
  begin_BxT = jax.lax.cummax(jnp.where(starts_BxT, index_T, 0), axis=1)
  return statistics_SxNxT[sequence_BxT, :, index_T - begin_BxT].swapaxes(1, 2)


def _of_sequences(statistics_BxNxT: jax.Array, sequences: Sequences) -> jax.Array:
  """Returns the statistics of sequences, [S, N, T], of those of tokens."""
  B, N, T = statistics_BxNxT.shape
  S = B * MAX_DOCUMENTS
  sequence_BT = jnp.cumsum(sequences.starts_BxT.reshape(-1)) - 1
  begin_S = jnp.searchsorted(sequence_BT, jnp.arange(S), method='compare_all')
  token_SxT = jnp.minimum(begin_S[:, None] + jnp.arange(T), B * T - 1)
  statistics_NxBT = statistics_BxNxT.swapaxes(0, 1).reshape(N, B * T)
  return statistics_NxBT[:, token_SxT].swapaxes(0, 1)
