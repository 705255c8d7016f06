"""Attention in blocks equals attention over full scores, with every option of a model.

The goldens' configs train on segments of one split. Others, with learned spans, are compared where
every row has its own split into segments, padded to one length, and with a KV cache too.
"""

import copy
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.config import kernels
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import span as span_config
from ngrammer_jax.layers import mesh_axes
from ngrammer_jax.layers.attention import blocks, local
from ngrammer_jax.models import language_model, transformer
from tests import jaxprs
from tests.checks import assert_close, full, random_variables, rest_is_slow
from tests.goldens import models

GOLDENS = {
  name: case
  for name, case in models.cases().items()
  if name.startswith('transformer') and not case['prefix']
}
# Without spans, so that it is computed once; test_any_split_in_blocks is quick.
FULL = 'transformer_36'
SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture
def small_blocks(monkeypatch):
  """Blocks of four queries and keys."""
  monkeypatch.setattr(blocks, 'BLOCK', 4)
  monkeypatch.setattr(span_config, 'MIN_LIMIT', 1)  # for these, too, blocks skip keys
  monkeypatch.setattr(local, 'block_count', lambda T, M: 1)  # it drops other probabilities


@pytest.mark.parametrize(
  'name', [*rest_is_slow([name for name in GOLDENS if name != FULL], ()), full(FULL)]
)
def test_blocks_equal_whole_scores(x64, small_blocks, tmp_path, name):
  """Hidden states, memory, codebook, loss and the gradient of every parameter."""
  case = copy.deepcopy(GOLDENS[name])
  # Of spans this short, the goldens count other keys.
  case['model']['kernel'] = 'xla'
  expected = models.compute(case, tmp_path) if case['model']['span'] else models.golden(name)
  case['model']['kernel'] = 'blocks'
  wrong = models.differing(models.compute(case, tmp_path), expected)
  assert not wrong, f'{name} {models.options(GOLDENS[name])} differs in {wrong}'


T, S, V = 8, 8, 13
SEGMENTS, CALLS, STREAMS, SPLITS = 3, 5, 2, 3
NGRAM = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)
DYNAMIC = model_config.SpanConfig('dynamic', limit=S, ramp=2, initial=-9.0)
PLAIN = model_config.ModelConfig(
  layers=2,
  width=16,
  heads=4,
  feed_forward_width=24,
  scan_layers=False,
  dtype='float64',
  position='table',
  positional=model_config.PositionalConfig(max_length=S),
  memory=model_config.MemoryConfig(S, same_length='memory_alone'),
  span=model_config.SpanConfig(limit=S, ramp=2),
)
ATTENDED = dataclasses.replace(NGRAM, layer='attention', pairing=('attended',))
CHANGES = {
  'relative, all-attention, zeros first': {
    'position': 'relative',
    'positional': None,
    'persistent': model_config.PersistentConfig(5),
    'feed_forward_width': 0,
    'norm': 'post_skip',
    'memory': model_config.MemoryConfig(S, 'zeros', 'memory_alone', across_documents=True),
  },
  'primer with n-grams': {
    'position': 'rope',
    'positional': None,
    'convolution': 3,
    'shared_query_key': True,
    'per_dim_scale': True,
    'ngram': NGRAM,
    'memory': model_config.MemoryConfig(S, same_length='memory_and_self'),
  },
  'tokens with spans of their own, pairs by attention': {'span': DYNAMIC, 'ngram': ATTENDED},
  'learned distances, one head of vectors, scanned': {
    'position': 'shaw',
    'positional': model_config.PositionalConfig(max_length=5),
    'bias': True,
    'persistent': model_config.PersistentConfig(5, 'single_head'),
    'scan_layers': True,
    'remat': 'full',
  },
  'official': {'norm': 'post_skip'},
  'tokens with spans of their own': {'span': DYNAMIC},
  'half of the heads for vectors': {
    'persistent': model_config.PersistentConfig(5, 'head_split'),
    'feed_forward_width': 0,
  },
  'pairs by attention': {'ngram': ATTENDED},
  'scanned, zeros first': {
    'scan_layers': True,
    'norm': 'post_skip',
    'remat': 'full',
    'memory': model_config.MemoryConfig(S, 'zeros', 'memory_alone', across_documents=True),
  },
}
# Of heads: none, some and all of the memory is in reach.
SPANS = np.array([[0.2, 1.0, 0.9, 0.4], [0.0, 0.45, 0.24, 0.1], [0.0, 0.2, 0.24, 0.0]])


