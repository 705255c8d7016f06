"""Initial weights of other codes: how far each kind of parameter spreads."""

import functools

import flax
from flax import linen as nn
import jax
import numpy as np
import optax
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import initial as initial_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import initialization, language_model, model_variables, transformer
from ngrammer_jax.training import state as train_state

D, F, V = 128, 256, 1000
SIZES = {'layers': 1, 'width': D, 'heads': 4, 'feed_forward_width': F, 'gated': False}
ADAPTIVE = model_config.AdaptiveSoftmaxConfig(cutoffs=(300,), divisor=2)
# What no recipe knows.
OTHERS = {
  'ngram': model_config.NGramConfig(clusters=8, vocabulary_size=500, dim=4),
  'convolution': 3,
  'persistent': model_config.PersistentConfig(vectors=16),
}


def config_of(recipe, **fields):
  kind = None if recipe is None else initial_config.InitialConfig(recipe)
  more = {'feed_forward_bias': True, 'initial': kind, 'norm': 'post_skip'}
  return model_config.ModelConfig(**SIZES | more | fields)


@functools.cache
def zeros(**fields):
  """The parameters of a model, all of them 0."""
  config = config_of(None, **fields)
  model, memory = transformer.TransformerLM(config, V), language_model.empty_memory(config, 1)
  init = lambda: nn.unbox(model.init(jax.random.key(0), np.zeros((1, 2), np.int32), memory))
  return jax.tree.map(lambda leaf: np.zeros(leaf.shape, 'float32'), jax.eval_shape(init)['params'])


@functools.cache
def reinitialized(recipe, **fields):
  """Parameters of 0 after a recipe, by path."""
  kind = initial_config.InitialConfig(recipe)
  params = initialization.reinitialize(kind, zeros(**fields), jax.random.key(1))
  return flax.traverse_util.flatten_dict(params, sep='/')


def created(config, mesh):
  """The first parameters of a run."""
  model = transformer.TransformerLM(config, V)
  variables = model_variables.abstract(model)
  create, _ = train_state.make_initializer(model, variables, optax.identity(), 8, 0, mesh)
  return create().params


def spread(leaf):
  leaf = np.asarray(leaf)
  return float(np.mean(leaf)), float(np.std(leaf)), float(np.abs(leaf).max())


@pytest.mark.slow
@pytest.mark.parametrize(
  'fields',
  [
    {'position': 'relative', 'adaptive_softmax': ADAPTIVE},
    {'position': 'relative'},
    {'position': 'shaw'},
    {'position': 'shaw', 'adaptive_softmax': ADAPTIVE},
  ],
)
def test_transformer_xl(fields):
  """Normal(0, 0.02), projections Normal(0, 0.01), scales Normal(1, 0.02), biases 0."""
  for name, leaf in reinitialized('transformer_xl', **fields).items():
    mean, deviation, _ = spread(leaf)
    expected = 0.01 if 'projection' in name else 0.02
    if 'bias' in name and not name.endswith(('content_bias', 'position_bias')):
      assert mean == deviation == 0, name
    else:
      assert mean == pytest.approx(float('scale' in name), abs=0.006), name
      assert deviation == pytest.approx(expected, rel=0.2), name


def test_adaptive_span():
  """Embeddings Normal(0, 1), kernels and biases uniform up to 1 / sqrt(inputs)."""
  params = reinitialized('adaptive_span', tie_embeddings=False)
  inputs = lambda name: F if 'feed_forward/out' in name else D
  num_drawn = 0
  for name, leaf in params.items():
    mean, deviation, largest = spread(leaf)
    bound = inputs(name) ** -0.5
    if name == 'embedding':
      assert deviation == pytest.approx(1, rel=0.01)
    elif 'norm' in name:
      assert (mean, deviation) == (0, 0), name  # as it was
    else:
      num_drawn += 1
      assert 0.9 * bound < largest <= bound, name
      assert deviation == pytest.approx(bound / 3**0.5, rel=0.15), name
  assert num_drawn == 2 + 8  # the softmax, and 4 kernels and 2 with their biases


@pytest.mark.full
def test_projections_of_adaptive_span():
  params = reinitialized('adaptive_span', adaptive_softmax=ADAPTIVE)
  for i, width in enumerate((D, D // 2)):
    assert spread(params[f'adaptive_softmax/embedding_{i}'])[1] == pytest.approx(1, rel=0.01)
    for name in (f'projection_{i}', f'bias_{i}'):
      largest = spread(params[f'adaptive_softmax/{name}'])[2]
      assert 0.95 * width**-0.5 < largest <= width**-0.5
  for name in ('cluster_weight', 'cluster_bias'):
    assert 0 < spread(params[f'adaptive_softmax/{name}'])[2] <= D**-0.5


@pytest.mark.full
@pytest.mark.parametrize('recipe', initial_config.RECIPES)
def test_what_no_recipe_knows_stays_as_it_is(recipe):
  params = reinitialized(recipe, **OTHERS)
  same = {name for name, leaf in params.items() if not np.asarray(leaf).any()}
  for part in ('ngrammer', 'persistent', 'taps'):
    part_names = {name for name in params if part in name}
    assert part_names and part_names <= same
  assert not any(name.endswith('kernel') for name in same)


@pytest.mark.parametrize('recipe', initial_config.RECIPES)
def test_every_parameter_is_drawn_by_itself(recipe):
  one = zeros()['layer_0']
  draw = lambda **layers: flax.traverse_util.flatten_dict(
    initialization.reinitialize(initial_config.InitialConfig(recipe), layers, jax.random.key(1)),
    sep='/',
  )
  params, fewer = draw(layer_0=one, layer_1=one), draw(layer_0=one)
  kernels = [leaf for name, leaf in params.items() if name.endswith('kernel')]
  rows = {np.asarray(leaf).reshape(-1)[:4].tobytes() for leaf in kernels}
  assert len(rows) == len(kernels) == 2 * 6
  for name, leaf in fewer.items():
    np.testing.assert_array_equal(leaf, params[name])


@pytest.mark.slow
def test_a_run_begins_with_its_recipe():
  sizes = {'width': 32, 'feed_forward_width': 32}
  mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  params = created(config_of('adaptive_span', **sizes), mesh)
  assert spread(params['embedding'])[1] == pytest.approx(1, rel=0.02)
  _, deviation, largest = spread(params['layer_0']['attention']['query']['kernel'])
  assert 0.9 * 32**-0.5 < largest <= 32**-0.5
  assert deviation == pytest.approx((32 * 3) ** -0.5, rel=0.1)
  np.testing.assert_array_equal(params['layer_0']['attention_post_norm']['scale'], 1)


@pytest.mark.slow
def test_recipes_are_drawn_alike_on_any_mesh():
  config = config_of('adaptive_span', layers=2)
  states = [created(config, sharding.make_mesh(*split, 1)) for split in ((8, 1), (2, 4))]
  jax.tree.map(np.testing.assert_array_equal, *states)
