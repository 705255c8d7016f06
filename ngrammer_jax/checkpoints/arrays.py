"""The arrays of a checkpoint folder: read by Orbax, verified by checksum."""

from collections.abc import Iterator
import contextlib
import math
import pathlib
import typing
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, host_arrays, sharding
from ngrammer_jax.checkpoints import checksums, manifest
from ngrammer_jax.layers import document_masks
from ngrammer_jax.system import hosts, storage

if typing.TYPE_CHECKING:
  import orbax.checkpoint as ocp


def make_checkpointer(folder: pathlib.Path) -> 'ocp.AsyncCheckpointer':
  """Returns the Orbax checkpointer for a folder; it renames no remote folder."""
  import orbax.checkpoint as ocp  # heavy: only where a checkpoint is read or written

  from ngrammer_jax.checkpoints import pieces

  handler = ocp.PyTreeCheckpointHandler(type_handler_registry=pieces.registry())
  if not storage.is_remote(folder):
    return ocp.AsyncCheckpointer(handler)
  return ocp.AsyncCheckpointer(
    handler, temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath
  )


def drop_empty(tree: Any) -> Any:
  """Replaces arrays without elements by None: Orbax does not save them."""

  def none_if_empty(leaf: Any) -> Any:
    if math.prod(leaf.shape) == 0:
      return None
    return leaf

  return jax.tree.map(none_if_empty, tree)


def save(checkpointer: 'ocp.AsyncCheckpointer', folder: pathlib.Path, tree: Any) -> None:
  """Starts to write the arrays of a tree; arrays in host memory in pieces, without a copy."""
  import orbax.checkpoint as ocp

  arguments = ocp.args.PyTreeSave(drop_empty(tree))
  checkpointer.save(storage.orbax_path(folder), args=arguments)


def restore(folder: pathlib.Path, saved: manifest.Manifest, abstract: Any) -> Any:
  """Restores and verifies all arrays of a folder.

  Args:
    folder: the folder, with the files of Orbax.
    saved: its manifest.
    abstract: shapes, dtypes and shardings of the arrays.

  Raises:
    CorruptError: an array differs from the saved one.
    BadInput: the arrays do not match the model.
  """
  saved_abstract = _with_saved_memory(abstract, saved)
  check_same_leaves(folder, _describe(saved.leaves), saved_abstract)
  with _explain_errors(folder), make_checkpointer(folder) as checkpointer:
    stored = jax.tree.map(_numpy_if_on_host, drop_empty(saved_abstract))
    restored = checkpointer.restore(storage.orbax_path(folder), args=_restore_arguments(stored))
  check_checksums(saved, restored)
  return jax.tree.map(_as_expected, abstract, restored, is_leaf=lambda leaf: leaf is None)


def restore_sections(folder: pathlib.Path, saved: manifest.Manifest, abstract: Any) -> Any:
  """Restores and verifies some sections of a state without reading the others.

  Args:
    folder: see `restore`.
    saved: see `restore`.
    abstract: shapes, dtypes and shardings of the arrays, as a dict from sections, such as `params`.

  Raises: see `restore`.
  """
  leaves = {name: leaf for name, leaf in saved.leaves.items() if name.partition('/')[0] in abstract}
  check_same_leaves(folder, _describe(leaves), abstract)
  expected = checksums.named_leaves(abstract)
  stored = {
    name: _numpy_if_on_host(leaf) for name, leaf in expected.items() if math.prod(leaf.shape)
  }
  tree = traverse_util.unflatten_dict(stored, sep='/')
  with _explain_errors(folder), make_checkpointer(folder) as checkpointer:
    arguments = _restore_arguments(tree, partial_restore=True)
    restored = checkpointer.restore(storage.orbax_path(folder), args=arguments)
  check_checksums(saved, restored)
  arrays = checksums.named_leaves(restored)
  leaves = [_as_expected(leaf, arrays.get(name)) for name, leaf in expected.items()]
  return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _restore_arguments(tree: Any, partial_restore: bool = False) -> 'ocp.args.PyTreeRestore':
  """Returns what Orbax needs to restore arrays.

  Args:
    tree: shapes, dtypes and shardings; NumPy arrays for those in host memory.
    partial_restore: whether the checkpoint may have more arrays.
  """
  import orbax.checkpoint as ocp

  def of_process(leaf: Any, arg: 'ocp.RestoreArgs') -> 'ocp.RestoreArgs':
    if isinstance(leaf, np.ndarray) and hosts.is_multiprocess():
      return ocp.RestoreArgs(restore_type=host_arrays.ProcessRows, dtype=leaf.dtype)
    return arg

  restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
  return ocp.args.PyTreeRestore(
    item=tree,
    restore_args=jax.tree.map(of_process, tree, restore_args),
    partial_restore=partial_restore,
  )


@contextlib.contextmanager
def _explain_errors(folder: pathlib.Path) -> Iterator[None]:
  """Raises CorruptError in place of an error of Orbax, if a file of the folder is damaged.

  Orbax raises errors of many classes for damage, and the same classes for other reasons.
  """
  try:
    yield
  except Exception:
    manifest.verify(folder)
    raise


def _as_expected(leaf: jax.ShapeDtypeStruct, array: jax.Array | None) -> jax.Array:
  """Returns a restored array with the shape, dtype and layout of the model.

  Args:
    leaf: the expected array.
    array: the restored one; None for empty arrays, which Orbax does not save.
  """
  if array is None:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
  if array.shape != leaf.shape:
    array = _with_empty_slots(array, leaf)
  if array.dtype != leaf.dtype:
    array = array.astype(leaf.dtype)
  return array


