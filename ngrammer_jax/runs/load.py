"""Opens a run, a model of the package or a published model."""

import pathlib

from ngrammer_jax import pretrained_models
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.interop.huggingface import checkpoint
from ngrammer_jax.runs import huggingface, run
from ngrammer_jax.system import storage


def load_run(workdir: str | pathlib.Path, step: int | str = 'newest') -> run.Run:
  """Opens a run directory. The checkpoint is looked for and loaded on first use.

  Args:
    workdir: the run directory, or a published model (see `runs.huggingface`).
    step: checkpoint: a step number, `newest`, or `best` on the validation split.

  Raises:
    BadInput: it is not a run directory.
  """
  workdir = storage.path(workdir)
  if checkpoint.is_published(workdir):
    return huggingface.open_run(workdir, step)
  return run.Run(workdir, workdirs.load_config(workdir), step)


def load_pretrained(name: str | pathlib.Path, dtype: str | None = None) -> run.Run:
  """Opens a model by its name, or a published model.

  Args:
    name: its name, see `pretrained_models`; or the folder or GGUF file of a published model.
    dtype: dtype of the parameters of a published model; None: those of the file.

  Raises:
    BadInput: there is no model of this name, or a file of it is damaged.
  """
  path = storage.path(name)
  if str(name) in pretrained_models.all_names() or not path.exists():
    path = pretrained_models.find(str(name))
    if path.is_dir():
      return load_run(path)
  return huggingface.open_run(path, dtype=dtype)
