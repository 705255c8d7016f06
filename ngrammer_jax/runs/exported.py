"""A trained run as a folder: its config and vocabulary, and its variables as safetensors.

<folder>/model.safetensors   step, parameters and codebook; names are joined by '/'

The parameters may be in 16 bits, which halves the file; they are float32 again when restored. The
codebook, of which ids of clusters are computed, keeps its dtype.

It has no optimizer state: it can be scored, sampled and analysed by `load_run`, but not resumed.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, sharding
from ngrammer_jax.checkpoints import checksums, reader, workdirs
from ngrammer_jax.interop import safetensors
from ngrammer_jax.system import files, storage
from ngrammer_jax.training import state as train_state


def check_folder(folder: pathlib.Path) -> None:
  """Raises BadInput if the folder of an export is remote, not empty or cannot be written to."""
  if storage.is_remote(folder):
    raise errors.BadInput(f'--output={folder} is remote: export to a local folder, and copy it')
  files.check_writable(f'--output={folder}', folder)
  if folder.exists() and any(folder.iterdir()):
    raise errors.BadInput(f'--output={folder} is not an empty folder; use another one')


def save(state: train_state.TrainState, folder: pathlib.Path, dtype: str | None = None) -> None:
  """Writes the variables to the folder, the parameters in a dtype; None: in their own."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype or leaf.dtype), state.params)
  others = jax.tree.map(np.asarray, {'step': state.step, 'codebook': state.codebook})
  safetensors.save({'params': params, **others}, folder / workdirs.EXPORTED)


def restore(
  folder: pathlib.Path, step: int | str, abstract: train_state.TrainState
) -> train_state.TrainState:
  """Returns the state of an exported run, without optimizer state and memory.

  Args:
    folder: an exported run.
    step: `newest`, `best`, or the number of the step that was exported.
    abstract: shapes, dtypes and shardings of the state.

  Raises:
    BadInput: the file is damaged or of another model, or it has another step.
  """
  loaded = checksums.named_leaves(safetensors.load(folder / workdirs.EXPORTED))
  selected = {'step': abstract.step, 'params': abstract.params, 'codebook': abstract.codebook}
  expected = checksums.named_leaves(selected)
  for name in loaded.keys() & expected.keys():
    leaf, original = loaded[name], expected[name].dtype
    if all(jnp.issubdtype(dtype, jnp.floating) for dtype in (leaf.dtype, original)):
      loaded[name] = leaf.astype(original)  # it was exported in another dtype
  leaves = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in loaded.items()}
  reader.check_same_leaves(folder / workdirs.EXPORTED, leaves, selected)
  if step not in ('newest', 'best', int(loaded['step'])):
    raise errors.BadInput(f'--step={step}: {folder} has only step {int(loaded["step"])}')
  put = lambda name, leaf: jax.device_put(loaded[name], sharding.placement(leaf))
  state = jax.tree.unflatten(jax.tree.structure(selected), map(put, expected, expected.values()))
  return abstract.replace(**state, opt_state={}, memory={})
