"""Everything that a step changes, as one value."""

from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import sharding
from ngrammer_jax.models import initialization, language_model


class TrainState(struct.PyTreeNode):
  """The train state.

  Attributes:
    step: updates made so far, int32.
    params: trained by gradient.
    codebook: trained by k-means.
    opt_state: of the optimiser.
    memory: what flows from segment to segment, one row per stream.
  """

  step: jax.Array
  params: Any
  codebook: Any
  opt_state: Any
  memory: Any


def initialiser(
  model: language_model.LanguageModel,
  optimizer: optax.GradientTransformation,
  batch_size: int,
  seed: int,
  mesh: jax.sharding.Mesh,
  growth: int = 0,
) -> tuple[Any, Any]:
  """How to make the first state, and what it looks like without making it.

  `growth` is that of the windows of the model (see `language_model.empty_memory`).

  Returns:
    A function of no arguments that makes the sharded state, and the abstract state:
    shapes, dtypes and shardings, for restoring a checkpoint into.
  """

  def boxed():
    tokens = jnp.zeros((batch_size, 1), jnp.int32)
    memory = language_model.empty_memory(model.config, batch_size)
    variables = model.clone(windows=None).init(jax.random.key(seed), tokens, memory)
    memory = language_model.empty_memory(model.config, batch_size, 0, model.windows, growth)
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
    shapes = jax.eval_shape(boxed)
  where = sharding.shardings(shapes, mesh)
  where = where.replace(memory=jax.tree.map(lambda _: sharding.rows_sharding(mesh), where.memory))
  abstract = jax.tree.map(
    lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
    nn.unbox(shapes),
    where,
  )

  def create() -> TrainState:
    with sharding.use(mesh):
      return jax.jit(lambda: nn.unbox(boxed()), out_shardings=where)()

  return create, abstract


def count(tree: Any) -> int:
  """Number of elements of all arrays of a tree."""
  return sum(leaf.size for leaf in jax.tree.leaves(tree))
