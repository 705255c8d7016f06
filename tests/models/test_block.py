"""N-grams of what attention found, against a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import feed_forward, normalization
from ngrammer_jax.layers.attention import attention
from ngrammer_jax.layers.context import Context, Keys, Positions
from ngrammer_jax.models import block, memories, precision
from ngrammer_jax.models.memories import PlacedMemory
from tests.checks import assert_close, random_variables
from tests.layers.ngram import test_ngrammer as slow

T, N, H, K = 6, slow.N, slow.H, slow.K
NUMBERS = slow.DOCUMENTS
NGRAM = model_config.NGramConfig(
  clusters=K, vocabulary_size=slow.V, dim=2, layer='attention', pairing=('previous',)
)
CONFIG = model_config.ModelConfig(
  layers=1, width=N * H, heads=N, feed_forward_width=12, ngram=NGRAM, dtype='float64'
)


def empty_memory(config):
  """The memory of the first block, of two rows, for training."""
  return block.empty_memory(config, memories.make(config).in_blocks[0], 2, 0)


def context_of(valid=None):
  attended = np.asarray(NUMBERS) if valid is None else np.where(valid > 0, NUMBERS, -2)
  visible = np.tril(attended[:, :, None] == attended[:, None])
  documents, positions = np.asarray(NUMBERS, 'int32'), np.zeros((2, T), int)
  return Context(
    documents_BxT=documents, valid_BxT=valid, keys=Keys(visible), positions=Positions(positions)
  )


def block_of(config):
  """The first block of a model."""
  dtype, own = precision.compute_dtype(config), memories.make(config).in_blocks[0]
  return block.Block(config, dtype, own)


def slow_pairing(pairing, ids, probs):
  """The id each token forms a bi-gram with."""
  if pairing == 'previous':
    return slow.slow_previous(ids, NUMBERS)
  paired = np.zeros_like(ids)
  for b, t, n in np.ndindex(2, T, N):
    past = [s for s in range(t) if NUMBERS[b, s] == NUMBERS[b, t]]
    if past:
      paired[b, t, n] = ids[b, max(past, key=lambda s: probs[b, n, t, s]), n]
  return paired


@pytest.mark.full
@pytest.mark.parametrize('pairing', ['previous', 'attended'])
def test_ngrams_after_attention_equal_slow_loop(x64, pairing):
  config = dataclasses.replace(CONFIG, ngram=dataclasses.replace(NGRAM, pairing=(pairing,)))
  module = block_of(config)
  memory = empty_memory(config)
  x = slow.random_inputs(2, T, 'float64')
  variables = random_variables(module, x, context_of(), memory, dtype='float64')
  params = variables['params']
  part = lambda layer, name, *args: layer.apply({'params': params[name]}, *args)
  norm = normalization.LayerNorm(dtype=jnp.float64)
  feed = feed_forward.FeedForward(12, CONFIG.activation, dtype=jnp.float64)
  attend = attention.Attention(N, dtype=jnp.float64)

  @jax.jit
  def block_and_parts(x):
    probe = {}

    def keep_attended(attended, pair):
      assert pair is None  # not asked for
      probe['attended'] = attended
      return attended

    inputs, own = part(norm, 'attention_norm', x), {'params': params['attention']}
    args = own, inputs, context_of(), None, keep_attended
    _, state = attend.apply(*args, mutable=['intermediates'])
    (probe['probs'],) = state['intermediates']['probs']
    return module.apply(variables, x, context_of(), memory)[0], probe

  rest = jax.jit(lambda x: x + part(feed, 'feed_forward', part(norm, 'feed_forward_norm', x)))
  y, probe = jax.tree.map(np.asarray, block_and_parts(x))
  centroids = np.asarray(variables['codebook']['ngrammer']['quantizer']['centroids'])
  distances = ((probe['attended'][:, :, :, None] - centroids) ** 2).sum(axis=-1)
  ids = distances.argmin(axis=-1)
  pairs = slow_pairing(pairing, ids, probe['probs'])
  if pairing == 'attended':  # or it would show nothing
    assert (pairs != slow.slow_previous(ids, NUMBERS)).any()
  attended = probe['attended'].reshape(2, T, N * H)
  combined = slow.slow_layer(attended, ids, pairs, K, params['ngrammer'], 2, 'concat')
  out = params['attention']['out']['kernel']
  x = x + np.einsum('btnh,nhd->btd', combined.reshape(2, T, N, H), out)
  assert_close(y, rest(x), 1e-12)


@pytest.mark.full
def test_padding_trains_no_codebook():
  """Unlike in praxis, which gives the layer after attention no paddings."""
  config = dataclasses.replace(CONFIG, dtype='float32')
  module, memory = (block_of(config), empty_memory(config))
  x = slow.random_inputs(2, T)
  variables = random_variables(module, x, context_of(), memory)
  valid = (np.arange(T) < 4) * np.ones((2, 1), 'float32')
  learn = jax.jit(lambda x: module.apply(variables, x, padded, memory, mutable=['codebook'])[1])
  padded = context_of(valid)
  other = np.where(np.arange(T)[:, None] < 4, x, np.float32(7))
  jax.tree.map(np.testing.assert_array_equal, learn(x), learn(other))


@pytest.mark.full
@pytest.mark.parametrize('pairing', ['previous', 'attended'])
def test_padding_trains_codebooks_as_in_praxis(x64, monkeypatch, pairing):
  """Its layer after attention is given no paddings: they are clustered, joined and counted."""
  ngram = dataclasses.replace(NGRAM, pairing=(pairing,), padding_trains=True)
  config = dataclasses.replace(CONFIG, ngram=ngram)
  module = block_of(config)
  memory = empty_memory(config)
  x = slow.random_inputs(2, T, 'float64')
  valid = (np.arange(T) < 4) * np.ones((2, 1))
  padded = context_of(valid)
  variables = random_variables(module, x, context_of(), memory, dtype='float64')
  calls, apply = [], PlacedMemory.apply
  monkeypatch.setattr(PlacedMemory, 'apply', lambda *a: calls.append(a[2]) or apply(*a))

  @jax.jit
  def learn(x):
    (y, _, _), updated = module.apply(variables, x, padded, memory, mutable=['codebook'])
    return y, updated, calls.pop()

  y, updated, attended = learn(x)
  before = np.asarray(variables['codebook']['ngrammer']['quantizer']['centroids'])
  after = np.asarray(updated['codebook']['ngrammer']['quantizer']['centroids'])
  expected = before.copy()
  for n in range(N):
    tokens = np.asarray(attended).reshape(2 * T, N, H)[:, n]
    nearest = ((tokens[:, None] - before[n]) ** 2).sum(axis=-1).argmin(axis=-1)
    for k in range(K):
      mine = tokens[nearest == k]
      expected[n, k] = 0.999 * before[n, k] + 0.001 * mine.sum(axis=0) / (1e-6 + len(mine))
  assert_close(after, expected, 1e-12)
  assert (np.asarray(y - x)[:, 4:] != 0).all()  # joined too, or attention would add nothing


@pytest.mark.parametrize(
  'fields, words, initial',
  [
    ({'layer': 'input', 'clusters': 8}, 9, 'data'),
    ({'layer': 'input', 'clusters': 8}, 8, None),  # there are no more rows than clusters
    ({'layer': 'end', 'clusters': 8}, 99, None),
    ({'layer': 'input', 'clusters': 8, 'initial': 'normal'}, 99, 'normal'),
  ],
)
def test_where_centroids_begin(fields, words, initial):
  config = dataclasses.replace(CONFIG, dtype='float32', ngram=model_config.NGramConfig(**fields))
  assert config.ngram.as_memory(config, config.ngram.places(3)[0], words).initial == initial


@pytest.mark.parametrize('start', [None, 'neutral'])
def test_added_persistent_vectors_have_a_gate(start):
  vectors = model_config.PersistentConfig(kind='single_head', vectors=2, start=start)
  layer = block.make_attention(model_config.ModelConfig(persistent=vectors), 'float32')
  assert layer.persistent.has_zero_gate == (start == 'neutral')
