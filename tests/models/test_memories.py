"""What the contract of memories refuses, and that each memory has its own parameters."""

import dataclasses
import functools

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.place import Place
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.layers.context import Context
from ngrammer_jax.models import language_model, memories, model_variables, row_finder, transformer
from ngrammer_jax.models.memories import PlacedMemory
from tests.checks import random_variables

CONFIG = model_config.ModelConfig(layers=3, ngram=model_config.NGramConfig())


class Counter(nn.Module):
  """Counts segments."""

  dtype: str = 'int32'

  def empty_state(self, batch, slots):
    return jnp.zeros((batch, 1), jnp.int32)

  def __call__(self, x, context, state):
    return x, (state + 1).astype(self.dtype)


@pytest.mark.parametrize(
  'place', [Place('after_blok', 0), Place('after_block', -1), Place('after_block', 3)]
)
def test_a_place_that_does_not_exist(monkeypatch, place):
  monkeypatch.setattr(model_config.NGramConfig, 'places', lambda self, layers: (place,))
  with pytest.raises(
    ValueError, match=r'model\.ngram: Place\(.*\) does not exist in a model of 3 blocks'
  ):
    memories.make(CONFIG)


@pytest.mark.parametrize(
  'places, names, error',
  [
    ((Place('input'), Place('after_block', 1)), {}, "name='counter' is already used"),
    ((Place('input'),), {'state_name': 'layers'}, "state_name='layers' is reserved"),
  ],
)
def test_names_are_different(monkeypatch, places, names, error):
  make = lambda config, place, dtype, size: PlacedMemory('counter', place, Counter, **names)
  monkeypatch.setitem(memories.MEMORIES, 'ngram', make)
  monkeypatch.setattr(model_config.NGramConfig, 'places', lambda self, layers: places)
  with pytest.raises(ValueError, match=error):
    memories.make(CONFIG)


def test_no_memory_acts_before_one_that_needs_the_embedding(monkeypatch):
  """Its clusters are those of the embedding, also where they are computed once for serving."""
  both = dataclasses.replace(CONFIG, ngram_memories=(NGramMemoryConfig(),))
  monkeypatch.setattr(NGramMemoryConfig, 'places', lambda self, layers: (Place('input'),))
  names = [memory.name for memory in memories.make(both).between_blocks]
  assert names == ['ngrammer', 'ngram_memory_0']
  monkeypatch.setattr(memories, 'MEMORIES', dict(reversed(memories.MEMORIES.items())))
  with pytest.raises(ValueError, match='ngrammer needs the embedding, but ngram_memory_0 change'):
    memories.make(both)
  elsewhere = dataclasses.replace(both, ngram=model_config.NGramConfig(layer='end'))
  assert len(memories.make(elsewhere).between_blocks) == 2


@pytest.mark.parametrize('dtype, is_kept', [('int32', True), ('float32', False)])
def test_a_state_keeps_its_shapes_and_dtypes(dtype, is_kept):
  memory = PlacedMemory('counter', Place('input'), functools.partial(Counter, dtype))
  states, x = memory.empty_state(2, None), np.zeros((2, 3, 4))
  run = lambda: memory.apply(memory.make(), x, Context(), states)[1]
  if is_kept:
    assert run()['counter'].tolist() == [[1], [1]]
    return
  with pytest.raises(
    ValueError, match=r'memory counter changes its state from int32\[2, 1\] to float32'
  ):
    run()


