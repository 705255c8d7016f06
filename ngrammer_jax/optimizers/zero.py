"""ZeRO-1, `mesh.zero=1`: optimizer state and update are also sharded over `data`.

Gradients are summed over these devices as usual. Each device then updates its share of the
parameters, and the new parameters are gathered once. Tables keep their sharding.
"""

import dataclasses
import logging
from typing import Any

from flax import linen as nn
import jax

from ngrammer_jax import sharding
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.optimizers import row_gradient


def split(boxed: Any, shardings: Any) -> Any:
  """Returns shardings that also shard arrays over `data`, except tables and vectors.

  An array is sharded along the first axis with a device size divisible by `data`. An array without
  such an axis is not sharded, and is logged.

  Args:
    boxed: arrays in their `nn.LogicallyPartitioned` boxes, abstract or not.
    shardings: shardings of the arrays.
  """

  def split_leaf(path, leaf, leaf_sharding):
    if not sharding.is_boxed(leaf) or table.is_table(leaf) or nn.unbox(leaf).ndim < 2:
      return leaf_sharding
    return _split_array(sharding.leaf_name(path), nn.unbox(leaf).shape, leaf_sharding)

  return jax.tree_util.tree_map_with_path(split_leaf, boxed, shardings, is_leaf=sharding.is_boxed)


def _split_array(
  name: str, shape: tuple[int, ...], whole: jax.sharding.NamedSharding
) -> jax.sharding.NamedSharding:
  """Returns the sharding with the first possible axis of an array sharded over `data`."""
  spec = list(whole.spec)
  devices = whole.mesh.shape['data']
  for axis, size in enumerate(whole.shard_shape(shape)):
    if size % devices == 0:
      spec[axis] = (*_mesh_axes(spec[axis]), 'data')
      return jax.sharding.NamedSharding(whole.mesh, jax.sharding.PartitionSpec(*spec))
  message = '%s: no axis is divisible by the %d devices of data, left whole by mesh.zero=1'
  logging.info(message, name, devices)
  return whole


def _mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """Returns the mesh axes of an entry of a `PartitionSpec`."""
  if entry is None:
    return ()
  if isinstance(entry, str):
    return (entry,)
  return entry


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterShardings:
  """Shardings of trained parameters and their gradients.

  Both have the structure of the parameters.

  Attributes:
    model: shardings in the model.
    update: shardings in the update.
  """

  model: Any
  update: Any

  def keep(self, tree: Any) -> Any:
    """Returns parameters or gradients, constrained to their shardings in the model.

    Without the constraint, XLA shards parameters and products of the model like the update.
    """
    return self._constrain(tree, self.model)

  def scatter(self, tree: Any) -> Any:
    """Returns parameters or gradients of the model, split for the update."""
    return self._constrain(self.keep(tree), self.update)

  def gather(self, tree: Any) -> Any:
    """Returns updated parameters, whole for the model."""
    return self.keep(self._constrain(tree, self.update))

  def _constrain(self, tree: Any, shardings: Any) -> Any:
    """Constrains the leaves with different shardings in model and update."""

    def constrain(leaf, leaf_sharding, model, update):
      if model == update:
        return leaf
      return jax.lax.with_sharding_constraint(leaf, leaf_sharding)

    return row_gradient.map_leaves(constrain, tree, shardings, self.model, self.update)
