"""Over which axes of the mesh in force an array is spread, for what is written device by device."""

import math

from flax import linen as nn
import jax


def axes(name: str, size: int) -> tuple[str, ...] | None:
  """The mesh axes of a logical axis of so many, by the rules in force; () where it is whole.

  None where they do not divide it.
  """
  mesh = jax.sharding.get_abstract_mesh()
  (found,) = nn.logical_to_mesh_axes((name,))
  found = (found,) if isinstance(found, str) else found or ()
  found = tuple(axis for axis in found if mesh.shape.get(axis, 1) > 1)
  return None if size % math.prod(mesh.shape[axis] for axis in found) else found


def device() -> tuple[str, str]:
  """Platform and kind of the devices of the mesh, which may not be here, or of this process."""
  known = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
  return known.platform, known.device_kind
