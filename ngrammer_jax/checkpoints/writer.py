"""Writes checkpoints in the background: Orbax writes the arrays, this module commits them.

A commit checks that Orbax's metadata lists every array, writes the manifest, renames the folder to
its step and only then deletes old checkpoints. The `CheckpointManager` of Orbax (0.12.8) is not
used: it deletes old steps in place, so a kill leaves a partial checkpoint in `all_steps()`, and it
cannot add a metric to a saved step.
"""

from concurrent import futures
import contextlib
import dataclasses
import datetime
import json
import logging
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, host_arrays
from ngrammer_jax.checkpoints import arrays, checksums, frozen, manifest, reader
from ngrammer_jax.models import parameter_groups
from ngrammer_jax.system import file_errors, files, hosts, storage

SCRATCH = '.scratch'


class CheckpointWriter:
  """Writes the checkpoints of a run; keeps the last `keep`, and the one with the best validation.

  A context manager; leaving it waits until everything is on disk.
  """

  def __init__(self, workdir: pathlib.Path, keep: int = 3):
    self._workdir = workdir
    self._keep = keep
    self._folder = workdir / 'checkpoints'
    hosts.on_primary(self._delete_incomplete)
    self._orbax = arrays.make_checkpointer(self._folder)
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    # Of the checkpoint in progress.
    self._step = 0
    self._commit_future: futures.Future | None = None
    # Without a checkpoint, the base is written again.
    has_checkpoint = hosts.broadcast(bool(reader.steps(workdir)))
    self._frozen = frozen.read_manifest(workdir) if has_checkpoint else None

  def check_space(self, state: Any, name: str = 'a checkpoint') -> None:
    """Raises BadInput if the disk lacks space for a state, abstract or not."""
    leaves = jax.tree.leaves(self._without_frozen(state))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    needed = size + 1_000_000  # the files other than the arrays
    if files.free_bytes(self._folder) < needed:
      raise errors.BadInput(self._disk_full_message(f'{name} of {needed / 1e6:,.1f} MB'))

  def save_frozen(self, params: Any) -> None:
    """Writes the frozen parameters, replacing earlier ones; `save` omits them.

    Raises:
      BadInput: the disk is full.
    """
    folder = self._workdir / frozen.FOLDER
    hosts.on_primary(self._delete_frozen, folder)
    self._frozen = None
    if not params:
      return
    with hosts.collective_errors():
      self.check_space(params, 'the parameters that are not trained')
    scratch = folder
    if not storage.is_remote(folder):
      scratch = folder.with_name(f'{frozen.FOLDER}{SCRATCH}')
    with self._translate_disk_full('the parameters that are not trained'):
      leaves = _describe_leaves(params)
      arrays.save(self._orbax, scratch, params)
      self._orbax.wait_until_finished()
      hosts.on_primary(self._finish, 0, None, scratch, leaves, folder)
    # Not read again: other processes may see the file late.
    self._frozen = manifest.Manifest(0, '', None, {}, leaves)

  def _delete_frozen(self, folder: pathlib.Path) -> None:
    for path in (folder, *folder.parent.glob(f'{folder.name}{SCRATCH}*')):
      if path.exists():
        files.remove(path)

  def save(self, step: int, state: Any, validation: float | None = None, rows: Any = None) -> None:
    """Starts writing a checkpoint and returns; the state may be donated afterwards.

    Args:
      step: step of the state.
      state: the train state.
      validation: nats per token on the validation split, None if not measured.
      rows: states of all rows of the batch, a JSON value, see `TrainTask`; None: no states.

    Raises:
      BadInput: the disk is full, now or for the previous checkpoint.
    """
    state = self._without_frozen(state)
    with hosts.collective_errors():
      self._wait()
      self.check_space(state, f'step {step}')  # before Orbax: its threads log many errors
    if jax.default_backend() == 'cpu':
      # On CPU the host copy is the device buffer itself, overwritten by a donated call.
      state = jax.tree.map(_copy_on_devices, state)
    leaves = None
    undescribed_state = state  # described while Orbax writes
    has_host_tables = any(map(host_arrays.is_on_host, jax.tree.leaves(state)))
    if has_host_tables or jax.default_backend() != 'cpu' or hosts.is_multiprocess():
      # On the devices, where all processes have to run the same programs in the same order.
      leaves = _describe_leaves(state)
      undescribed_state = None
    scratch = reader.folder_of(self._workdir, step)
    if not storage.is_remote(scratch):
      scratch = scratch.with_name(f'{step}{SCRATCH}')
    with self._translate_disk_full(f'step {step}'):
      arrays.save(self._orbax, scratch, state)
      if has_host_tables:  # the next step changes them: they are not copied
        self._orbax.wait_until_finished()
    self._step = step
    self._commit_future = self._thread.submit(
      self._commit, step, validation, scratch, rows, leaves, undescribed_state
    )

  def _without_frozen(self, state: Any) -> Any:
    """Returns a state without the parameters in the base."""
    if self._frozen is None:
      return state
    return state.replace(params=parameter_groups.without(state.params, self._frozen.leaves))

  def set_validation(self, step: int, validation: float) -> None:
    """Adds a validation loss measured after writing the checkpoint.

    Call it in the primary process.
    """
    folder = reader.folder_of(self._workdir, step)
    saved = manifest.read(folder)
    if saved.validation != validation:
      with self._translate_disk_full(f'the manifest of step {step}'):
        manifest.write(folder, dataclasses.replace(saved, validation=validation))

  def last_saved(self) -> str:
    """Waits for the checkpoint in progress, and formats the newest step on disk."""
    if self._commit_future is not None:
      futures.wait([self._commit_future])
    steps = reader.steps(self._workdir)
    if not steps:
      return 'none yet'
    return f'step {steps[-1]}'

  def _commit(
    self,
    step: int,
    validation: float | None,
    scratch: pathlib.Path,
    rows: Any,
    leaves: manifest.Leaves | None,
    state: Any,
  ) -> None:
    """Waits for Orbax, completes the checkpoint and deletes old ones.

    Args:
      step, validation, rows: see `save`.
      scratch: the folder being written by Orbax.
      leaves: dtype, shape and checksum of each array. None: computed here, from the state.
      state: the state; None with leaves.
    """
    if leaves is None:
      leaves = _describe_leaves(state)
    self._orbax.wait_until_finished()
    if not hosts.is_primary():
      return
    if rows is not None:
      files.write(scratch / manifest.ROWS, json.dumps(rows) + '\n')
    self._finish(step, validation, scratch, leaves, reader.folder_of(self._workdir, step))
    steps = reader.steps(self._workdir)
    for old_step in {*steps} - {*steps[-self._keep :], reader.best_step(self._workdir)}:
      self._delete(old_step)

  def _finish(
    self,
    step: int,
    validation: float | None,
    scratch: pathlib.Path,
    leaves: manifest.Leaves,
    folder: pathlib.Path,
  ) -> None:
    """Checks the files of Orbax, writes their manifest, and renames the folder.

    Args:
      step, validation: see `save`.
      scratch: the folder written by Orbax.
      leaves: dtype, shape and checksum of each array.
      folder: the folder of the complete checkpoint.
    """
    try:
      arrays.check_written(self._orbax, scratch, leaves)
    except manifest.CorruptError as error:
      name = f'step {step}'
      if folder.name == frozen.FOLDER:
        name = frozen.FOLDER
      raise RuntimeError(f'{name} was not saved: {error}') from error
    saved_at = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    digests = manifest.digest_files(scratch)
    base = ''
    if self._frozen is not None:
      base = self._frozen.checksum
    manifest.write(scratch, manifest.Manifest(step, saved_at, validation, digests, leaves, base))
    if not storage.is_remote(scratch):
      scratch.rename(folder)

  def _delete(self, step: int) -> None:
    """Deletes a checkpoint; a kill leaves an incomplete one, not a corrupt one."""
    folder = reader.folder_of(self._workdir, step)
    if storage.is_remote(folder):
      (folder / manifest.FILE_NAME).unlink()
      folder.rmtree()
    else:
      files.remove(folder.rename(self._folder / f'{step}{SCRATCH}'))

  def _delete_incomplete(self) -> None:
    """Deletes incomplete checkpoints of killed runs."""
    files.make_folder(self._folder)
    for folder in self._folder.glob(f'*{SCRATCH}*'):
      files.remove(folder)
    if storage.is_remote(self._folder):
      complete = reader.steps(self._workdir)
      for folder in self._folder.glob('*'):
        if reader.STEP_NAME.fullmatch(folder.name) and int(folder.name) not in complete:
          folder.rmtree()

  def _wait(self) -> None:
    """Waits for the checkpoint in progress."""
    commit_future = self._commit_future
    self._commit_future = None
    if commit_future is not None:
      with self._translate_disk_full(f'step {self._step}'):
        commit_future.result()

  def _translate_disk_full(self, name: str) -> contextlib.AbstractContextManager[None]:
    return file_errors.translate_disk_full(lambda: self._disk_full_message(name))

  def _disk_full_message(self, name: str) -> str:
    free = files.free_bytes(self._folder)
    return (
      f'--workdir={self._workdir}: the disk is full: no room for {name}, {free / 1e6:,.1f} MB '
      f'left. Last checkpoint: {self.last_saved()}. '
      f'Free some space, then rerun the same command to resume'
    )

  def __enter__(self) -> 'CheckpointWriter':
    return self

  def __exit__(self, kind, *exception) -> None:
    """Waits until everything is on disk; in all processes, unless one of them failed."""
    is_regular = kind in (None, errors.Interrupted)  # in both cases everything has to be saved
    sharing = contextlib.nullcontext()
    if is_regular:
      sharing = hosts.collective_errors()
    try:
      with sharing:
        self._wait()
    except Exception as error:
      if is_regular:
        raise
      logging.error('%s', error)  # the exception in flight is more important
    finally:
      self._thread.shutdown()
      self._orbax.close()


def _copy_on_devices(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
  """Returns a copy of an array; an array in host memory is not copied."""
  if host_arrays.is_on_host(leaf):
    return leaf
  return jnp.copy(leaf)


def _describe_leaves(state: Any) -> manifest.Leaves:
  """Returns dtype, shape and checksum of each array by name."""
  sums = checksums.checksums(state)
  leaves = checksums.named_leaves(state)
  return {name: (str(x.dtype), list(x.shape), sums[name]) for name, x in leaves.items()}
