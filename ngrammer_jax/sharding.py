"""The device mesh, and the sharding of every array.

Parameters have logical axis names (`vocab`, `embed`, ...); RULES map them to the mesh axes `data`,
`fsdp` and `model`.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
import contextlib
import logging
import math
from typing import Any

from flax import linen as nn
import jax
from jax.experimental import mesh_utils
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.system import libtpu

AXES = ('data', 'fsdp', 'model')
BATCH = ('data', 'fsdp')

HOST_MEMORY_AXIS = 'host_ngram_embed'  # arrays with this axis are in the memory of the host
HOST_MEMORY_KIND = 'pinned_host'

RULES = (  # names without a rule are not sharded
  ('batch', BATCH),
  ('vocab', 'model'),
  ('heads', 'model'),
  ('mlp', 'model'),
  ('embed', 'fsdp'),
  ('persistent', 'fsdp'),
  ('ngram_vocab', ('fsdp', 'model')),
)


def make_mesh(
  data: int = -1, fsdp: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Returns a mesh of devices; one axis may have size -1 for the remaining devices.

  Several TPU slices are connected by a slower network. The axis `data` spans them: only sums over
  `data`, and the parameters gathered by `mesh.zero=1`, travel between slices.

  Args:
    data, fsdp, model: sizes of the axes.
    devices: devices of the mesh; None selects all.

  Raises:
    BadInput: the product of the sizes is not the number of devices, or `data` is not divisible by
      the number of slices.
  """
  if devices is None:
    devices = _find_devices()
  sizes = [data, fsdp, model]
  count = len(devices)
  product = math.prod(size for size in sizes if size != -1)
  if sizes.count(-1) == 1 and count % product == 0:
    sizes[sizes.index(-1)] = count // product
  if math.prod(sizes) != count or -1 in sizes:
    raise errors.BadInput(
      f'mesh.data={data} x mesh.fsdp={fsdp} x mesh.model={model} does not match the {count} '
      f'{devices[0].platform} device{"s" if count > 1 else ""}: the product of all sizes must be '
      f'{count}; one of them may be -1, if the others divide {count}'
    )
  # Linen needs Auto axes; the default of jax.make_mesh is Explicit.
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  slices = _count_slices(devices)
  if slices == 1:
    return jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices)
  if sizes[0] % slices:
    raise errors.BadInput(
      f'mesh.data={sizes[0]} is not divisible by the {slices} slices: use a multiple of {slices}'
    )
  shape_of_slice = [sizes[0] // slices, *sizes[1:]]
  grid_of_slices = [slices, 1, 1]
  device_grid = mesh_utils.create_hybrid_device_mesh(shape_of_slice, grid_of_slices, devices)
  return jax.sharding.Mesh(device_grid, AXES, axis_types=auto)


def _count_slices(devices: Sequence[jax.Device]) -> int:
  """Returns the number of TPU slices; 1 for other devices."""
  # Other platforms may use slice_index for hosts with a faster network.
  if devices[0].platform != 'tpu':
    return 1
  return len({getattr(device, 'slice_index', 0) for device in devices})


def _find_devices() -> list[jax.Device]:
  """Returns all devices. Raises BadInput if JAX_PLATFORMS names a missing platform."""
  try:
    with libtpu.skipped_without_tpu():
      return jax.devices()
  except (RuntimeError, AssertionError) as error:  # an AssertionError: of cuda without its plugin
    platforms = jax.config.jax_platforms
    texts = 'known backends', 'NOT_FOUND', 'NO_DEVICE'
    is_missing = isinstance(error, AssertionError) or any(text in str(error) for text in texts)
    if not platforms or not is_missing:  # else another try may help
      raise
    raise errors.BadInput(
      f'JAX_PLATFORMS={platforms}: JAX has no such platform here; unset it, or install the plugin '
      f'of the platform where its devices are'
    ) from error


def batch_shards(mesh: jax.sharding.Mesh) -> int:
  """Returns the number of devices that shard the rows of a batch."""
  return math.prod(mesh.shape[axis] for axis in BATCH)


def round_rows(rows: int, mesh: jax.sharding.Mesh) -> int:
  """Rounds a number of rows up to an evenly shardable one."""
  shards = batch_shards(mesh)
  return math.ceil(rows / shards) * shards


def check_batch(key: str, rows: int, mesh: jax.sharding.Mesh, microbatches: int = 1) -> None:
  """Raises BadInput if the rows of a batch, or of its microbatches, cannot be sharded evenly."""
  shards = batch_shards(mesh) * microbatches
  if rows % shards:
    nearest = max(1, round(rows / shards)) * shards
    factor = f' x training.accumulation.parts={microbatches}' if microbatches > 1 else ''
    raise errors.BadInput(
      f'{key}={rows} is not divisible by the {shards // microbatches} devices of mesh.data='
      f'{mesh.shape["data"]} x mesh.fsdp={mesh.shape["fsdp"]}{factor}: use {nearest}'
    )


@contextlib.contextmanager
def use(mesh: jax.sharding.Mesh) -> Iterator[None]:
  """Activates the mesh and the rules; outside, sharding constraints have no effect."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    yield


@contextlib.contextmanager
def without_devices() -> Iterator[None]:
  """Activates an abstract mesh of one CPU, to trace a model before touching devices."""
  cpu = jax.sharding.AbstractDevice(device_kind='cpu', num_cores=None, platform='cpu')
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  sizes = (1,) * len(AXES)
  mesh = jax.sharding.AbstractMesh(sizes, AXES, axis_types=auto, abstract_device=cpu)
  with jax.sharding.use_abstract_mesh(mesh):
    yield


def shardings(boxed: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns a NamedSharding for every array of a tree, with or without logical axis names.

  Arrays with HOST_MEMORY_AXIS are in the memory of the hosts, see `host_arrays`.
  An axis whose size is not divisible by its mesh axes is left unsharded, and logged.
  """
  unsharded: dict[tuple[str, int, int], list[str]] = {}  # names of arrays by axis, size, shards

  def sharding_of(path, leaf):
    shape = nn.unbox(leaf).shape
    if is_boxed(leaf) and HOST_MEMORY_AXIS in leaf.names:
      return replicated(mesh).with_memory_kind(HOST_MEMORY_KIND)
    names = (None,) * len(shape)
    # Sharding a vector saves nothing, and would reshard its scaled activations.
    if is_boxed(leaf) and len(shape) > 1:
      names = leaf.names
    spec = []
    for size, name, axes in zip(shape, names, nn.logical_to_mesh_axes(names, RULES), strict=True):
      group = (axes,) if isinstance(axes, str) else axes or ()
      shards = math.prod(mesh.shape[axis] for axis in group)
      if size % shards:
        unsharded.setdefault((name, size, shards), []).append(leaf_name(path))
        axes = None
      spec.append(axes)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return sharding

  result = jax.tree_util.tree_map_with_path(sharding_of, boxed, is_leaf=is_boxed)
  for (name, size, shards), (leaf, *others) in unsharded.items():
    more = f' and {len(others)} others' if others else ''
    message = '%s%s: axis %s of size %d is not divisible by %d devices, left unsharded'
    logging.info(message, leaf, more, name, size, shards)
  return result


def is_boxed(leaf: Any) -> bool:
  """Whether a node of a tree is an array in the box with its logical axis names."""
  return isinstance(leaf, nn.LogicallyPartitioned)


def leaf_name(path: Any) -> str:
  """Returns the name of a leaf by its path, such as `params/layer_0/attention/query/kernel`."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def rows_sharding(mesh: jax.sharding.Mesh, axis: int = 0) -> jax.sharding.NamedSharding:
  """Returns the sharding of an array with batch axis `axis`."""
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * axis, BATCH))


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Returns the sharding of an array replicated on every device."""
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def abstract(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
  """Returns the shapes and dtypes of a tree of arrays, with one sharding for all; None: without.

  Without shardings, arrays in host memory can be traced together with arrays on devices.
  """

  def to_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(to_struct, tree)


def global_rows(
  mesh: jax.sharding.Mesh, batch_size: int, load: Callable[[slice], Any], axis: int = 0
) -> Any:
  """Returns the global arrays of a batch; each host only loads the rows of its devices.

  Consecutive rows are loaded at once, whatever their devices.

  Args:
    mesh: device mesh.
    batch_size: rows of the global batch.
    load: maps a slice of the rows to a tree of NumPy arrays with these rows at `axis`.
    axis: axis of the rows.
  """
  sharding = rows_sharding(mesh, axis)

  def range_of(index: tuple[slice, ...]) -> tuple[int, int]:
    first, last, _ = index[axis].indices(batch_size)
    return first, last

  indices_of_devices = sharding.addressable_devices_indices_map((*[1] * axis, batch_size))
  ranges_of_devices = {range_of(index) for index in indices_of_devices.values()}
  ranges: list[tuple[int, int]] = []  # those that follow each other are one
  for first, last in sorted(ranges_of_devices):
    if ranges and ranges[-1][1] == first:
      first, _ = ranges.pop()
    ranges.append((first, last))
  loaded = [load(slice(first, last)) for first, last in ranges]

  def to_global(*arrays):  # one for each range
    def rows_of_device(index: tuple[slice, ...]):
      first, last = range_of(index)
      number = bisect.bisect_right(ranges, (first, batch_size)) - 1
      begin, _ = ranges[number]
      return arrays[number][(slice(None),) * axis + (slice(first - begin, last - begin),)]

    shape = (*arrays[0].shape[:axis], batch_size, *arrays[0].shape[axis + 1 :])
    return jax.make_array_from_callback(shape, sharding, rows_of_device)

  return jax.tree.map(to_global, *loaded)


def terms(mesh: jax.sharding.Mesh, array: np.ndarray, axis: int = 0) -> jax.Array:
  """Returns an array with one more axis, of all devices: its sum is that of all processes' arrays.

  The first device of each process has its array, the others have zeros.

  Args:
    mesh: device mesh.
    array: the array of this process, with the same shape in all.
    axis: the axis of the devices in the result.
  """
  term_sharding = terms_sharding(mesh, axis)
  shape = (*array.shape[:axis], mesh.size, *array.shape[axis:])
  indices = term_sharding.addressable_devices_indices_map(shape)
  own = min(index[axis].start or 0 for index in indices.values())
  term = np.expand_dims(array, axis)
  zeros = np.zeros_like(term)

  def term_of_device(index: tuple[slice, ...]) -> np.ndarray:
    return term if (index[axis].start or 0) == own else zeros

  return jax.make_array_from_callback(shape, term_sharding, term_of_device)


def terms_sharding(mesh: jax.sharding.Mesh, axis: int = 0) -> jax.sharding.NamedSharding:
  """Returns the sharding of `terms`."""
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * axis, AXES))
