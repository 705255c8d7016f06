"""A trained run as a folder: its config and vocabulary, and its variables as safetensors.

<folder>/model.safetensors   step, parameters and codebook; names are joined by '/'

It has no optimizer state: it can be scored, sampled and analysed by `load_run`, but not resumed.
"""

import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from ngrammer_jax import errors, files
from ngrammer_jax.interop import safetensors
from ngrammer_jax.training import checksums
from ngrammer_jax.training import state as train_state

VARIABLES = 'model.safetensors'


def exists(folder: pathlib.Path) -> bool:
  """Whether a folder is an exported run."""
  return (folder / VARIABLES).exists() and not (folder / 'checkpoints').exists()


def save(workdir: pathlib.Path, state: train_state.TrainState, folder: pathlib.Path) -> None:
  """Exports a run. Raises BadInput if the folder is not empty."""
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise errors.BadInput(f'--output={folder} is not an empty folder; use another one')
  files.make_folder(folder)
  for path in (workdir / 'config.json', workdir / 'corpus.json', *workdir.glob('vocabulary.*')):
    shutil.copyfile(path, folder / path.name)
  variables = {'step': state.step, 'params': state.params, 'codebook': state.codebook}
  safetensors.save(jax.tree.map(np.asarray, variables), folder / VARIABLES)


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
  loaded = checksums.named_leaves(safetensors.load(folder / VARIABLES))
  selected = {'step': abstract.step, 'params': abstract.params, 'codebook': abstract.codebook}
  expected = checksums.named_leaves(selected)
  for name in sorted(loaded.keys() | expected.keys()):
    shapes = [_describe(leaves.get(name)) for leaves in (loaded, expected)]
    if shapes[0] != shapes[1]:
      raise errors.BadInput(
        f'{folder / VARIABLES} is not of the model in config.json: {name} is {shapes[0]}, expected '
        f'{shapes[1]}; export the run again'
      )
  if step not in ('newest', 'best', int(loaded['step'])):
    raise errors.BadInput(f'--step={step}: {folder} has only step {int(loaded["step"])}')
  names = {name: jax.device_put(loaded[name], leaf.sharding) for name, leaf in expected.items()}
  leaves = [names[name] for name in expected]
  state = jax.tree.unflatten(jax.tree.structure(selected), leaves)
  return abstract.replace(**state, opt_state={}, memory={})


def _describe(leaf: Any) -> str:
  return 'missing' if leaf is None else f'{leaf.dtype}{list(leaf.shape)}'
