"""A model of two lookups in one table, with the interface of a language model."""

import types
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.models import model_variables
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import step as train_step

B, T, E, STEPS = 8, 4, 3, 3


class Memory(nn.Module):
  """Rows of n-grams, the sum of two lookups."""

  V: int
  exchange: str

  @nn.compact
  def __call__(self, tokens_BxT):
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), table.AXES)
    table_VxE = self.param('table', init, (self.V, E), float)
    first = tokens_BxT * 5 % self.V
    lookup = lambda rows: table.lookup_parameter(self, 'table', table_VxE, rows, self.exchange)
    return lookup(first) + 0.5 * lookup(jnp.stack([first // 2, first // 3], axis=-1)).sum(axis=-2)


class Model(nn.Module):
  """The loss of a token is a function of its rows; padding has none."""

  V: int = 64
  exchange: str = 'rows'
  config: ClassVar = model_config.ModelConfig(ngram=None)
  vocabulary_size: ClassVar = 13

  @nn.compact
  def __call__(self, tokens_BxT, memory, *, valid_BxT=None, **kwargs):
    memory_module = nn.remat(Memory)(self.V, self.exchange, name='ngram_memory_0')
    values_BxTxE = memory_module(tokens_BxT)
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ('embed', None))
    kernel_ExE = self.param('kernel', init, (E, E), float)
    return jnp.tanh(values_BxTxE @ kernel_ExE), memory, {}

  def scores(self, hidden_BxTxE, targets_BxT, train=False):
    return types.SimpleNamespace(nll_BxT=jnp.square(hidden_BxTxE).sum(axis=-1) + targets_BxT)


class MemoryConfig:
  """The optimizer of a memory."""

  table = None

  def __init__(self, optimizer='adagrad', learning_rate_factor=None):
    self.optimizer, self.learning_rate_factor = optimizer, learning_rate_factor


def make_step(mesh, optimizer='adagrad', parts=None, **fields):
  """The training step, and the function and the shapes of the first state."""
  model, memories = Model(**fields), (MemoryConfig(optimizer),)
  variables = model_variables.abstract(model)
  labels = partition.labels(variables['params'], memories)
  config = experiment.OptimizerConfig(warmup_steps=0, epsilon=1e-3, weight_decay=0.1)
  optimizer = partition.make(config, 10, labels, memories)
  step = train_step.TrainStep(model, optimizer, labels, seed=0, microbatches=parts)
  return step, *train_state.make_initializer(model, variables, optimizer, B, 0, mesh)


def segments():
  """Segments of different tokens from 0 to 12, with padding, stacked by step."""
  random = np.random.default_rng(0)
  tokens = random.integers(0, 13, (STEPS, B, T)).astype(np.int32)
  valid = (random.random((STEPS, B, T)) < 0.8).astype(np.float32)
  return token_batch.Batch(tokens, tokens, np.zeros((STEPS, B, T), bool), valid)


def compile_call(mesh, optimizer='adagrad', parts=None, **fields):
  """The compiled call of many steps, and the function of the first state."""
  step, create, abstract = make_step(mesh, optimizer, parts, **fields)
  rows = sharding.rows_sharding(mesh, 1)
  shapes = token_batch.map_batches(lambda x: sharding.abstract(x, rows), segments())
  with sharding.use(mesh):
    call = train_step.make_call(step, abstract)
    return call.lower(abstract, shapes, jax.ShapeDtypeStruct((), np.int32)).compile(), create
