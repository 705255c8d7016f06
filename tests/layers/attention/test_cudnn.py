"""Attention of cuDNN: the choice of a call by the documents, and the lowered calls."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from ngrammer_jax.config import kernels
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import programs, sampling
from ngrammer_jax.layers import mesh_axes
from ngrammer_jax.layers.attention import cudnn, cudnn_support, fused
from ngrammer_jax.models import language_model, model_variables

GPU = ('gpu', 'NVIDIA H100')
B, T, N, C, H = 2, 32, 4, 2, 8
full = pytest.mark.full


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
    usable = cudnn_support.UsableCalls(names, names, '' if names == cudnn.CALLS else 'a problem')
    monkeypatch.setattr(cudnn_support, 'usable_calls', lambda *_: usable)
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
