"""Lists, verifies and restores the checkpoints of a run; `checkpoints.writer` writes them.

<workdir>/checkpoints/300           a complete checkpoint: Orbax files and manifest.json; of
                                    streamed corpora rows.json too
<workdir>/checkpoints/400.scratch*  an incomplete one: being written, or left by a killed run
<workdir>/checkpoints/200.damaged   a corrupt one, set aside
<workdir>/base                      the parameters that are not trained, which no checkpoint repeats

Remote folders cannot be renamed atomically. There, a checkpoint is complete if it has a manifest,
which is written last and deleted first.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import logging
import math
import pathlib
import re
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, sharding
from ngrammer_jax.checkpoints import checksums, manifest
from ngrammer_jax.layers import document_masks
from ngrammer_jax.models import parameter_groups
from ngrammer_jax.system import hosts, storage

if typing.TYPE_CHECKING:
  import orbax.checkpoint as ocp

STEP_NAME = re.compile(r'0|[1-9][0-9]{0,17}')  # of a checkpoint folder
FROZEN = 'base'
ROWS = 'rows.json'  # in a checkpoint: states of the rows of the batch


def folder_of(workdir: pathlib.Path, step: int) -> pathlib.Path:
  """Returns the folder of the checkpoint of a step."""
  return workdir / 'checkpoints' / str(step)


def steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of all complete checkpoints in order; some may be corrupt."""
  folder = workdir / 'checkpoints'
  if storage.is_remote(folder):
    paths = [path.parent for path in folder.glob(f'*/{manifest.FILE_NAME}')]
  else:
    paths = folder.iterdir() if folder.is_dir() else []
  return sorted(int(path.name) for path in paths if STEP_NAME.fullmatch(path.name))


def best_step(workdir: pathlib.Path) -> int | None:
  """Returns the step with the lowest validation loss, None if no checkpoint has one."""
  losses = {}
  for step in steps(workdir):
    with contextlib.suppress(manifest.CorruptError):
      loss = manifest.read(folder_of(workdir, step)).validation
      if loss is not None and math.isfinite(loss):
        losses[step] = loss
  return min(losses, key=losses.get, default=None)


def read_frozen(workdir: pathlib.Path) -> manifest.Manifest | None:
  """Returns the manifest of the base of a run, None if there is none, for all processes.

  Raises:
    BadInput: it is damaged.
  """
  has_manifest = (workdir / FROZEN / manifest.FILE_NAME).exists()
  if not hosts.broadcast(has_manifest):  # other processes may see the file late
    return None
  with _translate_damaged_frozen(workdir):
    return _call_on_primary(manifest.read, workdir / FROZEN)


def frozen_dtypes(workdir: pathlib.Path) -> dict[str, np.dtype]:
  """Returns the dtype of every parameter in the base of a run, by name; see `read_frozen`."""
  base = read_frozen(workdir)
  return {name: jnp.dtype(leaf[0]) for name, leaf in base.leaves.items()} if base else {}


def _restore_frozen(workdir: pathlib.Path, expected: str, abstract: Any) -> Any:
  """Restores and verifies the base; `expected` is its checksum. Raises BadInput if it changed."""
  with _translate_damaged_frozen(workdir):
    saved = _call_on_primary(manifest.verify, workdir / FROZEN)
    if saved.checksum != expected:
      raise manifest.CorruptError('its arrays are not those of the checkpoint')
    return _restore_folder(workdir / FROZEN, saved, abstract)


