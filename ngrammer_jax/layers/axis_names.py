"""Variables with logical axis names, created by Linen modules and usable in NNX modules.

The names determine the sharding of an array (`ngrammer_jax.sharding`) and its optimizer. Linen
keeps them in boxes. `nnx.bridge.ToNNX` turns boxes into `nnx.Variable`s and NNX shards these at
once, which fails without a mesh for the box of Flax.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax

_KEY = 'logical_axis_names'  # in the metadata of an `nnx.Variable`


class WithAxisNames(nn.LogicallyPartitioned):
  """An array with logical axis names.

  In NNX, the names are metadata of the variable. With a mesh and logical axis rules it is sharded
  over the mesh axes of its names; names without a rule are replicated, as in Linen.
  """

  def to_nnx_metadata(self) -> dict[str, Any]:
    """Returns the fields of an `nnx.Variable`."""
    metadata = dict(vars(self))  # vars(self) is the box itself
    metadata[_KEY] = metadata.pop('names')
    if not jax.sharding.get_abstract_mesh().empty:
      metadata['out_sharding'] = nn.logical_to_mesh_axes(self.names, self.rules)
    return metadata

  @classmethod
  def from_nnx_metadata(cls, metadata: dict[str, Any]) -> 'WithAxisNames':
    """Returns the box of the fields of an `nnx.Variable`."""
    return cls(metadata['value'], metadata[_KEY], metadata.get('mesh'), metadata.get('rules'))


def has_names(leaf: Any) -> bool:
  """Whether a node of a tree is an array with logical axis names, in a box or an NNX variable."""
  return bool(names_of(leaf))


def names_of(leaf: Any) -> tuple[str | None, ...]:
  """Returns the logical axis names of a box of Linen or of an `nnx.Variable`, () without any."""
  if isinstance(leaf, nn.LogicallyPartitioned):
    return leaf.names
  if hasattr(leaf, 'get_metadata'):
    return leaf.get_metadata().get(_KEY, ())
  return ()


def with_axis_names(
  init: Callable[..., jax.Array], names: tuple[str | None, ...]
) -> Callable[..., WithAxisNames]:
  """Returns an initializer whose arrays have logical axis names; None for a replicated axis."""

  def init_with_names(*args: Any, **kwargs: Any) -> WithAxisNames:
    if args and isinstance(args[0], jax.Array):
      # The key stays an input of the random bits: arrays of equal shapes share a kernel of a GPU.
      args = jax.lax.optimization_barrier(args[0]), *args[1:]
    return WithAxisNames(init(*args, **kwargs), names)

  return init_with_names
