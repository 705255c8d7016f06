"""The train state, and how it is created."""

from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import sharding
from ngrammer_jax.models import initialization, language_model


class TrainState(struct.PyTreeNode):
  """Everything that a training step changes.

  Attributes:
    step: number of updates so far, int32.
    params: parameters, trained by gradient.
    codebook: centroids and their statistics, trained by k-means.
    opt_state: state of the optimiser.
    memory: memory of the model, carried from segment to segment, one row per stream.
  """

  step: jax.Array
  params: Any
  codebook: Any
  opt_state: Any
  memory: Any


def make_initializer(
  model: language_model.LanguageModel,
  optimizer: optax.GradientTransformation,
  batch_size: int,
  seed: int,
  mesh: jax.sharding.Mesh,
) -> tuple[Any, Any]:
  """Returns a function that creates the initial state, and the abstract state.

  Returns:
    A function of no arguments that creates the sharded state; and the abstract state (shapes,
    dtypes and shardings), for restoring a checkpoint.
  """

  def init_boxed():
    tokens = jnp.zeros((batch_size, 1), jnp.int32)
    memory = language_model.empty_memory(model.config, batch_size)
    variables = model.init(jax.random.key(seed), tokens, memory)
    params = variables['params']
    if model.config.initial is not None:
      key = jax.random.fold_in(jax.random.key(seed), 1)
      params = initialization.reinitialize(model.config.initial, params, key)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      codebook=variables.get('codebook', {}),
      opt_state=optimizer.init(params),
      memory=memory,
    )

  with sharding.use(mesh):
    shapes = jax.eval_shape(init_boxed)
  shardings = sharding.shardings(shapes, mesh)
  rows = sharding.rows_sharding(mesh)
  shardings = shardings.replace(memory=jax.tree.map(lambda _: rows, shardings.memory))
  abstract = jax.tree.map(
    lambda leaf, leaf_sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=leaf_sharding
    ),
    nn.unbox(shapes),
    shardings,
  )

  def create() -> TrainState:
    with sharding.use(mesh):
      return jax.jit(lambda: nn.unbox(init_boxed()), out_shardings=shardings)()

  return create, abstract


def count_elements(tree: Any) -> int:
  """Returns the number of elements of all arrays of a tree."""
  return sum(leaf.size for leaf in jax.tree.leaves(tree))
