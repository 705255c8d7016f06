"""Attention that computes no more than the spans need gives what all of it gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import local
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from ngrammer_jax.training import windows
from tests.checks import assert_close, random_variables

T, S, V = 8, 8, 13
NGRAM = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)
PLAIN = model_config.ModelConfig(
  layers=3,
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
CHANGES = {
  'official': {'norm': 'post_skip'},
  'relative, all-attention': {
    'position': 'relative',
    'positional': None,
    'persistent': model_config.PersistentConfig(5),
    'feed_forward_width': 0,
  },
  'own biases, learned distances': {
    'position': 'shaw',
    'positional': model_config.PositionalConfig(max_length=5),
    'bias': True,
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
  'tokens with spans of their own': {
    'span': model_config.SpanConfig('dynamic', limit=S, ramp=2, initial=-9.0)
  },
  'tokens with spans of their own, pairs by attention': {
    'span': model_config.SpanConfig('dynamic', limit=S, ramp=2, initial=-9.0),
    'ngram': dataclasses.replace(
      NGRAM, layer='attention', pairing=('previous', 'attended', 'attended')
    ),
  },
  'one head of vectors': {
    'persistent': model_config.PersistentConfig(5, 'single_head'),
    'feed_forward_width': 0,
  },
  'half of the heads for vectors': {
    'persistent': model_config.PersistentConfig(5, 'head_split'),
    'feed_forward_width': 0,
  },
  'pairs by attention': {
    'ngram': dataclasses.replace(NGRAM, layer='attention', pairing=('attended', 'previous', 'none'))
  },
  'scanned, zeros first': {
    'scan_layers': True,
    'norm': 'post_skip',
    'remat': 'full',
    'memory': model_config.MemoryConfig(S, 'zeros', 'memory_alone', across_documents=True),
  },
}
OF_TOKENS = ['tokens with spans of their own', 'tokens with spans of their own, pairs by attention']
# Heads whose span and ramp are below 4 tokens, and others: a key at the very end of the ramp has
# no weight, but a slope.
WINDOWS = ((4, 8, 4, 4), (4, 4, 4, 4), (8, 8, 8, 6))
SPANS = np.array([[0.0, 1.0, 0.24, 0.1], [0.0, 0.2, 0.24, 0.0], [0.9, 0.5, 1.0, 0.4]])
TOKENS = np.random.default_rng(0).integers(0, V, (3, 5 * T))
STARTS = np.zeros(TOKENS.shape, bool)
STARTS[1, [5, 19, 20]] = True


def with_spans(variables):
  """And even attention: where next to no mass is under the mask, the 1e-8 would weigh."""

  def even(path, leaf):
    names = [key.key for key in path]
    small = ('query', 'key', 'relative', 'distance_embedding', 'content_bias', 'position_bias')
    return 0.1 * leaf if set(small) & set(names) else leaf

  params = jax.tree_util.tree_map_with_path(even, variables['params'])
  for number, spans in enumerate(SPANS):
    learned = params[f'layer_{number}']['attention']['span']
    if 'span' in learned:
      learned['span'] = jnp.asarray(spans[: len(learned['span'])])
    else:
      share_N = 0.9 * jnp.asarray(spans) + 1e-3
      learned['span_kernel'] *= 0.01
      learned['span_bias'] = jnp.log(share_N / (1 - share_N))
  return variables | {'params': params}


def windows_of(config):
  if config.span.kind == 'dynamic':
    return ((4, 6, 8),) * config.layers
  if windows.apart(config):
    return WINDOWS
  return tuple((max(sizes),) * config.heads for sizes in WINDOWS)


def hidden_states(config, variables, sizes, slots, split=(T,) * 5):
  model = transformer.TransformerLM(config, V, sizes)
  memory, states, place = transformer.empty_memory(config, 3, slots, sizes), [], 0
  run = jax.jit(lambda x, memory, starts: model.apply(variables, x, memory, starts_BxT=starts)[:2])
  for length in split:
    cut = slice(place, place + length)
    hidden, memory = run(TOKENS[:, cut], memory, STARTS[:, cut])
    states.append(hidden)
    place += length
  return np.concatenate(states, axis=1)


@pytest.mark.parametrize('change', CHANGES)
def test_heads_by_their_windows_and_queries_in_blocks(x64, monkeypatch, change):
  config = dataclasses.replace(PLAIN, **CHANGES[change])
  config.check()
  model = transformer.TransformerLM(config, V)
  memory = transformer.empty_memory(config, 3)
  variables = with_spans(random_variables(model, TOKENS[:, :T], memory, dtype='float64'))
  whole = hidden_states(config, variables, None, 0)
  for sizes in (None, windows_of(config)):
    for block in (64, 2):
      monkeypatch.setattr(local, 'BLOCK', block)
      if block == 2:
        assert local.blocks(T, S) == 4
      # What is left out has no weight but in the 1e-8 that the mass under the mask is added to.
      tolerance = 1e-12 if sizes is None else 1e-6
      assert_close(hidden_states(config, variables, sizes, 0), whole, tolerance)
    for split in ((T,) * 5, (3, 1, 1, 11, 24)):
      assert_close(hidden_states(config, variables, sizes, S, split), whole, tolerance)
  too_small = ((2,) * 4,) * 3
  assert np.abs(hidden_states(config, variables, too_small, 0) - whole).max() > 1e-3


@pytest.mark.parametrize('slots', [0, S])
@pytest.mark.parametrize('change', OF_TOKENS)
def test_what_no_token_calls_for_is_not_read(x64, change, slots):
  """Spans of less than 4 tokens: what is kept of older ones may be anything."""
  config = dataclasses.replace(PLAIN, **CHANGES[change])
  model = transformer.TransformerLM(config, V)
  start = transformer.empty_memory(config, 3)
  variables = random_variables(model, TOKENS[:, :T], start, dtype='float64')
  for number in range(config.layers):
    learned = variables['params'][f'layer_{number}']['attention']['span']
    learned['span_kernel'], learned['span_bias'] = learned['span_kernel'] * 0, jnp.full(4, -9.0)
  for sizes, same in ((windows_of(config), True), (None, False)):
    model = transformer.TransformerLM(config, V, sizes)
    memory = transformer.empty_memory(config, 3, slots, sizes)
    _, memory, _ = model.apply(variables, TOKENS[:, : T + 3], memory)
    spoiled = [dict(layer) for layer in memory['layers']]
    for layer in spoiled:
      if slots:  # the 11 tokens so far are in slots 0 to 7, the last in 2
        layer['values'] = layer['values'].at[:, :, 3:7].set(jnp.nan)
      else:
        layer['hidden'] = layer['hidden'].at[:, :4].set(jnp.nan)
    other = memory | {'layers': tuple(spoiled)}
    y, z = (model.apply(variables, TOKENS[:, 11:13], given)[0] for given in (memory, other))
    assert np.array_equal(y, z) == same


@pytest.mark.parametrize('change', ['official', 'relative, all-attention'])
def test_the_length_of_segments_does_not_matter(x64, change):
  config = dataclasses.replace(PLAIN, **CHANGES[change])
  model = transformer.TransformerLM(config, V)
  memory = transformer.empty_memory(config, 3)
  variables = with_spans(random_variables(model, TOKENS[:, :T], memory, dtype='float64'))
  whole = hidden_states(config, variables, None, 0)
  for split in ((4,) * 10, (3, 1, 1, 11, 24), (5 * T,)):
    np.testing.assert_allclose(hidden_states(config, variables, None, 0, split), whole, 0, 4e-15)


@pytest.mark.parametrize('change', CHANGES)
def test_gradients_by_windows(x64, monkeypatch, change):
  config = dataclasses.replace(PLAIN, **CHANGES[change])
  monkeypatch.setattr(local, 'BLOCK', 2)
  model = transformer.TransformerLM(config, V)
  empty = transformer.empty_memory(config, 3)
  variables = with_spans(random_variables(model, TOKENS[:, :T], empty, dtype='float64'))

  def gradient(sizes):
    model = transformer.TransformerLM(config, V, sizes)
    memory = transformer.empty_memory(config, 3, windows=sizes)

    def loss(params):
      given, total, kept = variables | {'params': params}, 0.0, memory
      for place in (0, T):
        hidden, kept, aux = model.apply(given, TOKENS[:, place : place + T], kept)
        total += jnp.sin(hidden).sum() + 100 * aux['span']
      return total

    return jax.jit(jax.grad(loss))(variables['params'])

  jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), gradient(windows_of(config)), gradient(None))


@pytest.mark.parametrize('slots', [0, S])
@pytest.mark.parametrize('change', ['official', 'primer with n-grams', *OF_TOKENS])
def test_padding_at_the_end_of_rows_does_not_matter(x64, change, slots):
  """Rows of 5 and 8 tokens, then of 8 and 3: each as if it were alone and without padding."""
  config = dataclasses.replace(PLAIN, **CHANGES[change])
  sizes = windows_of(config)
  model = transformer.TransformerLM(config, V, sizes)
  empty = lambda rows: transformer.empty_memory(config, rows, slots, sizes)
  whole = transformer.TransformerLM(config, V)
  start = transformer.empty_memory(config, 3)
  variables = with_spans(random_variables(whole, TOKENS[:, :T], start, dtype='float64'))
  run = jax.jit(
    lambda x, memory, valid=None: model.apply(variables, x, memory, valid_BxT=valid)[:2]
  )
  counts, memory, found = [(5, 8), (8, 3), (2, 8)], empty(2), [[], []]
  place = [0, 0]
  for lengths in counts:
    tokens, valid = np.full((2, T), V - 1), np.arange(T) < np.array(lengths)[:, None]
    for row, length in enumerate(lengths):
      tokens[row, :length] = TOKENS[row, place[row] : place[row] + length]
      place[row] += length
    hidden, memory = run(tokens, memory, valid.astype(np.int32))
    for row, length in enumerate(lengths):
      found[row].append(hidden[row, :length])
  for row in range(2):
    memory, alone, first = empty(1), [], 0
    for lengths in counts:
      part, memory = run(TOKENS[row : row + 1, first : first + lengths[row]], memory)
      alone.append(part[0])
      first += lengths[row]
    assert_close(np.concatenate(found[row]), np.concatenate(alone), 1e-12)