def rows():
  """Of each call the tokens, starts and what is valid; and of each token its call and column.

  Rows are streams, split in whole segments and otherwise.
  """
  rng, count = np.random.default_rng(0), STREAMS * SPLITS
  stream = np.tile(rng.integers(0, V, (STREAMS, SEGMENTS * T)), (SPLITS, 1))
  starts = np.zeros(stream.shape, bool)
  starts[1::STREAMS, [5, 11, 12]] = True
  lengths = np.array([[T] * SEGMENTS + [0] * (CALLS - SEGMENTS), [3, 1, 8, 4, 8], [0, 5, 8, 8, 3]])
  lengths = np.repeat(lengths, STREAMS, axis=0)
  tokens = rng.integers(0, V, (CALLS, count, T))  # and padding
  segment_starts, valid = np.zeros((2, CALLS, count, T), np.int32)
  place = np.zeros((count, SEGMENTS * T, 2), int)
  for row in range(count):
    pairs = [(call, column) for call in range(CALLS) for column in range(lengths[row, call])]
    place[row] = pairs
    call, column = place[row].T
    tokens[call, row, column] = stream[row]
    segment_starts[call, row, column] = starts[row]
    valid[call, row, column] = 1
  return (tokens, segment_starts > 0, valid), place


ROWS, PLACE = rows()


def set_spans(variables, spans):
  """Variables with these spans, as shares of the limit, whether learned by head or by token."""
  params = dict(variables['params'])
  for number, share_N in enumerate(spans):
    layer = params[f'layer_{number}']
    span_params = layer['attention']['span']
    if 'span' in span_params:
      span_params = {'span': jnp.asarray(share_N[: len(span_params['span'])])}
    else:
      share_N = 0.9 * share_N + 1e-3
      bias_N = jnp.asarray(np.log(share_N / (1 - share_N)))
      span_params = {'span_kernel': 0.01 * span_params['span_kernel'], 'span_bias': bias_N}
    params[f'layer_{number}'] = layer | {'attention': layer['attention'] | {'span': span_params}}
  return variables | {'params': params}


def variables_of(config):
  model = transformer.TransformerLM(config, V)
  memory = language_model.empty_memory(config, STREAMS * SPLITS)
  variables = random_variables(model, ROWS[0][0], memory, dtype='float64')
  return set_spans(variables, SPANS[: config.layers])


def program(config, kernel, variables, slots=0, gradients=False):
  """Hidden states of all rows in order [R, SEGMENTS T, D], and gradients or None."""
  model = transformer.TransformerLM(dataclasses.replace(config, kernel=kernel), V)
  memory = language_model.empty_memory(config, STREAMS * SPLITS, slots)

  def loss(params):
    def call(memory, segment):
      tokens, starts, valid = segment
      hidden, memory, aux = model.apply(
        variables | {'params': params}, tokens, memory, starts_BxT=starts, valid_BxT=valid
      )
      return memory, (hidden, aux['span'])

    _, (hidden, aux) = jax.lax.scan(call, memory, ROWS)
    return jnp.where(ROWS[2][..., None] > 0, jnp.sin(hidden), 0).sum() + 100 * aux.sum(), hidden

  function = lambda params: (loss(params), None)
  if gradients:
    function = jax.value_and_grad(loss, has_aux=True)
  (_, hidden), gradient = jax.jit(function)(variables['params'])
  rows = np.arange(len(PLACE))[:, None]
  return np.asarray(hidden)[PLACE[..., 0], rows, PLACE[..., 1]], gradient


