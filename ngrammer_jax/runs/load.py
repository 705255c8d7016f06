"""Opens a run, a model of the package or a published model."""

import pathlib

from ngrammer_jax.runs import model_source
from ngrammer_jax.runs.run import Run


def load_run(workdir: str | pathlib.Path, step: int | str = 'newest') -> Run:
  """Opens a run directory. The checkpoint is looked for and loaded on first use.

  Args:
    workdir: the run directory, an exported run, or a published model (see `runs.model_source`).
    step: checkpoint: a step number, `newest`, or `best` on the validation split.

  Raises:
    BadInput: it is not a run directory.
  """
  return model_source.ModelSource.from_path(workdir).open(step)


def load_pretrained(
  name: str | pathlib.Path, dtype: str | None = None, adapter: str | pathlib.Path | None = None
) -> Run:
  """Opens a model by its name, or a published model.

  Args:
    name: its name, see `ngrammer_jax.pretrained`; or the folder or GGUF file of a published model.
    dtype: dtype of the parameters of a published model; None: those of the file.
    adapter: folder of a LoRA adapter that is merged into a published model.

  Raises:
    BadInput: there is no model of this name, a file is damaged, or the adapter is none of it.
  """
  source = model_source.resolve(f'{model_source.PRETRAINED}{name}')
  return source.open(dtype=dtype, adapter=adapter)
