"""Lists, verifies and restores the checkpoints of a run; `checkpoints.writer` writes them.

<workdir>/checkpoints/300           a complete checkpoint: Orbax files and manifest.json; of
                                    streamed corpora rows.json too
<workdir>/checkpoints/400.scratch*  an incomplete one: being written, or left by a killed run
<workdir>/checkpoints/200.damaged   a corrupt one, set aside
<workdir>/base                      the frozen parameters, see `checkpoints.frozen`

Remote folders cannot be renamed atomically. There, a checkpoint is complete if it has a manifest.
The manifest is written last and deleted first.
"""

from collections.abc import Callable
import contextlib
import json
import logging
import math
import pathlib
import re
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.checkpoints import arrays, checksums, frozen, manifest
from ngrammer_jax.models import parameter_groups
from ngrammer_jax.models.model_variables import ModelVariables
from ngrammer_jax.system import hosts, storage

STEP_NAME = re.compile(r'0|[1-9][0-9]{0,17}')  # of a checkpoint folder


def folder_of(workdir: pathlib.Path, step: int) -> pathlib.Path:
  """Returns the folder of the checkpoint of a step."""
  return workdir / 'checkpoints' / str(step)


def steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of all complete checkpoints in order; some may be corrupt."""
  folder = workdir / 'checkpoints'
  if storage.is_remote(folder):
    paths = [path.parent for path in folder.glob(f'*/{manifest.FILE_NAME}')]
  elif folder.is_dir():
    paths = folder.iterdir()
  else:
    paths = []
  return sorted(int(path.name) for path in paths if STEP_NAME.fullmatch(path.name))


def best_step(workdir: pathlib.Path) -> int | None:
  """Returns the step with the lowest validation loss; None without a validation loss."""
  losses = {}
  for step in steps(workdir):
    with contextlib.suppress(manifest.CorruptError):
      loss = manifest.read(folder_of(workdir, step)).validation
      if loss is not None and math.isfinite(loss):
        losses[step] = loss
  return min(losses, key=losses.get, default=None)


def verify(workdir: pathlib.Path, step: int) -> manifest.Manifest:
  """Verifies every file and array of a checkpoint of any model. Raises CorruptError."""
  folder = folder_of(workdir, step)
  saved = manifest.verify(folder)
  if saved.base and manifest.verify(workdir / frozen.FOLDER).checksum != saved.base:
    raise manifest.CorruptError(f'{frozen.FOLDER} is not the one of this checkpoint')
  arrays.verify(folder, saved)
  return saved


def restore(workdir: pathlib.Path, step: int, abstract: Any) -> Any:
  """Restores a checkpoint after verifying all its files.

  Args:
    workdir: run directory.
    step: step of the checkpoint.
    abstract: shapes, dtypes and shardings of the state.

  Raises:
    CorruptError: the checkpoint differs from the saved one.
    BadInput: the checkpoint does not match the model.
  """
  folder = folder_of(workdir, step)
  saved = manifest.call_on_primary(manifest.verify, folder)
  if not saved.base:
    return arrays.restore(folder, saved, abstract)
  names = _names_in_base(saved, abstract.params)
  base_params = parameter_groups.select(abstract.params, names)
  base = frozen.restore(workdir, saved.base, base_params, manifest.verify)
  own = abstract.replace(params=parameter_groups.without(abstract.params, names))
  state = arrays.restore(folder, saved, own)
  return state.replace(params=parameter_groups.merge(state.params, base))


def restore_variables(workdir: pathlib.Path, step: int, abstract: dict[str, Any]) -> ModelVariables:
  """Restores and verifies parameters and codebook.

  Otherwise reads only small files of the checkpoint (see `manifest.verify_index`).

  Args:
    workdir: run directory.
    step: step of the checkpoint.
    abstract: shapes, dtypes and shardings of `params` and `codebook`.

  Raises:
    CorruptError: the arrays or a small file differ from the saved ones, or a file has another size.
    BadInput: they do not match the model.
  """
  read_manifest = manifest.verify_index
  if hosts.is_multiprocess():  # they read different bytes, and all of them have to notice damage
    read_manifest = manifest.verify
  folder = folder_of(workdir, step)
  if storage.is_remote(folder):  # a download may take minutes
    logging.info('downloading the parameters of %s', folder)
  saved = manifest.call_on_primary(read_manifest, folder)
  names = _names_in_base(saved, abstract['params'])
  own = abstract | {'params': parameter_groups.without(abstract['params'], names)}
  own = arrays.with_saved_precision(own, saved)
  base = {}
  if saved.base:
    base_params = parameter_groups.select(abstract['params'], names)
    base = frozen.restore(workdir, saved.base, base_params, read_manifest)
  variables = arrays.restore_sections(folder, saved, own)
  params = parameter_groups.merge(variables['params'], base)
  return ModelVariables(saved.step, params, variables['codebook'])


def _names_in_base(saved: manifest.Manifest, params: Any) -> set[str]:
  """Returns the names of the parameters in the base of a run instead of the checkpoint."""
  if not saved.base:
    return set()
  own = {name.removeprefix('params/') for name in saved.leaves}
  return set(checksums.named_leaves(params)) - own


def read_rows(workdir: pathlib.Path, step: int) -> Any:
  """Returns the row states of a verified checkpoint, for all processes, or None."""
  path = folder_of(workdir, step) / manifest.ROWS
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
    set_aside: whether to rename newer corrupt checkpoints, to allow saving their steps again.

  Returns:
    The step and the state; None if there is no checkpoint.

  Raises:
    BadInput: all checkpoints are corrupt, or they do not match the model.
  """
  return _restore_newest(workdir, lambda step: restore(workdir, step, abstract), set_aside)


