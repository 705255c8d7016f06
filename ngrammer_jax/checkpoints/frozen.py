"""The frozen parameters of a run, written once and omitted from checkpoints.

<workdir>/base    Orbax files and manifest.json, as in a checkpoint
"""

from collections.abc import Callable
import contextlib
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from ngrammer_jax.checkpoints import arrays, manifest
from ngrammer_jax.system import hosts

FOLDER = 'base'


def read_manifest(workdir: pathlib.Path) -> manifest.Manifest | None:
  """Returns the manifest of the base of a run, for all processes; None without a base.

  Raises:
    BadInput: it is damaged.
  """
  has_manifest = (workdir / FOLDER / manifest.FILE_NAME).exists()
  if not hosts.broadcast(has_manifest):  # other processes may see the file late
    return None
  with _refuse_corrupt(workdir):
    return manifest.call_on_primary(manifest.read, workdir / FOLDER)


def dtypes(workdir: pathlib.Path) -> dict[str, np.dtype]:
  """Returns the dtype of every parameter in the base of a run, by name; see `read_manifest`."""
  base = read_manifest(workdir)
  if base is None:
    return {}
  return {name: jnp.dtype(dtype) for name, (dtype, _, _) in base.leaves.items()}


def restore(
  workdir: pathlib.Path,
  expected: str,
  abstract: Any,
  read_folder: Callable[[pathlib.Path], manifest.Manifest],
) -> Any:
  """Restores and verifies the base.

  Args:
    workdir: run directory.
    expected: checksum of the base, in the manifest of a checkpoint.
    abstract: shapes, dtypes and shardings of its parameters.
    read_folder: `manifest.verify`, or `manifest.verify_index`.

  Raises:
    BadInput: it changed.
  """
  with _refuse_corrupt(workdir):
    saved = manifest.call_on_primary(read_folder, workdir / FOLDER)
    if saved.checksum != expected:
      raise manifest.CorruptError('its arrays are not those of the checkpoint')
    return arrays.restore(workdir / FOLDER, saved, abstract)


def _refuse_corrupt(workdir: pathlib.Path) -> contextlib.AbstractContextManager[None]:
  """Raises BadInput for a damaged base: without it, no checkpoint can be used."""
  return manifest.refuse_corrupt(
    f'{workdir / FOLDER}, with the frozen parameters, is damaged or belongs to another run',
    'copy it from a backup, or start again with another --workdir',
  )
