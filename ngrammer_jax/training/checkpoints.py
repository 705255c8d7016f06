"""Checkpoints of the train state: written in the background, believed only when proven.

<workdir>/checkpoints/300          whole, with its manifest; it got this name last
<workdir>/checkpoints/400.scratch* being written, or left behind by a run that was killed
<workdir>/checkpoints/200.damaged  was found not to be what was written

In an object store, where folders cannot be renamed at once, there is no scratch: a folder with its
manifest, which is put last and dropped first, is a checkpoint, and one without is none.
"""

from collections.abc import Iterable
from concurrent import futures
import contextlib
import dataclasses
import datetime
import logging
import math
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ngrammer_jax import errors, files, hosts
from ngrammer_jax.training import checksums, manifest

SCRATCH = '.scratch'


def steps(workdir: pathlib.Path) -> list[int]:
  """Steps of all checkpoints, oldest first; whether they are good is not known yet."""
  folder = workdir / 'checkpoints'
  if files.stored(folder):
    found = [path.parent for path in folder.glob(f'*/{manifest.NAME}')]
  else:
    found = folder.iterdir() if folder.is_dir() else []
  return sorted(int(path.name) for path in found if path.name.isdecimal())


def _orbax(folder: pathlib.Path) -> ocp.StandardCheckpointer:
  """What writes and reads arrays, in a store without renaming the folder."""
  if not files.stored(folder):
    return ocp.StandardCheckpointer()
  return ocp.StandardCheckpointer(temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath)


def restore(workdir: pathlib.Path, step: int, abstract: Any) -> Any:
  """The state of a step, on the shardings of the abstract state, every bit of it checked.

  The abstract state may be a function of the manifest.

  Raises:
    Damaged: it is not what was written.
    BadInput: it is of another model.
  """
  folder = workdir / 'checkpoints' / str(step)
  known = _verified(folder)
  if known.step != step:
    raise manifest.Damaged(f'{manifest.NAME} is of step {known.step:,}')
  abstract = abstract(known) if callable(abstract) else abstract
  as_saved = _as_saved(known, abstract)
  _check_same_model(folder, known, as_saved)
  with _orbax(folder) as checkpointer:
    state = checkpointer.restore(files.absolute(folder), _not_empty(as_saved))
  _check_sums(known, state)

  def made(leaf, saved):
    if saved is None:  # without elements
      return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    return saved if saved.dtype == leaf.dtype else saved.astype(leaf.dtype)

  return jax.tree.map(made, abstract, state, is_leaf=lambda x: x is None)


def _verified(folder: pathlib.Path) -> manifest.Manifest:
  """The manifest, after every file was read, by the first of the processes for all."""
  found = damage = None
  if hosts.first():
    try:
      found = dataclasses.asdict(manifest.verify(folder))
    except manifest.Damaged as error:
      damage = str(error)
  found, damage = hosts.agreed([found, damage])
  if damage is not None:
    raise manifest.Damaged(damage)
  return manifest.Manifest(**found)