def verify(folder: pathlib.Path, saved: manifest.Manifest) -> None:
  """Verifies all arrays of a folder, of any model. Raises CorruptError for a changed array."""
  with make_checkpointer(folder) as checkpointer:
    metadata = _read_metadata(checkpointer, folder)
    # Restored as NumPy arrays: the devices that wrote them may not exist here.
    abstract = jax.tree.map(_numpy_zeros, metadata)
    with jax.enable_x64(True):
      arguments = _restore_arguments(abstract)
      check_checksums(saved, checkpointer.restore(storage.orbax_path(folder), args=arguments))


def _numpy_if_on_host(leaf: Any) -> Any:
  """Returns an expected array in the form of Orbax for host memory, or unchanged."""
  if host_arrays.is_on_host(leaf):
    return _numpy_zeros(leaf)
  return leaf


def _numpy_zeros(leaf: Any) -> np.ndarray:
  """Returns an array with the shape and dtype of another one, without using memory."""
  return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def check_written(
  checkpointer: 'ocp.AsyncCheckpointer', folder: pathlib.Path, leaves: manifest.Leaves
) -> None:
  """Checks that Orbax's metadata lists every array, without reading values.

  Args:
    checkpointer: see `make_checkpointer`.
    folder: folder of the checkpoint, without a manifest yet.
    leaves: dtype, shape and checksum of each array by name.

  Raises:
    CorruptError: an array is missing.
  """
  try:
    written = checksums.named_leaves(_read_metadata(checkpointer, folder))
  except (AttributeError, ValueError, LookupError, FileNotFoundError) as error:
    raise manifest.CorruptError(f'its arrays cannot be read ({error})') from error
  for name, (dtype, shape, _) in leaves.items():
    leaf = written.get(name)
    is_written = leaf is not None and (str(leaf.dtype), list(leaf.shape)) == (dtype, shape)
    if math.prod(shape) and not is_written:
      raise manifest.CorruptError(f'{name} was not written')


def check_same_leaves(path: pathlib.Path, leaves: dict[str, str], abstract: Any) -> None:
  """Raises BadInput for the first array with a name, shape or dtype other than the model's.

  Args:
    path: file or folder of the arrays, for the error message.
    leaves: dtype and shape of each array by name, such as `float32[2, 3]`.
    abstract: shapes and dtypes of the model.
  """
  expected = {
    name: f'{leaf.dtype}{list(leaf.shape)}'
    for name, leaf in checksums.named_leaves(abstract).items()
  }
  for name in sorted(expected.keys() | leaves.keys()):
    if expected.get(name) != leaves.get(name):
      raise errors.BadInput(
        f'{path} does not match the model: {name} is {leaves.get(name, "missing")}, expected '
        f'{expected.get(name, "no such array")}'
      )


def with_saved_precision(abstract: Any, saved: manifest.Manifest) -> Any:
  """Returns the tree, with the saved dtype for each array of float64.

  A model with parameters saved in float32 can compute in float64.
  """

  def as_saved(path, leaf):
    name = sharding.leaf_name(path)
    if leaf.dtype != np.float64 or name not in saved.leaves:
      return leaf
    return jax.ShapeDtypeStruct(leaf.shape, saved.leaves[name][0], sharding=leaf.sharding)

  return jax.tree_util.tree_map_with_path(as_saved, abstract)


def check_checksums(saved: manifest.Manifest, arrays: Any) -> None:
  """Raises CorruptError if an array is not bit-identical to the saved one."""
  for name, checksum in checksums.checksums(arrays).items():
    if name not in saved.leaves:
      raise manifest.CorruptError(f'{name} is not in {manifest.FILE_NAME}')
    if checksum != saved.leaves[name][2]:
      raise manifest.CorruptError(f'{name} was changed: wrong checksum')


def _describe(leaves: manifest.Leaves) -> dict[str, str]:
  """Returns dtype and shape of each array by name, such as `float32[2, 3]`."""
  return {name: f'{dtype}{list(shape)}' for name, (dtype, shape, _) in leaves.items()}


def _read_metadata(checkpointer: 'ocp.AsyncCheckpointer', folder: pathlib.Path) -> Any:
  """Returns the tree of dtypes and shapes of a checkpoint, as read by Orbax."""
  return checkpointer.metadata(storage.orbax_path(folder)).item_metadata.tree


def _with_saved_memory(abstract: Any, saved: manifest.Manifest) -> Any:
  """Replaces dtypes and lengths of the memory by the saved ones.

  The dtype of activations depends on the devices. Earlier versions had fewer slots with learned
  spans.
  """

  def as_saved(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    name = sharding.leaf_name(path)
    if not name.startswith('memory/') or name not in saved.leaves:
      return leaf
    dtype, shape, _ = saved.leaves[name]
    is_activation = {dtype, str(leaf.dtype)} <= {'bfloat16', 'float32'}
    is_shorter = len(shape) == leaf.ndim > 1 and shape[1] < leaf.shape[1]
    if not is_shorter or (shape[0], *shape[2:]) != (leaf.shape[0], *leaf.shape[2:]):
      shape = leaf.shape
    if not is_activation:
      dtype = leaf.dtype
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=leaf.sharding)

  return jax.tree_util.tree_map_with_path(as_saved, abstract)


def _with_empty_slots(memory: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  """Adds empty slots at the beginning of a memory [B, M, ...]."""
  padding = [(size - saved, 0) for size, saved in zip(like.shape, memory.shape, strict=True)]
  empty = 0
  if jnp.issubdtype(memory.dtype, jnp.integer):  # numbers of documents
    empty = document_masks.NONE

  def fill(array: jax.Array) -> jax.Array:
    return jnp.pad(array, padding, constant_values=empty)

  return jax.jit(fill, out_shardings=like.sharding)(memory)