@contextlib.contextmanager
def _translate_damaged_frozen(workdir: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except manifest.CorruptError as error:
    raise errors.BadInput(
      f'{workdir / FROZEN} holds the parameters that are not trained, but it is not the one that '
      f'was written: {error}; copy it from a backup, or start again with another --workdir'
    ) from error


def make_checkpointer(folder: pathlib.Path) -> 'ocp.StandardCheckpointer':
  """Returns the Orbax checkpointer for a folder; it renames no remote folder."""
  import orbax.checkpoint as ocp  # heavy: only where a checkpoint is read or written

  if not storage.is_remote(folder):
    return ocp.StandardCheckpointer()
  return ocp.StandardCheckpointer(temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath)


def drop_empty(tree: Any) -> Any:
  """Replaces arrays without elements by None: Orbax does not save them."""
  return jax.tree.map(lambda leaf: leaf if math.prod(leaf.shape) else None, tree)


def verify(workdir: pathlib.Path, step: int) -> manifest.Manifest:
  """Verifies every file and array of a checkpoint of any model. Raises CorruptError."""
  folder = folder_of(workdir, step)
  saved = manifest.verify(folder)
  if saved.base and manifest.verify(workdir / FROZEN).checksum != saved.base:
    raise manifest.CorruptError(f'{FROZEN} is not the one of this checkpoint')
  with make_checkpointer(folder) as checkpointer:
    metadata = _read_metadata(checkpointer, folder)
    # Restored as NumPy arrays: the devices that wrote them may not exist here.
    as_numpy = lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    abstract = jax.tree.map(as_numpy, metadata)
    with jax.enable_x64(True):
      _check_arrays(saved, checkpointer.restore(storage.orbax_path(folder), abstract))
  return saved


def check_written(
  checkpointer: 'ocp.StandardCheckpointer', folder: pathlib.Path, leaves: manifest.Leaves
) -> None:
  """Looks every array up in what Orbax has written, without reading its values.

  Args:
    checkpointer: see `make_checkpointer`.
    folder: folder of the checkpoint, without a manifest yet.
    leaves: dtype, shape and checksum of each array by name.

  Raises:
    CorruptError: an array is not there.
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


def _read_metadata(checkpointer: 'ocp.StandardCheckpointer', folder: pathlib.Path) -> Any:
  """Returns the tree of dtypes and shapes that Orbax finds in a checkpoint."""
  return checkpointer.metadata(storage.orbax_path(folder)).item_metadata.tree


def restore(workdir: pathlib.Path, step: int, abstract: Any) -> Any:
  """Restores and verifies a checkpoint.

  Args:
    workdir: run directory.
    step: step of the checkpoint.
    abstract: shapes, dtypes and shardings of the state.

  Raises:
    CorruptError: the checkpoint differs from what was written.
    BadInput: the checkpoint does not match the model.
  """
  folder = folder_of(workdir, step)
  saved = _call_on_primary(manifest.verify, folder)
  if not saved.base:
    return _restore_folder(folder, saved, abstract)
  names = set(checksums.named_leaves(abstract.params))
  names -= {name.removeprefix('params/') for name in saved.leaves}
  base = _restore_frozen(workdir, saved.base, parameter_groups.select(abstract.params, names))
  own = abstract.replace(params=parameter_groups.without(abstract.params, names))
  state = _restore_folder(folder, saved, own)
  return state.replace(params=parameter_groups.merge(state.params, base))


def _restore_folder(folder: pathlib.Path, saved: manifest.Manifest, abstract: Any) -> Any:
  """Restores and verifies the arrays of a folder, see `restore`."""
  saved_abstract = _with_saved_memory(abstract, saved)
  leaves = {name: f'{dtype}{list(shape)}' for name, (dtype, shape, _) in saved.leaves.items()}
  check_same_leaves(folder, leaves, saved_abstract)
  with make_checkpointer(folder) as checkpointer:
    state = checkpointer.restore(storage.orbax_path(folder), drop_empty(saved_abstract))
  _check_arrays(saved, state)

  def convert(leaf, array):
    if array is None:  # Orbax saves no array without elements
      return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    if array.shape != leaf.shape:
      array = _with_empty_slots(array, leaf)
    if sharding.is_on_host(leaf) and array.format.layout.major_to_minor != (0, 1):
      array = jax.device_put(array, leaf.format)
    return array if array.dtype == leaf.dtype else array.astype(leaf.dtype)

  return jax.tree.map(convert, abstract, state, is_leaf=lambda x: x is None)


def read_rows(workdir: pathlib.Path, step: int) -> Any:
  """Returns the states of the rows that a verified checkpoint has, for all processes, or None."""
  path = folder_of(workdir, step) / ROWS
  content = None
  with hosts.collective_errors():
    if hosts.is_primary() and path.exists():
      content = json.loads(path.read_bytes())
  return hosts.broadcast(content)


def restore_newest(
  workdir: pathlib.Path, abstract: Any, set_aside: bool = False
) -> tuple[int, Any] | None:
  """Restores the newest intact checkpoint.

  Args:
    workdir: run directory.
    abstract: see `restore`.
    set_aside: whether to rename newer corrupt checkpoints, so that their steps can be saved again.

  Returns:
    The step and the state; None if there is no checkpoint.

  Raises:
    BadInput: all checkpoints are corrupt, or they do not match the model.
  """
  corrupt: dict[int, str] = {}
  # The list is read again each time: a run that is still training deletes old checkpoints.
  while candidates := [step for step in hosts.broadcast(steps(workdir)) if step not in corrupt]:
    step, folder = candidates[-1], folder_of(workdir, candidates[-1])
    logging.info('restoring step %s from %s', f'{step:,}', folder)
    try:
      state = restore(workdir, step, abstract)
    except errors.BadInput:
      raise
    except Exception as error:
      if not folder.exists():
        continue
      if not isinstance(error, manifest.CorruptError):
        raise
      fallback = '; falling back to the previous' if candidates[1:] else ''
      logging.warning('checkpoint %s is corrupt: %s%s', folder, error, fallback)
      corrupt[step] = str(error)
      continue
    if set_aside:
      hosts.on_primary(_set_aside, [folder_of(workdir, step) for step in corrupt])
    return step, state
  if corrupt:
    reasons = '; '.join(f'step {step}: {reason}' for step, reason in corrupt.items())
    raise errors.BadInput(
      f'--workdir={workdir} has no intact checkpoint ({reasons}): copy its checkpoints from a '
      f'backup, or start again with another --workdir'
    )
  return None


def _call_on_primary(read, folder):
  """Reads or verifies a manifest in the primary process, for all processes."""
  content = message = None
  with hosts.collective_errors():
    if hosts.is_primary():
      try:
        content = dataclasses.asdict(read(folder))
      except manifest.CorruptError as error:
        message = str(error)
  content, message = hosts.broadcast([content, message])
  if message is not None:
    raise manifest.CorruptError(message)
  return manifest.Manifest(**content)


def _with_saved_memory(abstract: Any, saved: manifest.Manifest) -> Any:
  """Replaces dtypes and lengths of the memory by the saved ones.

  The dtype of activations depends on the devices. Earlier versions had fewer slots if spans are
  learned.
  """

  def as_saved(path, leaf):
    name = sharding.leaf_name(path)
    if not name.startswith('memory/') or name not in saved.leaves:
      return leaf
    dtype, shape, _ = saved.leaves[name]
    is_activation = {dtype, str(leaf.dtype)} <= {'bfloat16', 'float32'}
    is_shorter = len(shape) == leaf.ndim > 1 and shape[1] < leaf.shape[1]
    if not is_shorter or (shape[0], *shape[2:]) != (leaf.shape[0], *leaf.shape[2:]):
      shape = leaf.shape
    dtype = dtype if is_activation else leaf.dtype
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=leaf.sharding)

  return jax.tree_util.tree_map_with_path(as_saved, abstract)


def _with_empty_slots(memory: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  """Adds empty slots at the beginning of a memory [B, M, ...]."""
  padding = [(size - saved, 0) for size, saved in zip(like.shape, memory.shape, strict=True)]
  empty = document_masks.NONE if jnp.issubdtype(memory.dtype, jnp.integer) else 0
  fill = lambda array: jnp.pad(array, padding, constant_values=empty)
  return jax.jit(fill, out_shardings=like.sharding)(memory)


def check_same_leaves(path: pathlib.Path, leaves: dict[str, str], abstract: Any) -> None:
  """Raises BadInput for the first array whose name, shape or dtype differs from those of a model.

  Args:
    path: file or folder of the arrays, for the error message.
    leaves: dtype and shape of each array by name, such as `float32[2, 3]`.
    abstract: shapes and dtypes of the model.
  """
  describe = lambda leaf: f'{leaf.dtype}{list(leaf.shape)}'
  expected = {name: describe(leaf) for name, leaf in checksums.named_leaves(abstract).items()}
  for name in sorted(expected.keys() | leaves.keys()):
    if expected.get(name) != leaves.get(name):
      raise errors.BadInput(
        f'{path} does not match the model: {name} is {leaves.get(name, "missing")}, expected '
        f'{expected.get(name, "no such array")}'
      )


def _check_arrays(saved: manifest.Manifest, state: Any) -> None:
  """Raises CorruptError if an array is not bit-identical to the one that was saved."""
  for name, checksum in checksums.checksums(state).items():
    if name not in saved.leaves:
      raise manifest.CorruptError(f'{name} is not in {manifest.FILE_NAME}')
    if checksum != saved.leaves[name][2]:
      raise manifest.CorruptError(f'{name} was changed: wrong checksum')


def _set_aside(folders: list[pathlib.Path]) -> None:
  """Renames corrupt checkpoints; earlier renamed ones of the same step stay."""
  for folder in folders:
    target, copies = folder.with_name(f'{folder.name}.damaged'), 1
    while target.exists():
      copies += 1
      target = folder.with_name(f'{folder.name}.damaged-{copies}')
    folder.rename(target)  # of a remote folder, copies its files and then deletes them
    logging.warning('%s was renamed to %s', folder, target.name)