def change_layers(change, layers):
  config = dataclasses.replace(PLAIN, layers=layers, **CHANGES[change])
  if config.ngram is None or config.ngram.layer != 'attention':
    return config
  pairing = ('attended', 'previous', 'attended')[:layers]
  return dataclasses.replace(config, ngram=dataclasses.replace(config.ngram, pairing=pairing))


def check(config, gradients, slots=(0, S)):
  """In blocks all is as over full scores, however rows are split, with a KV cache too."""
  config.check()
  variables = variables_of(config)
  full, gradient = program(config, 'xla', variables, 0, gradients)
  for first in range(STREAMS):
    for other in range(first + STREAMS, STREAMS * SPLITS, STREAMS):
      assert_close(full[other], full[first], 1e-12)
  for count in slots:
    differentiated = gradients and not count
    in_blocks, block_gradient = program(config, 'blocks', variables, count, differentiated)
    assert_close(in_blocks, full, 1e-10)
    if differentiated:
      jax.tree.map(lambda a, b: assert_close(a, b, 1e-10), block_gradient, gradient)


# Whether gradients are compared, and slots for keys and values: what is quick.
QUICK_CHANGES = {
  'relative, all-attention, zeros first': (True, [0]),
  'primer with n-grams': (False, [0, S]),
}


@pytest.mark.parametrize('change', QUICK_CHANGES)
def test_any_split_in_blocks(x64, small_blocks, change):
  check(change_layers(change, 1), *QUICK_CHANGES[change])


@SLOW
@pytest.mark.parametrize('change', CHANGES)
def test_any_split_and_gradients_of_three_layers(x64, small_blocks, change):
  check(change_layers(change, 3), True)


@SLOW
@pytest.mark.parametrize('slots', [0, S])
def test_what_no_token_calls_for_is_not_read(x64, small_blocks, slots):
  """Spans of less than 4 tokens: what is kept of older ones may be anything."""
  config = dataclasses.replace(PLAIN, layers=1, span=DYNAMIC, ngram=ATTENDED, kernel='blocks')
  model = transformer.TransformerLM(config, V)
  memory = language_model.empty_memory(config, 1, slots)
  tokens, variables = ROWS[0][0][:1], variables_of(config)
  run = jax.jit(
    lambda params, memory, valid: model.apply(
      variables | {'params': params}, tokens, memory, valid_BxT=valid
    )[:2]
  )

  def with_bias(bias):
    params = dict(variables['params'])
    attend = params['layer_0']['attention']
    span_params = {'span_kernel': np.zeros((16, 4)), 'span_bias': np.full(4, bias)}
    params['layer_0'] = params['layer_0'] | {'attention': attend | {'span': span_params}}
    return params

  valid = lambda count: (np.arange(T)[None] < count).astype(np.int32)
  for bias, same in ((-9.0, True), (9.0, False)):
    _, state = run(with_bias(bias), memory, valid(T))
    _, state = run(with_bias(bias), state, valid(3))
    layer = dict(state['layers'][0])
    if slots:  # the 11 tokens so far are in slots 0 to 7, the last in 2
      values = layer['cache'].values.at[:, :, 3:7].set(np.nan)
      layer |= {'cache': layer['cache'].replace(values=values)}
    else:
      layer |= {'hidden': layer['hidden'].at[:, :4].set(np.nan)}
    y, z = (
      run(with_bias(bias), each, valid(2))[0][:, :2]
      for each in (state, state | {'layers': (layer,)})
    )
    assert np.array_equal(y, z) == same


