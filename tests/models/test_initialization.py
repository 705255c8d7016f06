"""Initial weights of other codes: how far each kind of parameter spreads."""

import flax
import jax
import numpy as np
import optax
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import initialization, transformer
from ngrammer_jax.training import state as train_state

D, F, V = 128, 256, 3000
SIZES = {'layers': 2, 'width': D, 'heads': 4, 'feed_forward_width': F, 'gated': False}
ADAPTIVE = model_config.AdaptiveSoftmaxConfig(cutoffs=(1000,), divisor=2)


def initial(recipe, **fields):
  """The first parameters of a run, by path."""
  kind = None if recipe is None else initialization.InitialConfig(recipe)
  config = model_config.ModelConfig(
    **SIZES | {'feed_forward_bias': True, 'initial': kind, 'norm': 'post_skip'} | fields
  )
  model = transformer.TransformerLM(config, V)
  create, _ = train_state.initialiser(model, optax.identity(), 8, 0, sharding.make_mesh())
  return flax.traverse_util.flatten_dict(create().params, sep='/')


def spread(leaf):
  return float(np.mean(leaf)), float(np.std(leaf)), float(np.abs(leaf).max())


@pytest.mark.parametrize('position', ['relative', 'shaw'])
@pytest.mark.parametrize('adaptive', [None, ADAPTIVE])
def test_transformer_xl(adaptive, position):
  """Normal(0, 0.02), projections Normal(0, 0.01), scales Normal(1, 0.02), biases 0."""
  params = initial('transformer_xl', position=position, adaptive_softmax=adaptive)
  for name, leaf in params.items():
    mean, deviation, _ = spread(leaf)
    wanted = 0.01 if 'projection' in name else 0.02
    if 'bias' in name and not name.endswith(('content_bias', 'position_bias')):
      assert mean == deviation == 0, name
    else:
      assert mean == pytest.approx(float('scale' in name), abs=0.005), name
      assert deviation == pytest.approx(wanted, rel=0.2), name


def test_adaptive_span():
  """Embeddings Normal(0, 1), kernels and biases uniform up to 1 / sqrt(inputs)."""
  params = initial('adaptive_span', tie_embeddings=False)
  inputs = lambda name: F if 'feed_forward/out' in name else D
  drawn = 0
  for name, leaf in params.items():
    mean, deviation, largest = spread(leaf)
    bound = inputs(name) ** -0.5
    if name == 'embedding':
      assert deviation == pytest.approx(1, rel=0.01)
    elif 'norm' in name:
      assert (mean, deviation) == (float('scale' in name), 0), name
    else:
      drawn += 1
      assert 0.9 * bound < largest <= bound, name
      assert deviation == pytest.approx(bound / 3**0.5, rel=0.15), name
  assert drawn == 2 + 2 * 8  # the softmax, and in each layer 4 kernels and 2 with their biases


def test_projections_of_adaptive_span():
  params = initial('adaptive_span', adaptive_softmax=ADAPTIVE)
  for i, width in enumerate((D, D // 2)):
    assert spread(params[f'adaptive_softmax/embedding_{i}'])[1] == pytest.approx(1, rel=0.01)
    for name in (f'projection_{i}', f'bias_{i}'):
      largest = spread(params[f'adaptive_softmax/{name}'])[2]
      assert 0.99 * width**-0.5 < largest <= width**-0.5
  for name in ('cluster_weight', 'cluster_bias'):
    assert 0 < spread(params[f'adaptive_softmax/{name}'])[2] <= D**-0.5


@pytest.mark.parametrize('recipe', initialization.RECIPES)
def test_what_no_recipe_knows_begins_as_ever(recipe):
  fields = {
    'ngram': model_config.NGramConfig(clusters=8, vocabulary_size=500),
    'convolution': 3,
    'persistent': model_config.PersistentConfig(vectors=16),
  }
  ours, theirs = initial(None, **fields), initial(recipe, **fields)
  same = {name for name in ours if np.array_equal(ours[name], theirs[name])}
  for part in ('ngrammer', 'persistent', 'taps'):
    of_part = {name for name in ours if part in name}
    assert of_part and of_part <= same
  assert not any(name.endswith('kernel') for name in same)


@pytest.mark.parametrize('recipe', initialization.RECIPES)
def test_every_parameter_is_drawn_by_itself(recipe):
  params = initial(recipe)
  kernels = [leaf for name, leaf in params.items() if name.endswith('kernel')]
  rows = {np.asarray(leaf).reshape(-1)[:4].tobytes() for leaf in kernels}
  assert len(rows) == len(kernels)
  fewer = initial(recipe, layers=1)
  for name, leaf in fewer.items():
    np.testing.assert_array_equal(leaf, params[name])


def test_recipes_are_drawn_alike_on_any_mesh():
  kind = initialization.InitialConfig('adaptive_span')
  config = model_config.ModelConfig(**SIZES | {'initial': kind})
  model, drawn = transformer.TransformerLM(config, V), []
  for data, split in ((8, 1), (2, 4)):
    mesh = sharding.make_mesh(data, split, 1)
    create, _ = train_state.initialiser(model, optax.identity(), 8, 0, mesh)
    drawn.append(create().params)
  jax.tree.map(np.testing.assert_array_equal, *drawn)
