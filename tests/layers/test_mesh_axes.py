"""Sharding of the inputs of products, and of their gradients."""

import jax
import jax.numpy as jnp

from ngrammer_jax import sharding
from ngrammer_jax.layers import mesh_axes
from tests import jaxprs
from tests.checks import mesh_of


def test_an_input_and_its_gradient_are_sharded_over_the_batch_alone():
  """XLA exchanged rows of a gradient whose sharding it was free to choose."""
  with sharding.use(mesh_of(2, 2, 2)):
    gradient = jax.grad(lambda x: jnp.sin(mesh_axes.shard_rows(x)).sum())
    program = jax.make_jaxpr(gradient)(jnp.zeros((8, 4, 6))).jaxpr
  specs = [
    equation.params['sharding'].spec
    for equation in jaxprs.equations(program)
    if equation.primitive.name == 'sharding_constraint'
  ]
  assert specs == 2 * [jax.P(('data', 'fsdp'), None, None)]
