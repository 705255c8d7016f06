"""Mesh axes and devices of the current mesh, and the sharding of the inputs of products."""

import math
from typing import Any

from flax import linen as nn
import jax


def axes(name: str, size: int) -> tuple[str, ...] | None:
  """Returns the mesh axes of a logical axis of the given size.

  Returns () for an unsharded axis. Returns None if the mesh axes do not divide the size.
  """
  if size % shards(name):
    return None
  return _mesh_axes(name)


def shards(name: str) -> int:
  """Returns the number of shards of a logical axis."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(mesh.shape[axis] for axis in _mesh_axes(name))


def head_axes(N: int, C: int) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
  """Returns the mesh axes of N query heads, and of their C key heads.

  If there are more devices than key heads, each has all of them (see `local_key_heads`).
  """
  heads = axes('heads', N)
  devices = shards('heads')
  if not heads or C % devices == 0:
    return heads, heads
  if devices % C == 0:
    return heads, ()
  return None, None


def local_key_heads(axes: tuple[str, ...], N: int, tree: Any, axis: int) -> Any:
  """Returns the key heads of the query heads of this device, inside `shard_map`.

  Args:
    axes: mesh axes of the query heads; all query heads of a device share one key head.
    N: number of query heads of all devices.
    tree: arrays with all key heads.
    axis: their axis of the key heads.
  """
  heads_per_device = N // shards('heads')
  first = jax.lax.axis_index(axes) * heads_per_device

  def select(array):
    head = first * array.shape[axis] // N
    return jax.lax.dynamic_slice_in_dim(array, head, 1, axis)

  return jax.tree.map(select, tree)


def shard_rows(x_BxTxD: jax.Array) -> jax.Array:
  """Shards the input of a product over the batch only.

  The constraint holds for its gradient too. Without it, the XLA of jaxlib 0.10.2 exchanges rows of
  that gradient between devices, on some meshes with three axes (with gradient accumulation, and
  clusters of hidden states).
  """
  return nn.with_logical_constraint(x_BxTxD, ('batch', 'length', None))


def device() -> tuple[str, str]:
  """Returns platform and kind of the devices of the mesh, or of this process without a mesh.

  The mesh may be abstract, with devices that are not attached.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
  return device.platform, device.device_kind


def _mesh_axes(name: str) -> tuple[str, ...]:
  """Returns the mesh axes of a name by the logical axis rules, if larger than 1."""
  mesh = jax.sharding.get_abstract_mesh()
  (assigned,) = nn.logical_to_mesh_axes((name,))
  if assigned is None:
    return ()
  if isinstance(assigned, str):
    assigned = (assigned,)
  return tuple(axis for axis in assigned if mesh.shape.get(axis, 1) > 1)
