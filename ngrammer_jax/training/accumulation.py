"""A step in parts: some rows after the others, with less memory, for one update.

Each device splits the rows that it holds, so that none travels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax import sharding


class Parts(NamedTuple):
  """How many parts, and over which devices the rows are spread."""

  count: int
  mesh: jax.sharding.Mesh

  def summed(
    self, of_rows: Callable[[Any, jax.Array], tuple[Any, Any]], rows: Any
  ) -> tuple[Any, Any]:
    """Calls a function for every part.

    Args:
      of_rows: of the rows of a part and its number; returns what is of each of these rows, and
        what is to be summed.
      rows: arrays of all rows.

    Returns:
      What is of each row, of all of them, and the sum.
    """
    split = jax.tree.map(self._split, rows)
    part = lambda tree: jax.tree.map(lambda array: array[0], tree)
    _, like = jax.eval_shape(of_rows, part(split), jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    def turn(total, numbered):
      made, more = of_rows(*numbered)
      return jax.tree.map(jnp.add, total, more), made

    total, made = jax.lax.scan(turn, zeros, (split, jnp.arange(self.count)))
    return jax.tree.map(self._joined, made), total

  def _split(self, array_Bx: jax.Array) -> jax.Array:
    """[parts, B / parts, ...]"""
    shards = sharding.batch_shards(self.mesh)
    array = array_Bx.reshape(shards, self.count, -1, *array_Bx.shape[1:]).swapaxes(0, 1)
    array = array.reshape(self.count, -1, *array_Bx.shape[1:])
    return jax.lax.with_sharding_constraint(array, sharding.rows_sharding(self.mesh, 1))

  def _joined(self, array: jax.Array) -> jax.Array:
    """[B, ...], in the order from before."""
    shards = sharding.batch_shards(self.mesh)
    array_Bx = array.reshape(self.count, shards, -1, *array.shape[2:]).swapaxes(0, 1)
    array_Bx = array_Bx.reshape(-1, *array.shape[2:])
    return jax.lax.with_sharding_constraint(array_Bx, sharding.rows_sharding(self.mesh))