def _as_saved(known: manifest.Manifest, abstract: Any) -> Any:
  """The state with its memory as it was saved: activations, another dtype on other devices."""
  activations = ('bfloat16', 'float32')

  def of(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    saved, *_ = known.leaves.get(f'memory/{name}', ('',))
    if saved not in activations or str(leaf.dtype) not in activations:
      return leaf
    return jax.ShapeDtypeStruct(leaf.shape, saved, sharding=leaf.sharding)

  memory = getattr(abstract, 'memory', None)
  if memory is None:
    return abstract
  return abstract.replace(memory=jax.tree_util.tree_map_with_path(of, memory))


def _not_empty(state: Any) -> Any:
  """The state with None for arrays without elements, which Orbax does not save."""
  return jax.tree.map(lambda leaf: leaf if math.prod(leaf.shape) else None, state)


def restore_newest(
  workdir: pathlib.Path, abstract: Any, set_aside: bool = False
) -> tuple[int, Any] | None:
  """Step and state of the newest good checkpoint, None where there never was one.

  Args:
    workdir: of the run.
    abstract: shapes, dtypes and shardings to restore into, or what makes them of the manifest.
    set_aside: rename newer ones that are damaged, to make room for their steps to come again.

  Raises:
    BadInput: all are damaged, or they are of another model.
  """
  damaged: dict[pathlib.Path, str] = {}
  folder_of = lambda step: workdir / 'checkpoints' / str(step)
  # Listed again each time: a run that is still training drops old ones.
  while left := [s for s in hosts.agreed(steps(workdir)) if folder_of(s) not in damaged]:
    step, folder = left[-1], folder_of(left[-1])
    logging.info('restoring step %s from %s', f'{step:,}', folder)
    try:
      state = restore(workdir, step, abstract)
    except errors.BadInput:
      raise
    except Exception as error:
      if not folder.exists():
        continue
      if not isinstance(error, manifest.Damaged):
        raise
      logging.warning('checkpoint %s is damaged: %s; trying the one before', folder, error)
      damaged[folder] = str(error)
      continue
    if set_aside:
      hosts.by_first(_set_all_aside, damaged)
    return step, state
  if damaged:
    raise errors.BadInput(
      f'--workdir={workdir} has no good checkpoint '
      f'({"; ".join(f"step {folder.name}: {why}" for folder, why in damaged.items())}): '
      f'bring back a copy of its checkpoints, or start again with another --workdir'
    )
  return None


def verify(workdir: pathlib.Path, step: int) -> manifest.Manifest:
  """Reads all of a checkpoint, without knowing its model. Raises Damaged."""
  folder = workdir / 'checkpoints' / str(step)
  known = manifest.verify(folder)
  with _orbax(folder) as checkpointer:
    saved = checkpointer.metadata(files.absolute(folder)).item_metadata.tree
    # Like an array of NumPy, it comes as one: the devices that wrote it may be gone.
    like = lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    abstract = jax.tree.map(like, saved)
    with jax.enable_x64(True):
      _check_sums(known, checkpointer.restore(files.absolute(folder), abstract))
  return known


class Checkpoints:
  """Writes the checkpoints of a run: the last `keep` stay, and the best of the validated.

  A context manager; leaving it waits until everything is on disk.
  """

  def __init__(self, workdir: pathlib.Path, keep: int = 3):
    self._workdir, self._keep = workdir, keep
    self._folder = workdir / 'checkpoints'
    hosts.by_first(self._tidy)
    self._orbax = _orbax(self._folder)
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    self._commit: futures.Future | None = None
    self._saving = 0

  def _tidy(self) -> None:
    files.make(self._folder)
    for left_over in self._folder.glob(f'*{SCRATCH}*'):
      shutil.rmtree(left_over)
    if files.stored(self._folder):
      whole = steps(self._workdir)
      for folder in self._folder.glob('*'):
        if folder.name.isdecimal() and int(folder.name) not in whole:
          folder.rmtree()

  def check_space(self, state: Any, what: str = 'a checkpoint') -> None:
    """Raises BadInput where the disk has no room for a state, abstract or not."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    needed = size + 1_000_000  # what is written beside the arrays
    if files.free(self._folder) < needed:
      raise errors.BadInput(self._full(f'{what} of {needed / 1e6:,.1f} MB'))

  def save(
    self,
    step: int,
    state: Any,
    validation: float | None = None,
    windows: Any = None,
    changes: int = 0,
  ) -> None:
    """Starts writing a checkpoint and returns; the state may be donated afterwards.

    Args:
      step: of the state.
      state: the train state.
      validation: nats per token on the validation split, where it was measured.
      windows, changes: see `manifest.Manifest`.

    Raises:
      BadInput: the disk is full, now or when the checkpoint before was written.
    """
    with hosts.together():
      self._wait()
      self.check_space(state, f'step {step}')  # a library that runs out of disk makes a mess
    if jax.default_backend() == 'cpu':
      # On CPU the "copy to the host" is the device buffer itself, which a donated call
      # would overwrite while it is being written.
      state = jax.tree.map(jnp.copy, state)
    if jax.default_backend() == 'cpu' and not hosts.several():
      sums = lambda: checksums.checksums(state)
    else:  # on the devices, where all processes have to take turns alike
      known = checksums.checksums(state)
      sums = lambda: known
    scratch = self._folder / (str(step) if files.stored(self._folder) else f'{step}{SCRATCH}')
    with files.full_disk(lambda: self._full(f'step {step}')):
      self._orbax.save(files.absolute(scratch), _not_empty(state))
    types = {name: (str(x.dtype), list(x.shape)) for name, x in checksums.leaves(state).items()}
    rest = {'validation': validation, 'windows': windows, 'changes': changes}
    self._commit = self._thread.submit(self._finish, step, scratch, types, sums, rest)
    self._saving = step

  def validated(self, step: int, validation: float) -> None:
    """Adds what was measured only after the checkpoint was written."""
    if not hosts.first():
      return
    folder = self._folder / str(step)
    known = manifest.read(folder)
    if known.validation != validation:
      with files.full_disk(lambda: self._full(f'the manifest of step {step}')):
        manifest.write(folder, dataclasses.replace(known, validation=validation))

  def _finish(self, step, scratch, types, sums, rest) -> None:
    """Once Orbax is through: adds the manifest, gives the folder its name, drops old ones."""
    sums = sums()
    self._orbax.wait_until_finished()
    if not hosts.first():
      return
    proof = manifest.Manifest(
      step=step,
      saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      files=manifest.describe(scratch),
      leaves={name: (*types[name], sums[name]) for name in types},
      **rest,
    )
    manifest.write(scratch, proof)
    if not files.stored(scratch):
      scratch.rename(self._folder / str(step))
    for old in set(steps(self._workdir)) - self._kept():
      # Half a folder must never look like a checkpoint.
      folder = self._folder / str(old)
      if files.stored(folder):
        (folder / manifest.NAME).unlink()
        folder.rmtree()
      else:
        shutil.rmtree(folder.rename(self._folder / f'{old}{SCRATCH}'))

  def _kept(self) -> set[int]:
    """The steps to keep."""
    every = steps(self._workdir)
    best = best_step(self._workdir)
    return {*every[-self._keep :], *(() if best is None else (best,))}

  def _wait(self) -> None:
    """Waits for the checkpoint that is being written."""
    commit, self._commit = self._commit, None
    if commit is not None:
      with files.full_disk(lambda: self._full(f'step {self._saving}')):
        commit.result()

  def _full(self, what: str) -> str:
    free, there = files.free(self._folder), steps(self._workdir)
    return (
      f'--workdir={self._workdir}: the disk is full: no room for {what}, {free / 1e6:,.1f} MB '
      f'left. Last checkpoint: {f"step {there[-1]}" if there else "none yet"}. '
      f'Free some space, then the same command goes on from there'
    )

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind, *exception) -> None:
    """Waits until everything is on disk, of all processes where nothing went wrong."""
    try:
      with hosts.together() if kind in (None, errors.Interrupted) else contextlib.nullcontext():
        self._wait()
    except Exception as error:
      if kind in (None, errors.Interrupted):  # which says that everything is saved
        raise
      logging.error('%s', error)  # what is on its way up says more
    finally:
      self._thread.shutdown()
      self._orbax.close()


def best_step(workdir: pathlib.Path) -> int | None:
  """The step with the lowest validation loss of those that are kept, None where none has one."""
  losses = {}
  for step in steps(workdir):
    with contextlib.suppress(manifest.Damaged):
      loss = manifest.read(workdir / 'checkpoints' / str(step)).validation
      if loss is not None and math.isfinite(loss):
        losses[step] = loss
  return min(losses, key=losses.get, default=None)


def _check_same_model(folder: pathlib.Path, known: manifest.Manifest, abstract: Any) -> None:
  expected = {
    name: (str(leaf.dtype), list(leaf.shape)) for name, leaf in checksums.leaves(abstract).items()
  }
  found = {name: (dtype, shape) for name, (dtype, shape, _) in known.leaves.items()}
  for name in sorted(expected.keys() | found.keys()):
    if expected.get(name) != found.get(name):
      say = lambda leaf: 'nothing' if leaf is None else f'{leaf[0]}{leaf[1]}'
      raise errors.BadInput(
        f'{folder} is of another model: {name} is {say(found.get(name))}, '
        f'expected {say(expected.get(name))}'
      )


def _check_sums(known: manifest.Manifest, state: Any) -> None:
  """Raises Damaged where an array is not, bit by bit, what was in memory when it was saved."""
  for name, checksum in checksums.checksums(state).items():
    if checksum != known.leaves[name][2]:
      raise manifest.Damaged(f'{name} was changed: wrong checksum')


def _set_all_aside(folders: Iterable[pathlib.Path]) -> None:
  for folder in folders:
    logging.warning('%s is kept as %s', folder, _set_aside(folder).name)


def _set_aside(folder: pathlib.Path) -> pathlib.Path:
  """Renames a damaged checkpoint; an earlier one of the same step stays too."""
  place, copies = folder.with_name(f'{folder.name}.damaged'), 1
  while place.exists():
    copies += 1
    place = folder.with_name(f'{folder.name}.damaged-{copies}')
  files.move(folder, place)
  return place
