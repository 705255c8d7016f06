"""Which cuDNN attention calls a device supports: each is compared with full scores.

`usable_calls` runs every call of `cudnn` on the device, forward and backward, before its first use.
All processes run the same program, so a call that fails in one process is used in none.

B batch, T queries and keys, N query heads, C key heads, H head width.
"""

from collections.abc import Sequence
from concurrent import futures
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.layers import document_masks, dropout
from ngrammer_jax.layers.attention import cudnn, full
from ngrammer_jax.layers.context import Keys
from ngrammer_jax.system import hosts

# JAX version: in earlier ones, packed calls read beyond grouped keys, see docs/gpus.md.
GROUPED_OFFSETS_VERSION = (0, 11, 2)
# Arrays of the comparison with full scores.
CHECKED_WINDOW = 24
CHECKED_STARTS = ((0, 5, 70), (0, 1, 64, 100, 127))  # first tokens of the documents of each row
CHECKED_LENGTH = 128
TOLERANCE = 0.05  # share of the largest number; bfloat16 rounds to 0.004


class UsableCalls(NamedTuple):
  """The calls that cuDNN computes correctly on a device.

  Attributes:
    calls, window_calls: members of `cudnn.CALLS`, without and with a window. Empty: cuDNN cannot
      be used.
    problem: why some calls are missing. Empty: none is.
  """

  calls: tuple[str, ...] = ()
  window_calls: tuple[str, ...] = ()
  problem: str = ''


@functools.cache
def usable_calls(N: int, C: int, H: int, dtype: str) -> UsableCalls:
  """Returns the calls of cuDNN that agree with full scores on a device of every process.

  It takes seconds, once for each shape of the heads. All processes must call it with the same
  arguments in the same order. They do so while they trace the same programs.

  Args:
    N, C, H: query heads, key heads and head width, of one device.
    dtype: of queries, keys and values.

  Raises:
    PeerLostError: a process did not send its result in time.
  """
  # Threads of their own, since this one may be tracing, for other devices; they compile together.
  cases = [(call, window) for window in (None, CHECKED_WINDOW) for call in cudnn.CALLS]
  with futures.ThreadPoolExecutor(len(cases)) as pool:
    own_problems = [*pool.map(lambda case: _problem(*case, (N, C, H), dtype), cases)]
  # Over the network of the hosts: a program of the devices may be traced now.
  mailbox = hosts.Mailbox(f'cudnn_{N}_{C}_{H}_{dtype}')
  received = mailbox.exchange(0, json.dumps(own_problems).encode())
  by_process = [json.loads(content) for content in received]
  problems = [_first_problem(of_case) for of_case in zip(*by_process, strict=True)]
  calls, window_calls = (
    tuple(call for call, problem in zip(cudnn.CALLS, own, strict=True) if not problem)
    for own in (problems[: len(cudnn.CALLS)], problems[len(cudnn.CALLS) :])
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
  """Returns the calls; none of them if some documents would have no call."""
  if {'causal', 'masked'} <= {*calls}:
    return calls
  return ()


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
    call: one of `cudnn.CALLS`.
    window: see `cudnn.Options`.
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
    return cudnn.attend(cudnn.Options((call,), window), *heads, documents_BxT)

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
