"""A trained run as a folder: its config and vocabulary, and its variables as safetensors.

<folder>/model.safetensors   step, parameters and codebook; names are joined by '/'

The parameters may be stored in 16 bits to halve the file; they are restored as float32. The
codebook keeps its dtype, because cluster ids depend on it.

It has no optimizer state: `load_run` can score, sample and analyse it, but not resume it.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, host_arrays
from ngrammer_jax.checkpoints import arrays, checksums, workdirs
from ngrammer_jax.interop import safetensors
from ngrammer_jax.models import precision
from ngrammer_jax.models.model_variables import ModelVariables
from ngrammer_jax.runs import huggingface_export
from ngrammer_jax.runs.opened_run import OpenedRun
from ngrammer_jax.system import file_errors, files, result_files, storage


def export(run: OpenedRun, folder: str | pathlib.Path, dtype: Any, format: str) -> None:
  """Writes a run to a new or empty folder; see `Run.export`."""
  folder = storage.path(folder)
  check_folder(folder)
  dtype = precision.stored_dtype(dtype)
  message = f'--output={folder}: the disk is full: delete what is there, and use another folder'
  with file_errors.translate_disk_full(lambda: message):
    if format == 'huggingface':
      huggingface_export.save(run, folder, dtype)
      return
    vocabulary = run.vocabulary
    content_hash = run.content_hash
    origin = run.origin
    variables = run.restored
    result_files.make_output_folder(folder)  # once it is known that all can be read
    workdirs.write(folder, run.config, vocabulary, content_hash)
    workdirs.write_origin(folder, origin)
    save(variables, folder, dtype)


def check_folder(folder: pathlib.Path) -> None:
  """Raises BadInput if the folder of an export is remote, not empty or cannot be written to."""
  if storage.is_remote(folder):
    raise errors.BadInput(
      f'--output={folder} must be local: export to a local folder, then copy it'
    )
  files.check_writable(f'--output={folder}', folder)
  if folder.exists() and any(folder.iterdir()):
    raise errors.BadInput(f'--output={folder} is not an empty folder; use another one')


def save(variables: ModelVariables, folder: pathlib.Path, dtype: str | None = None) -> None:
  """Writes the variables to the folder, with the parameters in a dtype; None: unchanged."""

  def as_stored(leaf: jax.Array) -> np.ndarray:
    return np.asarray(leaf).astype(dtype or leaf.dtype)

  content = {
    'params': jax.tree.map(as_stored, variables.params),
    'step': np.asarray(variables.step, np.int32),
    'codebook': jax.tree.map(np.asarray, variables.codebook),
  }
  safetensors.save(content, folder / workdirs.EXPORTED)


def restore(folder: pathlib.Path, step: int | str, abstract: dict[str, Any]) -> ModelVariables:
  """Returns the variables of an exported run.

  Args:
    folder: an exported run.
    step: `newest`, `best`, or the number of the exported step.
    abstract: shapes, dtypes and shardings of `params` and `codebook`.

  Raises:
    BadInput: the file is damaged or of another model, or it has another step.
  """
  loaded = checksums.named_leaves(safetensors.load(folder / workdirs.EXPORTED))
  expected = checksums.named_leaves(abstract)
  for name in loaded.keys() & expected.keys():
    leaf = loaded[name]
    dtype = expected[name].dtype
    if jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating):
      loaded[name] = leaf.astype(dtype)  # it may have been exported in another one
  leaves = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in loaded.items()}
  stored_step = {'step': jax.ShapeDtypeStruct((), jnp.int32)}
  arrays.check_same_leaves(folder / workdirs.EXPORTED, leaves, abstract | stored_step)
  if step not in ('newest', 'best', int(loaded['step'])):
    raise errors.BadInput(f'--step={step}: {folder} has only step {int(loaded["step"])}')
  placed = [host_arrays.place_like(loaded[name], leaf) for name, leaf in expected.items()]
  variables = jax.tree.unflatten(jax.tree.structure(abstract), placed)
  return ModelVariables(int(loaded['step']), variables['params'], variables['codebook'])
