"""A layer in an NNX model computes, learns and is sharded as in Linen."""

from flax import linen as nn
from flax import nnx
import jax
import numpy as np
import optax
import pytest

from ngrammer_jax.layers import FeedForward, NGrammer
from ngrammer_jax.optimizers import with_adagrad_tables
from tests.checks import mesh_of

LAYER = NGrammer(heads=2, clusters=4, vocabulary_size=40, dim=2, return_memory=False)
X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype('float32')


def bridged():
  return nnx.bridge.ToNNX(LAYER, rngs=nnx.Rngs(0)).lazy_init(X)


def linen_variables(model):
  """The variables of a bridged N-Grammer in Linen."""
  values = lambda leaves: {name: leaf.get_value() for name, leaf in leaves.items()}
  params = {name: values(getattr(model, name)) for name in ('unigram_norm', 'ngram_norm')}
  params['table'] = model.table.get_value()
  return {'params': params, 'codebook': {'quantizer': values(model.quantizer)}}


def train_step(model, optimizer):
  def loss(model):
    return (model(X, mutable=['codebook']) ** 2).mean()

  value, gradient = nnx.value_and_grad(loss)(model)
  optimizer.update(model, gradient)
  return value


def test_training_in_nnx_equals_linen():
  """Forward pass, two steps of k-means and of an optimizer of two partitions, in `nnx.jit`."""
  model = bridged()
  tx = with_adagrad_tables(optax.adam(0.1), nnx.state(model, nnx.Param), 0.1)
  variables, optimizer = linen_variables(model), nnx.Optimizer(model, tx, wrt=nnx.Param)
  state = tx.init(variables['params'])

  @jax.jit
  def linen_step(variables, state):
    def loss(params):
      y, updated = LAYER.apply({**variables, 'params': params}, X, mutable=['codebook'])
      return (y**2).mean(), updated

    gradient, updated = jax.grad(loss, has_aux=True)(variables['params'])
    updates, state = tx.update(gradient, state, variables['params'])
    return updated | {'params': optax.apply_updates(variables['params'], updates)}, state

  step, before = nnx.jit(train_step), variables
  for _ in range(2):
    step(model, optimizer)
    variables, state = linen_step(variables, state)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, linen_variables(model), variables)
  changed = jax.tree.map(lambda a, b: float(abs(a - b).max()), variables, before)
  assert min(jax.tree.leaves(changed['params'])) > 0.01
  assert changed['codebook']['quantizer']['centroids'] > 1e-4
  centroids = np.asarray(model.quantizer['centroids'].get_value())
  y, expected = nnx.jit(lambda model: model(X))(model), jax.jit(LAYER.apply)(variables, X)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(model.quantizer['centroids'].get_value(), centroids)


@pytest.mark.full
def test_names_shard_with_a_mesh_and_rules_alone():
  def kernel():
    layer = FeedForward(4, gated=False)
    model = nnx.bridge.ToNNX(layer, rngs=nnx.Rngs(0)).lazy_init(X[:, :1])
    assert model(X[:, :1]).shape == (2, 1, 8)
    return getattr(model, 'in')['kernel'].get_value()

  with jax.set_mesh(mesh_of(1, 2, 2)):
    assert kernel().sharding.is_fully_replicated
    with nn.logical_axis_rules((('mlp', 'model'), ('kv', None))):
      assert kernel().sharding.spec == jax.P(None, 'model')
