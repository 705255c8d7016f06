"""Memory of devices and machines; compares it with the size of arrays, from shapes alone."""

from collections.abc import Mapping
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax

from ngrammer_jax import errors, host_arrays

# Limits of a container, by version of cgroups. A file holds bytes, or the word max.
CONTAINER_LIMITS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')


class MemoryLimit(NamedTuple):
  """The size of the memory of a device or a machine.

  Attributes:
    name: the owner of the memory, for messages: `this machine`.
    size: size in bytes; None: unknown.
    devices: number of devices with shards in it.
  """

  name: str
  size: int | None
  devices: int


def device_memory(mesh: jax.sharding.Mesh) -> MemoryLimit:
  """Returns the memory of one device of a mesh; on CPU the machine's, shared by all devices."""
  device = mesh.local_devices[0]
  if device.platform == 'cpu':
    return machine_memory(mesh)
  stats = device.memory_stats() or {}
  return MemoryLimit(f'a device ({device.device_kind})', stats.get('bytes_limit'), 1)


def machine_memory(mesh: jax.sharding.Mesh) -> MemoryLimit:
  """Returns the memory of this machine, or the limit of its container."""
  sizes = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
  for path in map(pathlib.Path, CONTAINER_LIMITS):
    if not path.exists():
      continue
    text = path.read_text().strip()
    if text.isdecimal():
      sizes.append(int(text))
  return MemoryLimit('this machine', min(sizes), len(mesh.local_devices))


def devices_are_processor(mesh: jax.sharding.Mesh) -> bool:
  """Whether the devices of a mesh use the memory of the machine."""
  return device_memory(mesh).name == machine_memory(mesh).name


def format_bytes(size: float) -> str:
  """Formats a size in GiB, small ones in MiB."""
  if size < 2**30:
    return f'{size / 2**20:,.1f} MiB'
  return f'{size / 2**30:,.1f} GiB'


def check_fits(arrays: Mapping[str, Any], memory: MemoryLimit, what: str) -> None:
  """Raises BadInput for arrays that exceed a memory, with the largest of them.

  Args:
    arrays: the arrays by name, concrete or abstract, with shardings.
    memory: the memory.
    what: name of the arrays in the message.
  """
  sizes = {name: _bytes_in(memory, leaf) for name, leaf in arrays.items()}
  needed = sum(sizes.values())
  if memory.size is None or needed <= memory.size:
    return
  largest = max(sizes, key=sizes.get)
  shape = list(arrays[largest].shape)
  remedy = 'use smaller sizes, or more devices with mesh.fsdp or mesh.model'
  if host_arrays.is_on_host(arrays[largest]):
    remedy = 'use fewer rows, more processes, or a machine with more memory'
  raise errors.BadInput(
    f'{what} need {format_bytes(needed)}, but {memory.name} '
    f'has {format_bytes(memory.size)}: the largest array is {largest} {shape}; {remedy}'
  )


def _bytes_in(memory: MemoryLimit, leaf: Any) -> int:
  """Returns the bytes of an array in a memory: shards of devices, or the rows of the process."""
  if host_arrays.is_on_host(leaf):
    V, *rest = leaf.shape
    return host_arrays.rows_per_process(V) * math.prod(rest) * leaf.dtype.itemsize
  return memory.devices * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
