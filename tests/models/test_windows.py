"""Attention limited to windows equals full attention.

Of each config hidden states and gradients of a program over all segments are compared: full
attention, heads by their windows with queries in blocks, and a KV cache. Every row has its own
split into segments, padded to one length.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import local
from ngrammer_jax.models import transformer
from ngrammer_jax.training import windows
from tests import jaxprs
from tests.checks import assert_close, random_variables

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
# Heads whose span and ramp are below 4 tokens, and others: a key at the very end of the ramp has
# no weight, but a slope.
WINDOWS = ((4, 6, 4, 4), (4, 4, 4, 4))
SPANS = np.array([[0.0, 0.45, 0.24, 0.1], [0.0, 0.2, 0.24, 0.0]])
LONGER, LONGER_SPANS = ((4, 8, 8, 6), *WINDOWS), np.array([[0.2, 1.0, 0.9, 0.4], *SPANS])


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
  given, valid = np.zeros((2, CALLS, count, T), np.int32)
  place = np.zeros((count, SEGMENTS * T, 2), int)
  for row in range(count):
    pairs = [(call, column) for call in range(CALLS) for column in range(lengths[row, call])]
    place[row] = pairs
    call, column = place[row].T
    tokens[call, row, column], given[call, row, column] = stream[row], starts[row]
    valid[call, row, column] = 1
  return (tokens, given > 0, valid), place


ROWS, PLACE = rows()


def set_spans(variables, spans):
  """Sets spans, and shrinks logits: where the mask leaves little mass, the 1e-8 would count."""

  def even(path, leaf):
    names = [key.key for key in path]
    small = ('query', 'key', 'relative', 'distance_embedding', 'content_bias', 'position_bias')
    return 0.1 * leaf if set(small) & set(names) else leaf

  params = jax.tree_util.tree_map_with_path(even, variables['params'])
  for number, share_N in enumerate(spans):
    learned = params[f'layer_{number}']['attention']['span']
    if 'span' in learned:
      learned['span'] = jnp.asarray(share_N[: len(learned['span'])])
    else:
      share_N = 0.9 * share_N + 1e-3
      learned['span_kernel'] *= 0.01
      learned['span_bias'] = jnp.asarray(np.log(share_N / (1 - share_N)))
  return variables | {'params': params}


def variables_of(config, spans=SPANS):
  model = transformer.TransformerLM(config, V)
  memory = transformer.empty_memory(config, STREAMS * SPLITS)
  return set_spans(random_variables(model, ROWS[0][0], memory, dtype='float64'), spans)


def windows_of(config, of_heads=WINDOWS):
  if config.span.kind == 'dynamic':
    return ((4, 6, 8),) * config.layers
  if windows.apart(config):
    return of_heads
  return tuple((max(sizes),) * config.heads for sizes in of_heads)


def program(config, variables, sizes, slots=0, gradients=False):
  """Hidden states of all rows in order [R, SEGMENTS T, D], gradients or None; and the jaxpr."""
  model = transformer.TransformerLM(config, V, sizes)
  memory = transformer.empty_memory(config, STREAMS * SPLITS, slots, sizes)

  def loss(params):
    def call(memory, given):
      tokens, starts, valid = given
      hidden, memory, aux = model.apply(
        variables | {'params': params}, tokens, memory, starts_BxT=starts, valid_BxT=valid
      )
      return memory, (hidden, aux['span'])

    _, (hidden, aux) = jax.lax.scan(call, memory, ROWS)
    return jnp.where(ROWS[2][..., None] > 0, jnp.sin(hidden), 0).sum() + 100 * aux.sum(), hidden

  function = lambda params: (loss(params), None)
  if gradients:
    function = jax.value_and_grad(loss, has_aux=True)
  traced = jax.jit(function).trace(variables['params'])
  (_, hidden), gradient = traced.lower().compile()(variables['params'])
  rows = np.arange(len(PLACE))[:, None]
  return np.asarray(hidden)[PLACE[..., 0], rows, PLACE[..., 1]], gradient, traced.jaxpr


def weights(jaxpr):
  """Elements of what softmaxes exponentiate: how many keys are looked at."""
  of = (e for e in jaxprs.equations(jaxpr.jaxpr) if e.primitive.name == 'exp')
  return sum(e.outvars[0].aval.size for e in of)


def check(config, monkeypatch, gradients, slots=(0, S), of_heads=WINDOWS, spans=SPANS):
  """By windows all is as it is without; the variables and hidden states."""
  config.check()
  spans, of_heads = spans[: config.layers], of_heads[: config.layers]
  variables, sizes = variables_of(config, spans), windows_of(config, of_heads)
  whole, gradient, full_jaxpr = program(config, variables, None, 0, gradients)
  for first in range(STREAMS):
    for other in range(first + STREAMS, STREAMS * SPLITS, STREAMS):
      assert_close(whole[other], whole[first], 1e-12)
  monkeypatch.setattr(local, 'BLOCK', 2)
  assert local.blocks(T, S) == 4
  for count in slots:
    differentiated = gradients and not count
    within, by_windows, windowed_jaxpr = program(config, variables, sizes, count, differentiated)
    # What is left out has no weight but in the 1e-8 that the mass under the mask is added to.
    assert_close(within, whole, 1e-6)
    if differentiated:
      jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), by_windows, gradient)
    # Dynamic spans choose among programs, and scanned layers are one.
    if not count and config.span.kind == 'adaptive' and not config.scan_layers:
      assert weights(windowed_jaxpr) < weights(full_jaxpr)
  return variables, whole


# Whether gradients are compared, and slots for keys and values: what is quick.
QUICK = {
  'relative, all-attention, zeros first': (True, [0]),
  'tokens with spans of their own, pairs by attention': (False, [0, S]),
}


@pytest.mark.parametrize('change', QUICK)
def test_heads_by_their_windows_and_queries_in_blocks(x64, monkeypatch, change):
  check(of_layers(change, 1), monkeypatch, *QUICK[change])


def of_layers(change, layers):
  config = dataclasses.replace(PLAIN, layers=layers, **CHANGES[change])
  if config.ngram is None or config.ngram.layer != 'attention':
    return config
  pairing = ('attended', 'previous', 'attended')[:layers]
  return dataclasses.replace(config, ngram=dataclasses.replace(config.ngram, pairing=pairing))


@pytest.mark.slow
@pytest.mark.parametrize('change', CHANGES)
def test_gradients_and_windows_of_three_layers(x64, monkeypatch, change):
  """And windows that are too small are seen."""
  config = of_layers(change, 3)
  variables, whole = check(config, monkeypatch, True, (0, S), LONGER, LONGER_SPANS)
  without = program(config, variables, ((2,) * 4,) * 3, S)[0]
  assert np.abs(without - whole).max() > 1e-3


@pytest.mark.parametrize('slots', [0, pytest.param(S, marks=pytest.mark.slow)])
def test_what_no_token_calls_for_is_not_read(x64, slots):
  """Spans of less than 4 tokens: what is kept of older ones may be anything."""
  config = dataclasses.replace(PLAIN, layers=1, span=DYNAMIC, ngram=ATTENDED)
  sizes = windows_of(config)
  model = transformer.TransformerLM(config, V, sizes)
  memory = transformer.empty_memory(config, 1, slots, sizes)
  tokens = ROWS[0][0][:1]
  variables = variables_of(config, SPANS[:1])
  run = jax.jit(
    lambda params, memory, valid: model.apply(
      variables | {'params': params}, tokens, memory, valid_BxT=valid
    )[:2]
  )

  def of(bias):
    params = dict(variables['params'])
    attend = params['layer_0']['attention']
    learned = {'span_kernel': np.zeros((16, 4)), 'span_bias': np.full(4, bias)}
    params['layer_0'] = params['layer_0'] | {'attention': attend | {'span': learned}}
    return params

  valid = lambda count: (np.arange(T)[None] < count).astype(np.int32)
  for bias, same in ((-9.0, True), (9.0, False)):
    _, kept = run(of(bias), memory, valid(T))
    _, kept = run(of(bias), kept, valid(3))
    layer = {name: np.array(part) for name, part in kept['layers'][0].items()}
    if slots:  # the 11 tokens so far are in slots 0 to 7, the last in 2
      layer['values'][:, :, 3:7] = np.nan
    else:
      layer['hidden'][:, :4] = np.nan
    y, z = (run(of(bias), k, valid(2))[0][:, :2] for k in (kept, kept | {'layers': (layer,)}))
    assert np.array_equal(y, z) == same
