"""Support of cuDNN: the comparison of its calls with full scores finds every wrong argument."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.layers.attention import cudnn, cudnn_support
from ngrammer_jax.system import hosts

ALL = cudnn_support.UsableCalls(cudnn.CALLS, cudnn.CALLS)
N, C, H = 4, 2, 8
HAS_GROUPED_OFFSETS = jax.__version_info__ >= cudnn_support.GROUPED_OFFSETS_VERSION
C_PACKED = C if HAS_GROUPED_OFFSETS else N
full = pytest.mark.full


def scores_of(sequences, mask_type, window):
  """Scores of each sequence, [S, N, T, T], as cuDNN documents its masks."""
  query_SxTxNxH, key_SxTxCxH, lengths_S = sequences
  T, N = query_SxTxNxH.shape[1:3]
  key_SxTxNxH = jnp.repeat(key_SxTxCxH, N // key_SxTxCxH.shape[2], axis=2)
  scores_SxNxTxT = jnp.einsum('stnh,sunh->sntu', query_SxTxNxH, key_SxTxNxH)
  distance_TxT = jnp.arange(T)[:, None] - jnp.arange(T)
  visible_SxTxT = (distance_TxT >= 0)[None]
  if window:
    visible_SxTxT &= distance_TxT < window
  if mask_type.name == 'PADDING_CAUSAL':
    visible_SxTxT = visible_SxTxT & (jnp.arange(T) < lengths_S[:, None])[:, None]
  else:
    assert mask_type.name == 'CAUSAL'
  return jnp.where(visible_SxTxT[:, None], scores_SxNxTxT, -1e30)


class FakeCalls:
  """The private functions of JAX, computed from their arguments as cuDNN documents them.

  What a call does not write is nan, and statistics are those that the forward call returned.
  """

  def __init__(self, window_offset=0, ignores_offsets_of_keys=False):
    self.window_offset = window_offset
    self.ignores_offsets_of_keys = ignores_offsets_of_keys
    self.called = []

  def __call__(self, name, arguments):
    a = {key: arguments[key] for key in cudnn._parameters(name)}
    if name.endswith('bwd_rule'):
      names = cudnn._parameters('_dot_product_attention_fwd_rule')
      *inputs, statistics, output = a.pop('res')
      a |= dict(zip(names, inputs, strict=False))
      return self.backward(a, statistics, output)
    self.called.append(a)
    assert (a['scale'], a['dropout_rate'], a['variadic_args'][1]) == (1.0, 0.0, False)
    return self.forward(a)

  def split(self, a, *arrays):
    """Sequences of arrays of tokens, and the flat token of each; those of no sequence are B T."""
    B, T = a['query'].shape[:2]
    if a['q_offsets'].ndim != 2:
      token_SxT = jnp.arange(B * T).reshape(B, T)
      return arrays, token_SxT, jnp.full(B, T)
    lengths, _, *offsets = cudnn._jax_calls()._fix_seqlen_offsets(
      *(a[name] for name in ('q_seqlen', 'kv_seqlen', 'q_offsets', 'kv_offsets', 'query', 'key'))
    )
    lengths_S = lengths.reshape(-1)

    def pick(array, offsets, source):
      begin_S = offsets.reshape(-1)[: lengths_S.size] // math.prod(source.shape[2:])
      token_SxT = begin_S[:, None] + jnp.arange(T)
      flat = jnp.asarray(array).reshape(B * T, *array.shape[2:])
      return flat[jnp.clip(token_SxT, 0, B * T - 1)], token_SxT

    query_offsets, key_offsets = offsets
    if self.ignores_offsets_of_keys:
      key_offsets = key_offsets * 0
    sequences = []
    for index, array in enumerate(arrays):
      is_key = index in (1, 2)
      source = a['key'] if is_key else a['query']
      sequences.append(pick(array, key_offsets if is_key else query_offsets, source)[0])
    token_SxT = pick(arrays[0], query_offsets, a['query'])[1]
    inside_SxT = jnp.arange(T) < lengths_S[:, None]
    return sequences, jnp.where(inside_SxT, token_SxT, B * T), lengths_S

  def join(self, a, values_SxTx, token_SxT):
    """Arrays of tokens, [B, T, ...], of those of sequences."""
    B, T = a['query'].shape[:2]
    flat = jnp.full((B * T, *values_SxTx.shape[2:]), jnp.nan)
    flat = flat.at[token_SxT].set(values_SxTx, mode='drop')
    return flat.reshape(B, T, *values_SxTx.shape[2:])

  def scores(self, a, query, key, lengths_S):
    window = a['sliding_window_length']
    if window is not None:
      window += self.window_offset
    scores = scores_of((query, key, lengths_S), a['mask_type'], window)
    if a['variadic_args'][0]:
      scores += a['bias'].astype(scores.dtype)
    return scores

  def forward(self, a):
    heads = [a[name].astype(jnp.float32) for name in ('query', 'key', 'value')]
    (query, key, value), token_SxT, lengths_S = self.split(a, *heads)
    scores = self.scores(a, query, key, lengths_S)
    statistics_SxNxT = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - statistics_SxNxT[..., None])
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    output = self.join(a, jnp.einsum('sntu,sunh->stnh', weights, value), token_SxT)
    unused_SxT = token_SxT == output.shape[0] * output.shape[1]
    statistics_SxNxT = jnp.where(unused_SxT[:, None], jnp.nan, statistics_SxNxT)
    output = output.astype(a['query'].dtype)
    return output, (a['query'], statistics_SxNxT, output)

  def backward(self, a, statistics_SxNxT, output):
    gradient = a['grad_output'].astype(jnp.float32)
    heads = [a[name].astype(jnp.float32) for name in ('query', 'key', 'value')]
    arrays, token_SxT, lengths_S = self.split(a, *heads, gradient, output.astype(jnp.float32))
    query, key, value, gradient, output = arrays
    inside_SxTx1x1 = (token_SxT < a['query'].shape[0] * a['query'].shape[1])[..., None, None]
    inside_Sx1xTx1 = inside_SxTx1x1.swapaxes(1, 2)
    scores, pullback = jax.vjp(lambda q, k: self.scores(a, q, k, lengths_S), query, key)
    weights = jnp.exp(scores - statistics_SxNxT[..., None])
    weights = jnp.where(inside_Sx1xTx1, weights, 0.0)
    repeat = lambda v: jnp.repeat(v, query.shape[2] // v.shape[2], axis=2)
    values, pullback_values = jax.vjp(repeat, value)
    (d_value,) = pullback_values(jnp.einsum('sntu,stnh->sunh', weights, gradient))
    d_weights = jnp.einsum('stnh,sunh->sntu', gradient, values)
    shared_SxNxTx1 = (gradient * output).sum(-1).swapaxes(1, 2)[..., None]
    d_query, d_key = pullback(weights * jnp.where(inside_Sx1xTx1, d_weights - shared_SxNxTx1, 0.0))
    return [
      self.join(a, array, token_SxT).astype(a['query'].dtype) for array in (d_query, d_key, d_value)
    ]


@pytest.fixture
def fake(monkeypatch):
  def install(**mistakes):
    calls = FakeCalls(**mistakes)
    monkeypatch.setattr(cudnn, '_call_rule', calls)
    monkeypatch.setattr(cudnn._jax_calls(), 'check_cudnn_version', lambda: 91000)
    return calls

  return install


@pytest.mark.parametrize(
  'call, window',
  [('packed', 24), ('masked', 24)]
  + [pytest.param(*each, marks=full) for each in (('packed', None), ('masked', None))]
  + [pytest.param('causal', window, marks=full) for window in (None, 24)],
)
def test_the_arguments_of_each_call_mean_what_full_scores_compute(call, window, fake):
  # Wrong masks, windows, offsets, lengths or statistics of another document make an error.
  calls = fake()
  assert cudnn_support._error(call, window, (N, C_PACKED, H), 'bfloat16') < 0.02
  assert [a['variadic_args'][0] for a in calls.called] == [call == 'masked']


@pytest.mark.slow
def test_a_call_that_computes_something_else_is_not_used(fake):
  usable_calls = cudnn_support.usable_calls.__wrapped__
  fake()
  assert usable_calls(N, C_PACKED, H, 'bfloat16') == ALL
  fake(window_offset=1)
  usable = usable_calls(N, C_PACKED, H, 'bfloat16')
  assert usable.calls == cudnn.CALLS and usable.window_calls == ()
  assert 'the causal call with a window of cuDNN differs from full scores by' in usable.problem
  fake(ignores_offsets_of_keys=True)
  usable = usable_calls(N, C_PACKED, H, 'bfloat16')
  assert usable.calls == usable.window_calls == ('causal', 'masked')
  assert 'the packed call of cuDNN differs' in usable.problem


@pytest.mark.slow
def test_calls_are_compared_while_a_program_is_traced_for_a_mesh(fake):
  fake()
  usable = []

  def trace(x):
    usable.append(cudnn_support.usable_calls.__wrapped__(N, N, H, 'bfloat16'))
    return x

  with sharding.use(sharding.make_mesh()):
    jax.jit(trace).trace(jnp.zeros(8))
  assert usable == [ALL]


def test_wrong_offsets_of_grouped_keys_are_not_tried(monkeypatch):
  # They may read memory that is not there, after which a GPU computes nothing more.
  monkeypatch.setattr(cudnn_support, '_error', lambda *_: 0.0)
  grouped, own = (cudnn_support.usable_calls.__wrapped__(N, each, H, 'bfloat16') for each in (C, N))
  assert own == ALL and ('packed' in grouped.calls) == HAS_GROUPED_OFFSETS


def test_functions_that_jax_has_moved_are_a_problem_and_no_error(monkeypatch):
  monkeypatch.setattr(cudnn._jax_calls(), 'check_cudnn_version', lambda: 91000)
  monkeypatch.delattr(cudnn._jax_calls(), '_dot_product_attention_fwd_rule')
  usable = cudnn_support.usable_calls.__wrapped__(N, N, H, 'bfloat16')
  assert usable.calls == usable.window_calls == () and 'AttributeError' in usable.problem


def test_without_a_gpu_no_call_is_used():
  usable = cudnn_support.usable_calls(N, C, H, 'bfloat16')
  assert usable.calls == () and 'the causal call of cuDNN fails' in usable.problem


@pytest.mark.parametrize('index', [0, 1])
def test_processes_use_the_calls_that_all_of_them_can(index, monkeypatch):
  """Otherwise their programs would differ, and wait for each other without an end."""
  packed_fails = 'the packed call of cuDNN fails (no)'
  of_other = ['', packed_fails, *[''] * 4]
  names = []

  class Mailbox:
    def __init__(self, name):
      names.append(name)

    def exchange(self, number, content):
      received = [json.dumps(of_other).encode()] * 2
      received[index] = content
      return received

  monkeypatch.setattr(hosts, 'Mailbox', Mailbox)
  monkeypatch.setattr(cudnn_support, '_error', lambda *_: 0.0)
  usable = cudnn_support.usable_calls.__wrapped__(N, N, H, 'bfloat16')
  assert usable.calls == ('causal', 'masked') and usable.window_calls == cudnn.CALLS
  assert usable.problem == (packed_fails if index else f'in process 1, {packed_fails}')
  assert names == [f'cudnn_{N}_{N}_{H}_bfloat16']
