"""ZeRO-1, `mesh.zero=1`: devices along `data` also split the optimizer state and the update.

Gradients are summed over these devices as without it. Each device then updates its share of the
parameters, and the new parameters are gathered once. Tables keep their place: their rows are
updated where they are.
"""

import dataclasses
import logging
from typing import Any

from flax import linen as nn
import jax

from ngrammer_jax import sharding
from ngrammer_jax.optimizers import row_gradient


def split(boxed: Any, shardings: Any) -> Any:
  """Returns shardings that also split arrays over `data`, except tables and vectors.

  An array is split along the first axis whose size on a device the devices of `data` divide. One
  without such an axis stays whole, and is logged.

  Args:
    boxed: arrays in their `nn.LogicallyPartitioned` boxes, abstract or not.
    shardings: shardings of the arrays.
  """
  is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)

  def split_one(path, leaf, place):
    if not is_box(leaf) or 'ngram_vocab' in leaf.names or nn.unbox(leaf).ndim < 2:
      return place
    spec, devices = [*place.spec], place.mesh.shape['data']
    for axis, size in enumerate(place.shard_shape(nn.unbox(leaf).shape)):
      if size % devices == 0:
        axes = (spec[axis],) if isinstance(spec[axis], str) else spec[axis] or ()
        spec[axis] = (*axes, 'data')
        return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec(*spec))
    message = '%s: no axis is divisible by the %d devices of data, left whole by mesh.zero=1'
    logging.info(message, sharding.leaf_name(path), devices)
    return place

  return jax.tree_util.tree_map_with_path(split_one, boxed, shardings, is_leaf=is_box)


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterShardings:
  """Where trained parameters and their gradients are.

  Both have the structure of the parameters.

  Attributes:
    model: shardings in the model.
    update: shardings in the update.
  """

  model: Any
  update: Any

  def keep(self, tree: Any) -> Any:
    """Returns parameters or gradients, constrained to their shardings in the model.

    Without this, XLA shards parameters and products of the model as the update is split.
    """
    return self._place(tree, self.model)

  def scatter(self, tree: Any) -> Any:
    """Returns parameters or gradients of the model, split for the update."""
    return self._place(self.keep(tree), self.update)

  def gather(self, tree: Any) -> Any:
    """Returns updated parameters, whole for the model."""
    return self.keep(self._place(tree, self.update))

  def _place(self, tree, places):
    constrain = jax.lax.with_sharding_constraint
    place = lambda leaf, to, model, update: leaf if model == update else constrain(leaf, to)
    return row_gradient.map_leaves(place, tree, places, self.model, self.update)