def restore_newest_variables(
  workdir: pathlib.Path, abstract: dict[str, Any]
) -> ModelVariables | None:
  """Restores parameters and codebook of the newest checkpoint where both are intact.

  Args, raises: see `restore_variables`, `restore_newest`.
  """
  newest = _restore_newest(workdir, lambda step: restore_variables(workdir, step, abstract))
  if newest is None:
    return None
  _, variables = newest
  return variables


def _restore_newest(
  workdir: pathlib.Path, restore_step: Callable[[int], Any], set_aside: bool = False
) -> tuple[int, Any] | None:
  """Returns the newest step that can be restored, and the result of the function for it."""
  corrupt: dict[int, str] = {}
  # The list is read again each time, because a training run deletes old checkpoints.
  while candidates := [step for step in hosts.broadcast(steps(workdir)) if step not in corrupt]:
    step = candidates[-1]
    folder = folder_of(workdir, step)
    logging.info('restoring step %s from %s', f'{step:,}', folder)
    try:
      restored = restore_step(step)
    except errors.BadInput:
      raise
    except Exception as error:
      if not folder.exists():
        continue
      if not isinstance(error, manifest.CorruptError):
        raise
      fallback = '; falling back to the previous' if len(candidates) > 1 else ''
      logging.warning('checkpoint %s is corrupt: %s%s', folder, error, fallback)
      corrupt[step] = str(error)
      continue
    if set_aside:
      hosts.on_primary(_set_aside, [folder_of(workdir, step) for step in corrupt])
    return step, restored
  if corrupt:
    reasons = '; '.join(f'step {step}: {reason}' for step, reason in corrupt.items())
    raise errors.BadInput(
      f'--workdir={workdir} has no intact checkpoint ({reasons}): copy its checkpoints from a '
      f'backup, or start again with another --workdir'
    )
  return None


def _set_aside(folders: list[pathlib.Path]) -> None:
  """Renames corrupt checkpoints; earlier renamed ones of the same step are kept."""
  for folder in folders:
    target = folder.with_name(f'{folder.name}.damaged')
    copies = 1
    while target.exists():
      copies += 1
      target = folder.with_name(f'{folder.name}.damaged-{copies}')
    folder.rename(target)  # of a remote folder, copies its files and then deletes them
    logging.warning('%s was renamed to %s', folder, target.name)
