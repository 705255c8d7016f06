"""Any split of a stream, down to single tokens, equals one pass over all of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.layers import attention
from ngrammer_jax.models import attention_config, heads, transformer
from ngrammer_jax.models import config as model_config
from tests.checks import assert_close, random_variables

T, V = 8, 13
NGRAM = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=4)
PLAIN = model_config.ModelConfig(
  layers=2, width=16, heads=2, feed_forward_width=24, scan_layers=False, ngram=NGRAM
)
CHANGES = {
  'n-grammer': {},
  'no n-grams': {'ngram': None},
  'raw bi-grams': {'ngram': dataclasses.replace(NGRAM, clusters=None)},
  'added n-grams': {'ngram': dataclasses.replace(NGRAM, combine='add', dim=8)},
  'other n-gram heads': {'ngram': dataclasses.replace(NGRAM, heads=4, prenormalize=True)},
  'tri-grams': {'ngram': dataclasses.replace(NGRAM, orders=(3,), distinct_start=True)},
  'three orders': {'ngram': dataclasses.replace(NGRAM, orders=(2, 3, 4), dim=2)},
  'after the first block': {'ngram': dataclasses.replace(NGRAM, layer='begin')},
  'after the last block': {'ngram': dataclasses.replace(NGRAM, layer='end', orders=(2, 3), dim=3)},
  'in the middle, scanned': {
    'ngram': dataclasses.replace(NGRAM, layer='middle'),
    'scan_layers': True,
    'layers': 5,
  },
  'after attention': {'ngram': dataclasses.replace(NGRAM, layer='attention', orders=(2, 3), dim=2)},
  'pairs of attention': {
    'ngram': dataclasses.replace(NGRAM, layer='attention', pairing=('attended',)),
    'remat': 'full',
  },
  'pairs of attention in one block': {
    'ngram': dataclasses.replace(
      NGRAM, layer='attention', pairing=('previous', 'attended', 'none'), distinct_start=True
    ),
    'layers': 3,
    'convolution': 3,
  },
  'transformer-xl': {'position': 'relative', 'norm': 'post_skip', 'ngram': None},
  'relative positions': {
    'position': 'relative',
    'positional': model_config.PositionalConfig(shared_biases=False, clamp_length=3),
    'scan_layers': True,
  },
  'learned distances': {
    'position': 'shaw',
    'positional': model_config.PositionalConfig(max_length=5, clamp_length=4),
  },
  'relative positions of a full primer': {
    'position': 'relative',
    'convolution': 3,
    'shared_query_key': True,
    'per_dim_scale': True,
    'ngram': dataclasses.replace(NGRAM, layer='attention', pairing=('attended', 'previous')),
  },
  'adaptive span': {
    'span': model_config.SpanConfig(limit=T, ramp=3),
    'position': 'table',
    'positional': model_config.PositionalConfig(max_length=T),
  },
  'dynamic span of relative positions': {
    'span': model_config.SpanConfig(kind='dynamic', limit=T, ramp=3, initial=0.0),
    'position': 'relative',
    'scan_layers': True,
  },
  'all-attention': {
    'persistent': model_config.PersistentConfig(5),
    'feed_forward_width': 0,
    'position': 'relative',
    'norm': 'post_skip',
  },
  'all four': {
    'persistent': model_config.PersistentConfig(5),
    'span': model_config.SpanConfig(limit=T, ramp=3, renormalize=False),
    'feed_forward_width': 0,
    'convolution': 3,
    'scan_layers': True,
  },
  'two softmaxes': {'persistent': model_config.PersistentConfig(5, 'attention_split')},
  'split heads': {
    'persistent': model_config.PersistentConfig(5, 'head_split'),
    'position': 'relative',
    'convolution': 2,
  },
  'a single head of vectors': {'persistent': model_config.PersistentConfig(5, 'single_head')},
  'per-dim scale': {'per_dim_scale': True},
  'sinusoid': {'position': 'sinusoid'},
  'no positions': {'position': 'none'},
  'scanned': {'scan_layers': True},
  'recomputed': {'remat': 'full'},
  'primer': {'convolution': 3, 'activation': 'squared_relu', 'gated': False},
  'full primer': {'convolution': 3, 'shared_query_key': True, 'norm': 'primer'},
  'hybrid norms, four taps': {'convolution': 4, 'norm': 'hybrid', 'scan_layers': True},
  'post norms': {'norm': 'post'},
  'norms after the residual': {'norm': 'post_skip'},
  'biases, not gated': {'bias': True, 'gated': False, 'tie_embeddings': False},
}

# One stream, packed with documents in the second half of the rows; row b of either half has
# the first b + 1 tokens as its prompt.
TOKENS = np.tile(np.random.default_rng(0).integers(0, V, T), (2 * T, 1))
STARTS = np.zeros((2 * T, T), bool)
STARTS[T:, [0, 3, 4]] = True
PROMPTS = np.tile(np.arange(1, T + 1), 2)


def drawn(seed):
  """Any combination of switches that a model can have."""
  rng = np.random.default_rng(seed)
  pick = lambda *of: of[rng.integers(len(of))]
  positional = {
    'relative': {'shared_biases': pick(True, False), 'clamp_length': pick(None, 3)},
    'shaw': {'max_length': 5, 'clamp_length': pick(None, 4)},
    'table': {'max_length': T},
  }
  while True:
    position = pick('rope', 'sinusoid', 'relative', 'shaw', 'table')
    layer = pick(*model_config.LAYERS)
    orders = pick((2,), (3,), (2, 3))
    ngram = dataclasses.replace(
      NGRAM,
      dim=4 // len(orders),
      orders=orders,
      layer=layer,
      distinct_start=pick(True, False),
      pairing=(pick('previous', 'attended'),),
    )
    convolution = pick(None, 2, 3)
    change = {
      'position': position,
      'positional': model_config.PositionalConfig(**positional.get(position, {})),
      'ngram': pick(None, ngram),
      'norm': pick(*model_config.NORMS),
      'convolution': convolution,
      'shared_query_key': convolution is not None and pick(True, False),
      'per_dim_scale': pick(True, False),
      'bias': pick(True, False),
      'gated': pick(True, False),
      'scan_layers': pick(True, False),
      'layers': pick(1, 2, 3),
      'feed_forward_width': pick(0, 24),
      'span': pick(
        None, model_config.SpanConfig(pick(*attention_config.SPANS), limit=T, ramp=pick(1, 4))
      ),
      'persistent': pick(
        None, model_config.PersistentConfig(pick(0, 3), pick(*attention.PERSISTENT))
      ),
    }
    try:
      with_memory(dataclasses.replace(PLAIN, **change), same_length='memory').check()
    except errors.BadInput:
      continue
    return change


def build(change, dtype, serving=False, memory=None):
  change = CHANGES[change] if isinstance(change, str) else drawn(change)
  config = dataclasses.replace(PLAIN, dtype=dtype, **change)
  config = config if memory is None else with_memory(config, **memory)
  model = transformer.TransformerLM(config, V)
  memory = transformer.empty_memory(config, 2 * T)
  variables = random_variables(model, TOKENS, memory, dtype=dtype)
  if serving:
    served = heads.for_serving(model.config, variables['params'], variables['codebook'])
    variables = variables | {'codebook': served}

  @jax.jit
  def run(tokens, memory, starts, valid=None):
    hidden, memory, _ = model.apply(variables, tokens, memory, starts_BxT=starts, valid_BxT=valid)
    return hidden, memory

  return config, run


def one_pass(config, run):
  return np.asarray(run(TOKENS, transformer.empty_memory(config, 2 * T), STARTS)[0])


def decoded(config, run, slots):
  """Every row's prompt padded to one length, then every row's next token until none is left."""
  row, index = np.arange(2 * T), np.arange(T)
  memory = transformer.empty_memory(config, 2 * T, slots)
  in_prompt = index < PROMPTS[:, None]
  # What stands in the padding does not matter.
  hidden, memory = run(
    np.where(in_prompt, TOKENS, V - 1), memory, STARTS & in_prompt, in_prompt.astype(np.int32)
  )
  states = np.array(hidden)
  for step in range(T - 1):
    place = np.minimum(PROMPTS + step, T - 1)
    there = PROMPTS + step < T
    hidden, memory = run(
      TOKENS[row, place, None],
      memory,
      (STARTS[row, place] & there)[:, None],
      there[:, None].astype(np.int32),
    )
    states[row[there], place[there]] = np.asarray(hidden)[there, 0]
  return states, memory


PRECISIONS = [
  *((change, 'float64', 1e-10) for change in CHANGES),
  *(
    (change, 'float32', 1e-5)
    for change in ('n-grammer', 'full primer', 'transformer-xl', 'all four')
  ),
]


@pytest.mark.parametrize('change, dtype, tolerance', PRECISIONS)
def test_prefill_at_every_split_then_single_tokens_equals_one_pass(x64, change, dtype, tolerance):
  config, run = build(change, dtype)
  states, memory = decoded(config, run, slots=T - 1)  # a token sees its slots and itself
  assert_close(states, one_pass(config, run), tolerance)
  assert memory['cache']['count'].tolist() == [T] * 2 * T


def with_memory(config, **fields):
  memory = model_config.MemoryConfig(**{'length': T - 1} | fields)
  return dataclasses.replace(config, memory=memory)


@pytest.mark.parametrize('change', CHANGES)
def test_with_a_memory_of_the_history_any_split_equals_one_pass(x64, change):
  """Of the inputs of the layers, as in training."""
  config, run = build(change, 'float64', memory={})
  states, memory = decoded(config, run, slots=0)
  assert_close(states, one_pass(config, run), 1e-12)
  assert 'cache' not in memory and 'hidden' in memory['layers'][0]


SPLITS = [(8,), (1,) * 8, (3, 5), (5, 2, 1)]


@pytest.mark.parametrize('slots', [0, 3])
@pytest.mark.parametrize('same_length', ['memory', 'memory_and_self', 'memory_alone'])
@pytest.mark.parametrize(
  'change', ['transformer-xl', 'n-grammer', 'adaptive span', 'all-attention']
)
def test_with_the_same_length_for_all_any_split_equals_another(x64, change, same_length, slots):
  """At any length: the stream is longer than the memory."""
  config, run = build(change, 'float64', memory={'length': 3, 'same_length': same_length})
  empty = transformer.empty_memory(config, 2 * T, slots)
  results = [in_segments(run, empty, split) for split in SPLITS]
  for result in results[1:]:
    assert_close(result, results[0], 1e-10)
  free, run_free = build(change, 'float64', memory={'length': 3})
  assert np.abs(one_pass(free, run_free) - results[0]).max() > 1e-3


def in_segments(run, memory, split):
  """The hidden states of the stream, taken in segments of these lengths."""
  parts, place = [], 0
  for length in split:
    cut = slice(place, place + length)
    part, memory = run(TOKENS[:, cut], memory, STARTS[:, cut])
    parts.append(part)
    place += length
  return np.concatenate(parts, axis=1)


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))]


@pytest.mark.parametrize('seed', SEEDS)
def test_any_split_of_any_combination(x64, seed):
  """Of switches, memory, window and borders, all drawn: with inputs kept, or keys and values."""
  rng = np.random.default_rng(seed)
  borders = np.sort(rng.choice(np.arange(1, T), size=rng.integers(1, 4), replace=False))
  split = np.diff([0, *borders, T])
  window = {
    'length': int(rng.integers(1, T)),
    'same_length': ('memory', 'memory_and_self', 'memory_alone')[rng.integers(3)],
    'across_documents': bool(rng.integers(2)),
  }
  for memory in ({'length': T - 1}, window):
    config, run = build(seed, 'float64', memory=memory)
    whole = run(TOKENS, transformer.empty_memory(config, 2 * T), STARTS)[0]
    for slots in (0, memory['length']):
      empty = transformer.empty_memory(config, 2 * T, slots)
      assert_close(in_segments(run, empty, split), whole, 1e-12)


@pytest.mark.parametrize('change', ['n-grammer', 'other n-gram heads', 'three orders'])
def test_decoding_with_the_clusters_looked_up_equals_one_pass(x64, change):
  """From the very first token on, and with documents in a row."""
  states, _ = decoded(*build(change, 'float64', serving=True), slots=T - 1)
  assert_close(states, one_pass(*build(change, 'float64')), 1e-10)


def test_padding_and_the_other_rows_do_not_matter(x64):
  """Also when more tokens have come than the cache has slots."""
  config, run = build('n-grammer', 'float64')
  together, _ = decoded(config, run, slots=3)
  for row in (1, 4, T + 2):
    memory = transformer.empty_memory(config, 1, 3)
    first, memory = run(TOKENS[:1, : PROMPTS[row]], memory, STARTS[row : row + 1, : PROMPTS[row]])
    alone = [first]
    for place in range(PROMPTS[row], T):
      cut = slice(place, place + 1)
      state, memory = run(TOKENS[:1, cut], memory, STARTS[row : row + 1, cut])
      alone.append(state)
    assert_close(together[row], np.concatenate(alone, axis=1)[0], 1e-10)


def test_a_full_cache_forgets_the_oldest_tokens(x64):
  """With one layer, a token decoded with M slots sees the M before it."""
  config, run = build('no n-grams', 'float64')
  config = dataclasses.replace(config, layers=1)
  model = transformer.TransformerLM(config, V)
  variables = random_variables(model, TOKENS, transformer.empty_memory(config, 1), dtype='float64')
  memory = transformer.empty_memory(config, 1, 3)
  for place in range(T):
    hidden, memory, _ = model.apply(variables, TOKENS[:1, place : place + 1], memory)
  empty = transformer.empty_memory(config, 1)
  # Rotary positions are relative: the last four tokens alone give the same.
  last_four, _, _ = model.apply(variables, TOKENS[:1, -4:], empty)
  assert_close(hidden[:, 0], last_four[:, -1], 1e-10)
  assert memory['cache']['count'].tolist() == [T]


def test_a_segment_longer_than_the_cache_leaves_its_last_tokens(x64):
  config, run = build('n-grammer', 'float64')
  _, memory = run(TOKENS[:2], transformer.empty_memory(config, 2, 3), STARTS[T : T + 2])
  assert memory['cache']['documents'][0].tolist() == [3, 3, 3]
  assert memory['cache']['position'].tolist() == [4, 4]
  _, memory = run(TOKENS[:2, :1], memory, jnp.ones((2, 1), bool))
  assert sorted(memory['cache']['documents'][0].tolist()) == [3, 3, 4]
  assert memory['cache']['position'].tolist() == [1, 1]


def test_a_bidirectional_prefix_in_the_cache(x64):
  model = transformer.TransformerLM(dataclasses.replace(PLAIN, dtype='float64'), V)
  tokens, prefix = TOKENS[:1], np.arange(T)[None] < 3
  variables = random_variables(
    model, tokens, transformer.empty_memory(model.config, 1), dtype='float64'
  )
  whole, _, _ = model.apply(
    variables, tokens, transformer.empty_memory(model.config, 1), prefix_BxT=prefix
  )
  memory, parts = transformer.empty_memory(model.config, 1, T), []
  for cut in (slice(0, 4), slice(4, 5), slice(5, T)):
    part, memory, _ = model.apply(variables, tokens[:, cut], memory, prefix_BxT=prefix[:, cut])
    parts.append(part)
  assert_close(np.concatenate(parts, axis=1), whole, 1e-10)
  without, _, _ = model.apply(variables, tokens, transformer.empty_memory(model.config, 1))
  assert np.abs(without - whole)[0, 0].max() > 1e-3


def test_a_decoded_token_copies_no_cache():
  """What a step needs beside its arguments is far less than the cache it writes into."""
  config, slots = dataclasses.replace(PLAIN, dtype='float32'), 4096
  model = transformer.TransformerLM(config, V)
  memory = transformer.empty_memory(config, 2, slots)
  variables = random_variables(model, TOKENS[:2, :1], memory)
  step = jax.jit(lambda tokens, memory: model.apply(variables, tokens, memory), donate_argnums=1)
  needs = step.lower(TOKENS[:2, :1], memory).compile().memory_analysis()
  of_cache = sum(leaf.nbytes for leaf in jax.tree.leaves(memory['layers']))
  assert needs.alias_size_in_bytes >= of_cache
  assert needs.temp_size_in_bytes < of_cache / 2
  assert memory['ngram']['ids'].shape == (2, 1, 2)  # the n-gram layer looks at one token
