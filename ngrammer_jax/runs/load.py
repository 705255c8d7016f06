"""Opens a run, a model of the package or a published model."""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

from ngrammer_jax.config import overriding
from ngrammer_jax.runs import model_source
from ngrammer_jax.runs.run import Run


def load_run(
  workdir: str | pathlib.Path,
  step: int | str = 'newest',
  overrides: Mapping[str, Any] | None = None,
) -> Run:
  """Opens a run directory. The checkpoint is looked for and loaded on first use.

  Args:
    workdir: the run directory, an exported run, or a published model (see `runs.model_source`).
    step: checkpoint: a step number, `newest`, or `best` on the validation split.
    overrides: values of keys of its config, such as `{'evaluation.segment_length': 256}`, as
      `--config.KEY=VALUE` on the command line. Keys that the parameters depend on cannot differ.

  Raises:
    BadInput: it is not a run directory, or the step, a key or a value is invalid.
  """
  run = model_source.ModelSource.from_path(workdir).open(model_source.read_step(step))
  return _with_overrides(run, overrides)


def load_pretrained(
  name: str | pathlib.Path,
  dtype: Any = None,
  adapter: str | pathlib.Path | None = None,
  overrides: Mapping[str, Any] | None = None,
) -> Run:
  """Opens a model by its name, or a published model.

  Args:
    name: its name, see `ngrammer_jax.pretrained`; or the folder or GGUF file of a published model.
    dtype: dtype of the parameters of a published model: float32, bfloat16, float16 or float64, by
      its name or as the dtype of NumPy or JAX. None: those of the file.
    adapter: folder of a LoRA adapter that is merged into a published model.
    overrides: see `load_run`.

  Raises:
    BadInput: there is no model of this name, a file is damaged, the adapter belongs to another
      model, a key, value or dtype is invalid, or float64 is asked for without 64-bit mode.
  """
  source = model_source.resolve(f'{model_source.PRETRAINED}{name}')
  return _with_overrides(source.open(dtype=dtype, adapter=adapter), overrides)


def _with_overrides(run: Run, overrides: Mapping[str, Any] | None) -> Run:
  """Returns the run with other values of some keys of its config."""
  return dataclasses.replace(run, config=overriding.of_opened_run(run.config, overrides))
