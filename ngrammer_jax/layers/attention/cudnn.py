"""Causal attention of cuDNN within documents, for GPUs.

Three calls give the same result. The documents of the rows decide on the device which one runs:

  causal   every row is one document: the causal mask of cuDNN, without a bias
  packed   each document is a sequence of its own, given by its offset and length
  masked   a bias [B, 1, T, T] hides other documents; it has no gradient

A sliding window is the window of cuDNN, in `masked` a part of the bias. The output and the
statistics of the softmax are named `attended`: with `remat=minimal` the forward call runs once.

The calls are private functions of JAX, and no call is used unseen: before the first one, `find`
compares each with full scores on the device, forward and backward. What fails in one process is not
used in any, since all of them run the same program.

B batch, T queries and keys, N query heads, C key heads, H head width, R sequences of a row,
S = B R.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import functools
import inspect
import json
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers import document_masks, dropout
from ngrammer_jax.layers.attention import full
from ngrammer_jax.layers.context import Keys
from ngrammer_jax.system import hosts

CALLS = ('causal', 'packed', 'masked')
MAX_DOCUMENTS = 16  # R: statistics of the softmax take R N T numbers a row while a call runs
# The bias of hidden keys: cuDNN subtracts it from itself, so that JAX takes no larger one.
HIDDEN = {'bfloat16': -(2.0**41), 'float16': -(2.0**15)}
# Of JAX: before, packed calls read beyond grouped keys, see docs/gpus.md.
GROUPED_OFFSETS_VERSION = (0, 11, 2)
# Of the comparison with full scores.
CHECKED_WINDOW = 24
CHECKED_STARTS = ((0, 5, 70), (0, 1, 64, 100, 127))  # of the documents of each row
CHECKED_LENGTH = 128
TOLERANCE = 0.05  # of the largest number; bfloat16 rounds to 0.004


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
    can_pack: whether each row has at most R, and no document goes on after another.
    is_one: whether each row is one document.
  """

  starts_BxT: jax.Array
  lengths_BxR: jax.Array
  offsets_BxR: jax.Array
  can_pack: jax.Array
  is_one: jax.Array