@pytest.mark.full
@pytest.mark.parametrize(
  'kernel, T, slots, change, in_blocks',
  [
    (None, 64, 0, None, True),
    (None, 63, 0, None, False),  # too few scores
    (None, 63, 2048, None, True),  # in a cache there are more
    (None, 7, 8192, None, False),  # too few queries
    (None, 64, 0, 'prefix', False),  # blocks know no later tokens
    (None, 64, 192, 'no spans', True),
    pytest.param(None, 64, 0, 'no spans', False, marks=SLOW),
    pytest.param(None, 193, 192, 'no spans', True, marks=SLOW),  # a prompt that fills its context
    (None, 512, 1, 'no spans', True),  # a long segment without a memory
    pytest.param(None, 448, 1, 'no spans', False, marks=SLOW),
    (None, 64, 192, 'tpu', False),  # without spans, they are faster on a CPU only
    pytest.param('xla', 64, 0, None, False, marks=SLOW),
    ('blocks', 32, 0, None, True),
    pytest.param('blocks', 32, 0, 'no spans', True, marks=SLOW),
  ],
)
def test_blocks_are_taken_where_they_are_faster(monkeypatch, kernel, T, slots, change, in_blocks):
  """Whether there is an array as large as all scores of a head says which way it went."""
  monkeypatch.setattr(blocks, 'BLOCK', 16)
  monkeypatch.setattr(kernels, 'MIN_SCORES', 64 * 128)
  monkeypatch.setattr(kernels, 'MIN_QUERIES', 16)
  monkeypatch.setattr(local, 'block_count', lambda T, M: 1)
  memory = model_config.MemoryConfig(64, same_length='memory_and_self')
  if change == 'tpu':
    monkeypatch.setattr(mesh_axes, 'device', lambda: ('tpu', 'TPU v4'))
  spans = None if change in ('no spans', 'tpu') else model_config.SpanConfig(limit=64, ramp=4)
  config = model_config.ModelConfig(
    layers=1, width=4, heads=1, feed_forward_width=4, memory=memory, span=spans, kernel=kernel
  )
  model, tokens = transformer.TransformerLM(config, V), np.zeros((1, T), np.int32)
  memory = language_model.empty_memory(config, 1, slots)
  args = {'prefix_BxT': tokens > 0} if change == 'prefix' else {}
  variables = random_variables(model, tokens, memory)
  run = lambda variables: model.apply(variables, tokens, memory, **args)[0]
  scores = T * (T + (slots or 64))
  assert (jaxprs.largest_array(run, variables) < scores) == in_blocks


@pytest.mark.parametrize('span, kernel', [(None, None), (PLAIN.span, 'blocks')])
def test_a_config_of_the_removed_kernel_is_read(tmp_path, caplog, span, kernel):
  model_config._warn_of_removed_kernel.cache_clear()
  path, plain = tmp_path / 'config.json', dataclasses.replace(PLAIN, span=span)
  saved = dataclasses.asdict(plain) | {'kernel': 'pallas'}
  path.write_text(json.dumps({'model': saved, 'data': {}}))
  for _ in range(2):  # and one warning
    assert experiment.load(path).model == dataclasses.replace(plain, kernel=kernel)
  expected = f"model.kernel='pallas' was removed: it is read as model.kernel={kernel!r}"
  assert caplog.messages == [expected]


@pytest.mark.full
@pytest.mark.parametrize('slots', [0, 128])
def test_no_program_has_an_array_of_all_scores(slots):
  """Neither training nor evaluation, with a KV cache, keeps the scores of all heads and rows."""
  rows, T, heads = 2, 128, 4
  memory = model_config.MemoryConfig(128)
  config = model_config.ModelConfig(
    layers=1, width=16, heads=heads, feed_forward_width=16, position='relative', memory=memory
  )
  model, tokens = transformer.TransformerLM(config, V), np.zeros((rows, T), np.int32)
  memory = language_model.empty_memory(config, rows, slots)
  variables = random_variables(model, tokens, memory)
  run = lambda variables: model.apply(variables, tokens, memory)[0].sum()
  program = jax.jit(run if slots else jax.grad(run)).lower(variables).compile().as_text()
  sizes = [
    np.prod([int(size) for size in shape.split(',')])
    for shape in re.findall(r'\b[a-z]+\d+\[([\d,]+)\]', program)
  ]
  assert rows * T * 16 <= max(sizes) < rows * heads * T * (T + 128)
