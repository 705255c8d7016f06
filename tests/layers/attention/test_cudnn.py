"""Attention of cuDNN: the arguments of its calls mean what full scores compute; what is lowered."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import kernels
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import programs, sampling
from ngrammer_jax.layers import mesh_axes
from ngrammer_jax.layers.attention import cudnn, fused
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.system import hosts

ALL = cudnn.UsableCalls(cudnn.CALLS, cudnn.CALLS)
GPU = ('gpu', 'NVIDIA H100')
B, T, N, C, H = 2, 32, 4, 2, 8
HAS_GROUPED_OFFSETS = jax.__version_info__ >= cudnn.GROUPED_OFFSETS_VERSION
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
  assert cudnn._error(call, window, (N, C_PACKED, H), 'bfloat16') < 0.02
  assert [a['variadic_args'][0] for a in calls.called] == [call == 'masked']


@pytest.mark.slow
def test_a_call_that_computes_something_else_is_not_used(fake):
  find = cudnn.find.__wrapped__
  fake()
  assert find(N, C_PACKED, H, 'bfloat16') == ALL
  fake(window_offset=1)
  usable = find(N, C_PACKED, H, 'bfloat16')
  assert usable.calls == cudnn.CALLS and usable.window_calls == ()
  assert 'the causal call with a window of cuDNN differs from full scores by' in usable.problem
  fake(ignores_offsets_of_keys=True)
  usable = find(N, C_PACKED, H, 'bfloat16')
  assert usable.calls == usable.window_calls == ('causal', 'masked')
  assert 'the packed call of cuDNN differs' in usable.problem


@pytest.mark.slow
def test_calls_are_compared_while_a_program_is_traced_for_a_mesh(fake):
  fake()
  usable = []

  def trace(x):
    usable.append(cudnn.find.__wrapped__(N, N, H, 'bfloat16'))
    return x

  with sharding.use(sharding.make_mesh()):
    jax.jit(trace).trace(jnp.zeros(8))
  assert usable == [ALL]


def test_wrong_offsets_of_grouped_keys_are_not_tried(monkeypatch):
  # They may read memory that is not there, after which a GPU computes nothing more.
  monkeypatch.setattr(cudnn, '_error', lambda *_: 0.0)
  grouped, own = (cudnn.find.__wrapped__(N, each, H, 'bfloat16') for each in (C, N))
  assert own == ALL and ('packed' in grouped.calls) == HAS_GROUPED_OFFSETS


def test_functions_that_jax_has_moved_are_a_problem_and_no_error(monkeypatch):
  monkeypatch.setattr(cudnn._jax_calls(), 'check_cudnn_version', lambda: 91000)
  monkeypatch.delattr(cudnn._jax_calls(), '_dot_product_attention_fwd_rule')
  usable = cudnn.find.__wrapped__(N, N, H, 'bfloat16')
  assert usable.calls == usable.window_calls == () and 'AttributeError' in usable.problem


def test_without_a_gpu_no_call_is_used():
  usable = cudnn.find(N, C, H, 'bfloat16')
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
  monkeypatch.setattr(cudnn, '_error', lambda *_: 0.0)
  usable = cudnn.find.__wrapped__(N, N, H, 'bfloat16')
  assert usable.calls == ('causal', 'masked') and usable.window_calls == cudnn.CALLS
  assert usable.problem == (packed_fails if index else f'in process 1, {packed_fails}')
  assert names == [f'cudnn_{N}_{N}_{H}_bfloat16']


ONE = [0] * 8
FEW = [0, 0, 1, 1, 1, 4, 4, 4]
PADDED = [0, 0, 0, 0, 1, -2, -2, -2]
RESUMED = [0, 0, -2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
  'rows, call',
  [
    ([ONE, ONE], 'causal'),
    ([ONE, FEW], 'packed'),
    ([PADDED, FEW], 'packed'),
    ([FEW, RESUMED], 'masked'),
    ([ONE, range(8)], 'masked'),
  ],
)
def test_the_documents_decide_which_call_runs(rows, call, monkeypatch):
  monkeypatch.setattr(cudnn, 'MAX_DOCUMENTS', 4)
  sequences = cudnn.find_sequences(jnp.asarray([list(row) for row in rows]))
  chosen = cudnn._switch(cudnn.CALLS, sequences, lambda call: lambda: cudnn.CALLS.index(call))
  assert cudnn.CALLS[chosen] == call
  without = cudnn._switch(('causal', 'masked'), sequences, lambda call: lambda: call == 'causal')
  assert without == (call == 'causal')


def test_sequences_have_the_offsets_and_lengths_of_documents(monkeypatch):
  monkeypatch.setattr(cudnn, 'MAX_DOCUMENTS', 4)
  sequences = cudnn.find_sequences(jnp.asarray([FEW, PADDED, ONE]))
  assert sequences.offsets_BxR.tolist() == [[0, 2, 5, -1], [0, 4, 5, -1], [0, -1, -1, -1]]
  assert sequences.lengths_BxR.tolist() == [[2, 3, 3, -1], [4, 1, 3, -1], [8, -1, -1, -1]]


# Lowering.


@pytest.fixture
def gpu(monkeypatch):
  """Lowers for a GPU: JAX asks for its cuDNN and its architecture, and attention for its calls."""
  calls = cudnn._jax_calls()
  monkeypatch.setattr(calls, 'check_cudnn_version', lambda: 91000)
  monkeypatch.setattr(calls, 'check_compute_capability', lambda _: True)
  monkeypatch.setattr(mesh_axes, 'device', lambda: GPU)

  def install(*names, deterministic=False):
    usable = cudnn.UsableCalls(names, names, '' if names == cudnn.CALLS else 'a problem')
    monkeypatch.setattr(cudnn, 'find', lambda *_: usable)
    monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=true' if deterministic else '')

  return install


def custom_calls(lowered):
  """The calls of cuDNN in a program: name, mask, sequences of a row, window and seed."""
  text = lowered.as_text()
  pattern = r'@__cudnn\$fmha(\w+)\(.*?mask_type\\22: \\22(\w+)\\22.*?seed\\22: (\d+).*?'
  pattern += r'window_length\\22: (\d+).*?per_batch\\22: (\d+)'
  return [
    (name, mask, int(seed), int(window), int(sequences))
    for name, mask, seed, window, sequences in re.findall(pattern, text)
  ]


@pytest.mark.parametrize('window', [None, 16])
def test_the_calls_that_are_lowered(window, gpu):
  gpu(*cudnn.CALLS)
  heads = [jax.ShapeDtypeStruct((B, T, count, H), 'bfloat16') for count in (N, C, C)]
  documents_BxT = jax.ShapeDtypeStruct((B, T), 'int32')
  options = cudnn.Options(cudnn.CALLS, window)

  def loss(q, k, v, documents_BxT):
    return cudnn.attend(options, q, k, v, documents_BxT).astype(jnp.float32).sum()

  lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*heads, documents_BxT)
  lowered = lowered.lower(lowering_platforms=('cuda',))
  window = window or 0
  expected = [
    ('Softmax', 'CAUSAL', 0, window, 1),
    ('Softmax', 'PADDING_CAUSAL', 0, window, cudnn.MAX_DOCUMENTS),
    ('ScaleBiasSoftmax', 'CAUSAL', 0, 0, 1),
  ]
  backward = [(f'{name}Backward', *more) for name, *more in expected]
  assert custom_calls(lowered) == expected + backward
  # Grouped heads are not copied, and the bias has no gradient.
  text = lowered.as_text()
  results = re.findall(r'Backward\(.*-> \((.*?)\)', text)
  own = f'tensor<{B}x{N}x{T}x{H}xbf16>', *[f'tensor<{B}x{C}x{T}x{H}xbf16>'] * 2
  assert [tuple(each.split(', ')[:-1]) for each in results] == [own] * 3


def small_model(**fields):
  """A model of two layers, and its abstract parameters."""
  small = {'layers': 2, 'width': N * H, 'heads': N, 'feed_forward_width': 16, 'dtype': 'bfloat16'}
  config = model_config.ModelConfig(**{'key_value_heads': C, 'ngram': None} | small | fields)
  model = language_model.build(config, 50, jit_layers=True)
  return model, model_variables.abstract(model)['params']


def lower_gradient(**fields):
  """The gradient of a small model, for a GPU."""
  model, params = small_model(**fields)
  tokens_BxT = jax.ShapeDtypeStruct((B, T), jnp.int32)
  memory = jax.eval_shape(lambda: model.empty_memory(B))

  def loss(params, tokens_BxT, memory):
    hidden_BxTxD = model.apply({'params': params}, tokens_BxT, memory)[0]
    return hidden_BxTxD.astype(jnp.float32).sum()

  traced = jax.jit(jax.grad(loss)).trace(params, tokens_BxT, memory)
  return traced.lower(lowering_platforms=('cuda',))


@pytest.mark.parametrize('remat', [pytest.param('none', marks=full), 'minimal'])
def test_the_forward_call_runs_once(remat, gpu):
  # Without the names of output and statistics, rematerialisation runs it again.
  gpu('causal')
  lowered = lower_gradient(remat=remat, layers=1)
  assert [name for name, *_ in custom_calls(lowered)] == ['Softmax', 'SoftmaxBackward']


def test_full_scores_are_lowered_where_no_call_is_used(gpu):
  gpu()
  assert custom_calls(lower_gradient(layers=1)) == []


@full
def test_layers_that_are_traced_once_have_equal_calls(gpu):
  gpu('causal')
  assert {seed for _, _, seed, *_ in custom_calls(lower_gradient())} == {0}


def test_deterministic_programs_have_no_equal_gradients(gpu):
  gpu('causal', deterministic=True)
  scanned = [name for name, *_ in custom_calls(lower_gradient())]
  assert scanned == ['Softmax', 'SoftmaxBackward']  # of a loop over both layers
  in_a_row = custom_calls(lower_gradient(scan_layers=False))
  assert sorted(seed for name, _, seed, *_ in in_a_row if 'Backward' in name) == [0, 1]


SEGMENT_MEMORY = {'memory': model_config.MemoryConfig(8, same_length='memory')}


@pytest.mark.parametrize('fields, window', [({}, 0), (SEGMENT_MEMORY, 8)])
def test_the_prompt_of_a_generation_has_the_calls_of_training(fields, window, gpu, monkeypatch):
  """No key is in its KV cache yet. What is read later attends to the cache, and has none."""
  gpu('causal')
  monkeypatch.setattr(kernels, 'MIN_PROMPT', T)
  model, params = small_model(layers=1, **fields)
  array = jax.ShapeDtypeStruct
  prompt = token_batch.Batch(
    array((B, T), jnp.int32), None, array((B, T), bool), array((B, T), jnp.int32)
  )
  memory = jax.eval_shape(lambda: model.empty_memory(B, T))
  state = programs.DecodingState(memory, array((), jnp.int32), array((B,), jnp.int32))
  sampler = sampling.SamplerParams.from_config(sampling.SamplingConfig(), 50)
  arguments = {'params': params}, array((B,), jnp.uint32), sampler, prompt

  def calls(is_first):
    run = functools.partial(programs.decode_prompt, model, is_first=is_first)
    traced = jax.jit(run).trace(*arguments, state=state)
    return custom_calls(traced.lower(lowering_platforms=('cuda',)))

  assert calls(is_first=True) == [('Softmax', 'CAUSAL', 0, window, 1)]
  assert calls(is_first=False) == []
  monkeypatch.setattr(kernels, 'MIN_PROMPT', T + 1)
  assert calls(is_first=True) == []


@pytest.mark.parametrize(
  'usable, fields, note',
  [
    ((), {}, 'attention: plain, because cudnn cannot be used: a problem'),
    (('causal', 'masked'), {}, 'attention: cudnn (causal, masked) alone, because a problem'),
    (cudnn.CALLS, {}, None),
    (cudnn.CALLS, {'window': True}, None),
    (
      cudnn.CALLS,
      {'attention_dropout': 0.1},
      'attention: plain, because cudnn does not support dropout',
    ),
    (cudnn.CALLS, {'kernel': 'xla'}, "attention: plain, because of model.kernel='xla'"),
  ],
)
def test_what_gives_up_speed_is_said(usable, fields, note, gpu):
  gpu(*usable)
  needs = {'dropout'} if 'attention_dropout' in fields else set()
  needs |= {'window'} if 'window' in fields else set()
  query = jax.ShapeDtypeStruct((B, T, N, H), 'bfloat16')
  workload = fused.workload(query, key_heads=C, asks_for_cudnn=True)
  kernel = fields.get('kernel')
  notes = kernels.speed_notes(kernel, frozenset(needs), workload, None)
  assert notes == ([note] if note else [])
  is_plain = note is not None and note.startswith('attention: plain')
  assert (kernels.select(kernel, frozenset(needs), workload) == 'xla') == is_plain