class UsableCalls(NamedTuple):
  """What cuDNN computes correctly on a device.

  Attributes:
    calls, window_calls: those of CALLS, without and with a window. Empty: cuDNN cannot be used.
    problem: why some are missing. Empty: none is.
  """

  calls: tuple[str, ...] = ()
  window_calls: tuple[str, ...] = ()
  problem: str = ''


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
  return {
    'scale': 1.0,
    'seed': options.number,  # of a dropout that there is not
    'dropout_rate': 0.0,
    'variadic_args': (call == 'masked', False),  # whether there is a bias, and its gradient
    'mask_type': masks.PADDING_CAUSAL if call == 'packed' else masks.CAUSAL,
    'layout': jax_calls.AttentionLayout.BTNH.value,
    'sliding_window_length': None if call == 'masked' else options.window,
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


@functools.cache
def find(N: int, C: int, H: int, dtype: str) -> UsableCalls:
  """Returns the calls of cuDNN that compute what full scores do, on a device of every process.

  It takes seconds, once for each shape of the heads. All processes have to call this, with the same
  arguments in the same order, as they do where they trace the same programs.

  Args:
    N, C, H: query heads, key heads and head width, of one device.
    dtype: of queries, keys and values.

  Raises:
    PeerLostError: a process did not send its result in time.
  """
  # Threads of their own, since this one may be tracing, for other devices; they compile together.
  cases = [(call, window) for window in (None, CHECKED_WINDOW) for call in CALLS]
  with futures.ThreadPoolExecutor(len(cases)) as pool:
    own_problems = [*pool.map(lambda case: _problem(*case, (N, C, H), dtype), cases)]
  # Over the network of the hosts: a program of the devices may be traced now.
  mailbox = hosts.Mailbox(f'cudnn_{N}_{C}_{H}_{dtype}')
  received = mailbox.exchange(0, json.dumps(own_problems).encode())
  by_process = [json.loads(content) for content in received]
  problems = [_first_problem(of_case) for of_case in zip(*by_process, strict=True)]
  calls, window_calls = (
    tuple(call for call, problem in zip(CALLS, own, strict=True) if not problem)
    for own in (problems[: len(CALLS)], problems[len(CALLS) :])
  )
  return UsableCalls(_complete(calls), _complete(window_calls), '; '.join(filter(None, problems)))


def _first_problem(by_process: Sequence[str]) -> str:
  """Returns the problem of the first process that has one. Empty: none has."""
  for index, problem in enumerate(by_process):
    if problem and index == 0:
      return problem
    if problem:
      return f'in process {index}, {problem}'
  return ''


def _complete(calls: tuple[str, ...]) -> tuple[str, ...]:
  """Returns calls of which one always applies; none if they lack one for that."""
  return calls if {'causal', 'masked'} <= {*calls} else ()


def _problem(call: str, window: int | None, heads: tuple[int, int, int], dtype: str) -> str:
  """Compares a call with full scores. Returns the problem; empty: there is none."""
  name = f'{call} call' if window is None else f'{call} call with a window'
  error = error_or_problem(call, window, heads, dtype)
  if isinstance(error, str):
    return f'the {name} of cuDNN fails ({error})'
  if error < TOLERANCE:
    return ''
  return f'the {name} of cuDNN differs from full scores by {error:.2g} of the largest number'


def error_or_problem(
  call: str, window: int | None, heads: tuple[int, int, int], dtype: str
) -> float | str:
  """Returns the error of a call and its gradients, or why it cannot run on the first device.

  Args:
    call: one of CALLS.
    window: see `Options`.
    heads: N, C and H.
    dtype: of queries, keys and values.
  """
  N, C, _ = heads
  if call == 'packed' and N != C and jax.__version_info__ < GROUPED_OFFSETS_VERSION:
    return f'jax {jax.__version__} has wrong offsets of grouped keys'
  try:
    return _error(call, window, heads, dtype)
  except Exception as failure:  # of JAX, XLA or cuDNN; each means that the call cannot run here
    line = (str(failure).splitlines() or [''])[0]
    return f'{type(failure).__name__}: {line[:200]}'


def _error(call: str, window: int | None, heads: tuple[int, int, int], dtype: str) -> float:
  """Returns the largest error of a call and its gradients, relative to the largest number."""
  N, C, H = heads
  B = len(CHECKED_STARTS)
  T = CHECKED_LENGTH
  random = np.random.default_rng(0)
  query, key, value, gradient = (
    random.normal(size=(B, T, count, H)).astype(np.float32) for count in (N, C, C, N)
  )
  documents_BxT = np.zeros((B, T), np.int32)
  if call != 'causal':
    for row, starts in enumerate(CHECKED_STARTS):
      documents_BxT[row, list(starts)] = 1
  documents_BxT = documents_BxT.cumsum(axis=1, dtype=np.int32)
  visible_BxTxS = document_masks.visible(documents_BxT, documents_BxT, window=window)

  def plain(*heads):
    keys = Keys(visible_BxTxS)
    part = full.attend(full.Heads(*heads), None, keys, None, False, dropout.Dropout())
    return part.values_BxTxNxH

  def fused(*heads):
    return attend(Options((call,), window), *heads, documents_BxT)

  @functools.partial(jax.jit, static_argnums=0)
  def with_gradients(function, heads):
    output, pullback = jax.vjp(function, *heads)
    return output, *pullback(gradient.astype(output.dtype))

  arrays = [jnp.asarray(array, dtype) for array in (query * H**-0.5, key, value)]
  actual = with_gradients(fused, arrays)
  expected = with_gradients(plain, [array.astype(jnp.float32) for array in arrays])
  errors = []
  for a, b in zip(jax.device_get(actual), jax.device_get(expected), strict=True):
    errors.append(np.abs(a.astype(np.float32) - b).max() / np.abs(b).max())
  return float(np.max(errors))  # nan if one is
