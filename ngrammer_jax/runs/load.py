"""Opens a run, a model of the package or a published model."""

import pathlib

from ngrammer_jax import errors
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.runs import published_run
from ngrammer_jax.runs import source as sources
from ngrammer_jax.runs.run import Run
from ngrammer_jax.runs.source import ModelSource
from ngrammer_jax.system import storage


def load_run(workdir: str | pathlib.Path, step: int | str = 'newest') -> Run:
  """Opens a run directory. The checkpoint is looked for and loaded on first use.

  Args:
    workdir: the run directory, an exported run, or a published model (see `runs.source`).
    step: checkpoint: a step number, `newest`, or `best` on the validation split.

  Raises:
    BadInput: it is not a run directory.
  """
  return open_source(sources.identify(workdir), step)


def load_pretrained(name: str | pathlib.Path, dtype: str | None = None) -> Run:
  """Opens a model by its name, or a published model.

  Args:
    name: its name, see `ngrammer_jax.pretrained`; or the folder or GGUF file of a published model.
    dtype: dtype of the parameters of a published model; None: those of the file.

  Raises:
    BadInput: there is no model of this name, or a file of it is damaged.
  """
  return open_source(sources.resolve_pretrained(str(name)), dtype=dtype)


def open_source(source: ModelSource, step: int | str = 'newest', dtype: str | None = None) -> Run:
  """Opens a source.

  Args:
    source: what `runs.source` found.
    step: see `load_run`.
    dtype: dtype of the parameters of a published model; None: those of the file.

  Raises:
    BadInput: it is not what it seems, or a file of it is damaged.
  """
  if source.is_published:
    return published_run.open_run(source.path, step, dtype)
  return Run(source.path, workdirs.load_config(source.path), step)


def open_named(text: str, step: int | str = 'newest', key: str = 'init_from') -> Run:
  """Opens the run that the value of a key or flag names, see `runs.source`.

  Args:
    text: the value.
    step: checkpoint of a run; of a pretrained model it is the newest.
    key: name of the key or flag, for messages.

  Raises:
    BadInput: there is no such run.
  """
  is_pretrained = text.startswith(sources.PRETRAINED)
  path = text.removeprefix(sources.PUBLISHED)
  if not is_pretrained:
    storage.check_reachable(storage.path(path))  # also if it is too long for a path
  if not (is_pretrained or storage.is_remote(path) or storage.path(path).exists()):
    raise errors.BadInput(f'{key}={text}: no such folder; expected the workdir of a run')
  with errors.named(f'{key}={text}'):
    return open_source(sources.resolve(text), 'newest' if is_pretrained else step)
