"""Devices as a mesh, and what of every array lies where.

Parameters name their axes (`vocab`, `embed`, ...); RULES map the names to the mesh axes
`data`, `fsdp` and `model`.
"""

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

AXES = ('data', 'fsdp', 'model')
BATCH = ('data', 'fsdp')

RULES = (
  ('batch', BATCH),
  ('length', None),
  ('memory', None),
  ('layers', None),
  ('vocab', 'model'),
  ('heads', 'model'),
  ('mlp', 'model'),
  ('embed', 'fsdp'),
  ('kv', None),
  ('persistent', 'fsdp'),
  ('clusters', None),
  ('ngram_vocab', ('fsdp', 'model')),
  ('ngram_embed', None),
)


def make_mesh(
  data: int = -1, fsdp: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Devices as a mesh; one axis may be -1 and takes what is left.

  Of several slices, which a slower network connects, the batch is spread over all: only what is
  summed over `data` goes from one to another.

  Args:
    data, fsdp, model: sizes of the axes.
    devices: None: all there are.

  Raises:
    BadInput: the sizes do not multiply to the number of devices, or `data` not to that of slices.
  """
  devices = jax.devices() if devices is None else devices
  sizes, count = [data, fsdp, model], len(devices)
  known = math.prod(s for s in sizes if s != -1)
  if sizes.count(-1) == 1 and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  if math.prod(sizes) != count or -1 in sizes:
    raise errors.BadInput(
      f'mesh.data={data} x mesh.fsdp={fsdp} x mesh.model={model} does not make the {count} '
      f'{devices[0].platform} device{"s" if count > 1 else ""} there are; one of them may be -1'
    )
  # Linen needs Auto axes; the default of jax.make_mesh is Explicit.
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  # Only between slices of TPUs is the network so much slower; others may number their hosts so.
  tpu = devices[0].platform == 'tpu'
  slices = len({getattr(device, 'slice_index', 0) for device in devices}) if tpu else 1
  if slices == 1:
    return jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices)
  if sizes[0] % slices:
    raise errors.BadInput(
      f'mesh.data={sizes[0]} does not divide by the {slices} slices there are: use '
      f'mesh.data={slices}, or a multiple'
    )
  within, across = [sizes[0] // slices, *sizes[1:]], [slices, 1, 1]
  return jax.sharding.Mesh(
    mesh_utils.create_hybrid_device_mesh(within, across, devices), AXES, axis_types=auto
  )


def batch_shards(mesh: jax.sharding.Mesh) -> int:
  """Over how many devices the rows of a batch are spread."""
  return math.prod(mesh.shape[axis] for axis in BATCH)


def check_batch(key: str, rows: int, mesh: jax.sharding.Mesh, parts: int = 1) -> None:
  """Raises BadInput where the rows of a batch, or of its parts, cannot be shared out evenly."""
  shards = batch_shards(mesh) * parts
  if rows % shards:
    near = max(1, round(rows / shards)) * shards
    of_parts = f' x training.accumulation.parts={parts}' if parts > 1 else ''
    raise errors.BadInput(
      f'{key}={rows} is not divisible by the {shards // parts} devices of mesh.data='
      f'{mesh.shape["data"]} x mesh.fsdp={mesh.shape["fsdp"]}{of_parts}: use {near}'
    )


@contextlib.contextmanager
def use(mesh: jax.sharding.Mesh) -> Iterator[None]:
  """Puts the mesh and the rules in force; without, all sharding constraints are silent."""
  with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
    yield


def shardings(boxed: Any, mesh: jax.sharding.Mesh) -> Any:
  """A NamedSharding for every array of a tree whose leaves may carry logical names.

  An axis that its mesh axes do not divide is left unsharded, and logged.
  """

  is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
  whole: dict[tuple[str, int, int], list[str]] = {}

  def of(path, leaf):
    value = nn.unbox(leaf)
    if not jax.tree.leaves(value):  # what optax leaves where another optimiser is at work
      return value
    # A sharded vector saves nothing, and would draw the activations it scales after it.
    vector = len(value.shape) < 2
    names = (None,) * len(value.shape) if vector or not is_box(leaf) else leaf.names
    parts = []
    for size, name, axes in zip(
      value.shape, names, nn.logical_to_mesh_axes(names, RULES), strict=True
    ):
      group = (axes,) if isinstance(axes, str) else axes or ()
      shards = math.prod(mesh.shape[axis] for axis in group)
      if size % shards:
        where = jax.tree_util.keystr(path, simple=True, separator='/')
        whole.setdefault((name, size, shards), []).append(where)
        axes = None
      parts.append(axes)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))

  placed = jax.tree_util.tree_map_with_path(of, boxed, is_leaf=is_box)
  for (name, size, shards), (where, *others) in whole.items():
    more = f' and {len(others)} others' if others else ''
    logging.info(
      '%s%s: axis %s of size %d stays whole on %d devices', where, more, name, size, shards
    )
  return placed


def rows_sharding(mesh: jax.sharding.Mesh, axis: int = 0) -> jax.sharding.NamedSharding:
  """The sharding of an array whose axis number `axis` is the batch."""
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * axis, BATCH))


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """The sharding of an array that every device holds whole."""
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def abstract(tree: Any, where: jax.sharding.Sharding) -> Any:
  """The arrays of a tree without their values, lying there."""
  like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
  return jax.tree.map(like, tree)


def global_rows(
  mesh: jax.sharding.Mesh, batch_size: int, make: Callable[[slice], Any], axis: int = 0
) -> Any:
  """Global arrays of a batch, each host making only the rows that its devices hold.

  Args:
    mesh: where the arrays go.
    batch_size: rows of the global batch.
    make: from a slice of the rows to a tuple of NumPy arrays with these rows at `axis`.
    axis: of the rows.
  """
  sharding = rows_sharding(mesh, axis)
  made: dict[tuple[int, int], Any] = {}

  def rows(index):
    first, last, _ = index[axis].indices(batch_size)
    if (first, last) not in made:
      made[first, last] = make(slice(first, last))
    return made[first, last]

  local = sharding.addressable_devices_indices_map((*[1] * axis, batch_size))
  example = rows(next(iter(local.values())))
  arrays = []
  for i, array in enumerate(example):
    if array is None:
      arrays.append(None)
      continue
    shape = (*array.shape[:axis], batch_size, *array.shape[axis + 1 :])
    part = lambda index, i=i: np.asarray(rows(index)[i])
    arrays.append(jax.make_array_from_callback(shape, sharding, part))
  return type(example)(*arrays) if hasattr(example, '_fields') else tuple(arrays)