@pytest.mark.slow
def test_memories_of_equal_shape_do_not_share_tables():
  """Neither two layers of one memory, nor two memories of one layer."""
  options = NGramMemoryConfig(layers=(0, 2), heads=1, orders=(2,), rows=(11,), width=2)
  config = dataclasses.replace(CONFIG, width=8, heads=2, ngram=None, ngram_memories=(options,) * 2)
  model = transformer.TransformerLM(config, 5)
  tokens, memory = np.zeros((1, 3), np.int32), model.empty_memory(1)
  params = random_variables(model, tokens, memory)['params']
  paths = [
    path for path in flax.traverse_util.flatten_dict(params, sep='/') if path.endswith('table')
  ]
  names = [f'layer_{layer}/ngram_memory_{i}/table' for layer in (0, 2) for i in (0, 1)]
  assert sorted(paths) == sorted(names)

  @jax.jit
  def gradients(params):
    loss = lambda params: jnp.square(model.apply({'params': params}, tokens, memory)[0]).sum()
    return jax.grad(loss)(params)

  tables = [flax.traverse_util.flatten_dict(gradients(params), sep='/')[path] for path in names]
  for i, one in enumerate(tables):
    assert np.abs(one).max() > 0
    assert all(np.abs(one - other).max() > 0 for other in tables[:i] if one.shape == other.shape)


def test_a_memory_after_attention_is_as_wide_as_all_heads():
  """Its clusters and norms have the features of a head, wider than width / heads."""
  ngram = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2, layer='attention')
  sizes = {'layers': 1, 'width': 16, 'heads': 4, 'key_value_heads': 1, 'head_width': 6}
  config = model_config.ModelConfig(**sizes, feed_forward_width=8, ngram=ngram)
  config.check()
  variables = model_variables.abstract(language_model.build(config, 13))
  layer = nn.unbox(variables['params']['layer_0']['ngrammer'])
  assert layer['unigram_norm']['scale'].shape == (4, 6)
  quantizer = nn.unbox(variables['codebook']['layer_0']['ngrammer']['quantizer'])
  assert quantizer['centroids'].shape == (4, 4, 6)


def test_rows_looked_up_ahead_segment_by_segment_are_those_of_one_pass():
  options = NGramMemoryConfig(orders=(3,), heads=2, rows=(61,), width=4, table_memory='host')
  config = dataclasses.replace(CONFIG, width=8, heads=2, ngram=None, ngram_memories=(options,))
  model = transformer.TransformerLM(config, 11)
  tokens = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)
  starts = np.arange(8) == [[0], [6]]
  variables = random_variables(model, tokens, model.empty_memory(2))

  def rows(*parts):
    state = row_finder.empty_state(config, 2)
    find = row_finder.RowFinder(model, variables.get('codebook', {}), state)
    rows_of_parts = []
    for part in parts:
      by_table = find(tokens[:, part], starts[:, part], None)
      rows_of_parts.append(by_table['ngram_memory_0/table'])
    return np.concatenate(rows_of_parts, axis=1)

  whole = rows(slice(0, 8))
  np.testing.assert_array_equal(rows(slice(0, 4), slice(4, 8)), whole)
  # Those that the model looks up.
  hidden, recorded = model.apply(
    variables, tokens, model.empty_memory(2), starts_BxT=starts, mutable=['intermediates']
  )
  (lookup,) = recorded['intermediates']['ngram_memory_0']['lookup']
  np.testing.assert_array_equal(whole - [0, 61], lookup['rows'])


def test_one_block_in_the_middle_starts_from_uniform_centroids():
  """Although its place is the input, it is not `layer="input"`."""
  ngram = model_config.NGramConfig(layer='middle', clusters=4)
  config = dataclasses.replace(CONFIG, layers=1, ngram=ngram)
  assert ngram.as_memory(config, ngram.places(1)[0], 99).initial is None


@pytest.mark.parametrize('point', ['in_place_of_feed_forward', 'beside_feed_forward'])
def test_product_keys_in_place_of_the_feed_forward_or_beside_it(point):
  """A block has a feed-forward only with the second; the values belong to the model."""
  keys = ProductMemoryConfig(layers=(0,), point=point, sub_keys=3, top=2, key_width=2)
  config = dataclasses.replace(CONFIG, layers=1, ngram=None, product_memory=keys)
  params = model_variables.abstract(language_model.build(config, 9))['params']
  assert ('feed_forward' in params['layer_0']) == (point == 'beside_feed_forward')
  assert {'product_memory', 'feed_forward_norm'} <= params['layer_0'].keys()
  assert nn.unbox(params['product_memory'])['table'].shape == (9, config.width)
