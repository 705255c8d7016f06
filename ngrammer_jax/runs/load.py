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
  """Opens a run directory. The checkpoint is located and loaded on first use.

  Args:
    workdir: the run directory, an exported run, or a published model (see `runs.model_source`).
    step: checkpoint: a step number, `newest`, or `best` on the validation split.
    overrides: values of config keys, such as `{'evaluation.segment_length': 256}`, like
      `--config.KEY=VALUE` on the command line. Keys that change the parameters cannot differ.

  Raises:
    BadInput: not a run directory, or an invalid step, key or value.
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
      name or as a NumPy or JAX dtype. None: dtypes of the file.
    adapter: folder of a LoRA adapter to merge into a published model.
    overrides: see `load_run`.

  Raises:
    BadInput: an unknown name, a damaged file, an adapter of another model, an invalid key, value or
      dtype, or float64 without 64-bit mode.
  """
  source = model_source.resolve(f'{model_source.PRETRAINED}{name}')
  return _with_overrides(source.open(dtype=dtype, adapter=adapter), overrides)


def _with_overrides(run: Run, overrides: Mapping[str, Any] | None) -> Run:
  """Returns the run with other values of some keys of its config."""
  return dataclasses.replace(run, config=overriding.of_opened_run(run.config, overrides))
