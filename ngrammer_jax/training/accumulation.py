"""Gradient accumulation: the gradient of a batch in microbatches, to save memory.

Each device splits its own rows, so that no row moves between devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ngrammer_jax import sharding


def zeros(shapes: Any) -> Any:
  """Returns a tree of zeros with these shapes and dtypes."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


class GradientAccumulation(NamedTuple):
  """The number of microbatches, and the mesh that shards the rows."""

  num_microbatches: int
  mesh: jax.sharding.Mesh

  def __call__(
    self, function: Callable[[Any, jax.Array], tuple[Any, Any]], rows: Any
  ) -> tuple[Any, Any]:
    """Calls a function for every microbatch.

    Args:
      function: maps the rows of a microbatch and its index to arrays with one entry per row, and to
        arrays to sum over the microbatches.
      rows: arrays of all rows, [B, ...].

    Returns:
      The arrays with one entry for each row, [B, ...], and the sums.
    """
    microbatches = jax.tree.map(self._split, rows)
    function = jax.jit(function, inline=True)  # one trace for both the shapes and the scan
    first_rows = jax.tree.map(lambda array: array[0], microbatches)
    _, sum_shapes = jax.eval_shape(function, first_rows, jnp.int32(0))
    no_sums = zeros(sum_shapes)

    def add_microbatch(sums, inputs):
      row_outputs, summands = function(*inputs)
      return jax.tree.map(jnp.add, sums, summands), row_outputs

    numbers = jnp.arange(self.num_microbatches)
    sums, row_outputs = jax.lax.scan(add_microbatch, no_sums, (microbatches, numbers))
    return jax.tree.map(self._merge, row_outputs), sums

  def _split(self, array_Bx: jax.Array) -> jax.Array:
    """[B, ...] -> [microbatches, B / microbatches, ...]"""
    shards = sharding.batch_shards(self.mesh)
    array = array_Bx.reshape(shards, self.num_microbatches, -1, *array_Bx.shape[1:]).swapaxes(0, 1)
    array = array.reshape(self.num_microbatches, -1, *array_Bx.shape[1:])
    return jax.lax.with_sharding_constraint(array, sharding.rows_sharding(self.mesh, 1))

  def _merge(self, array: jax.Array) -> jax.Array:
    """[microbatches, B / microbatches, ...] -> [B, ...], in the original order."""
    shards = sharding.batch_shards(self.mesh)
    array_Bx = array.reshape(self.num_microbatches, shards, -1, *array.shape[2:]).swapaxes(0, 1)
    array_Bx = array_Bx.reshape(-1, *array.shape[2:])
    return jax.lax.with_sharding_constraint(array_Bx, sharding.rows_sharding(self.mesh))
