"""Sources of models: run directories, exported runs and published models.

A source is written as one of

  DIR               a run directory or an exported run, also in a bucket
  FOLDER            a published model: a folder of Hugging Face
  FILE.gguf         a published model: a GGUF file
  hf:PATH           same as PATH
  pretrained:NAME   a model of this package, or of another one, see `runs.pretrained`
  pretrained:PATH   same as PATH, for a published model

Only `resolve` reads this notation. A `ModelSource` has the type of a path, and opens it.
"""

import contextlib
import dataclasses
import logging
import numbers
import pathlib
from typing import TYPE_CHECKING, Any

from ngrammer_jax import errors
from ngrammer_jax.runs import pretrained
from ngrammer_jax.system import storage

if TYPE_CHECKING:
  from ngrammer_jax.runs.run import Run

PRETRAINED = 'pretrained:'
HUGGING_FACE = 'hf:'
PREFIXES = (PRETRAINED, HUGGING_FACE)


@dataclasses.dataclass(frozen=True)
class ModelSource:
  """The source of a model, see `resolve` and `from_path`.

  Attributes:
    path: folder or file.
    is_published: whether it is a published model (read-only). Otherwise it is a run directory or an
      exported run, if the path exists.
    is_pretrained: whether it was named as a pretrained model, with a single step.
    label: prefix of the messages of `open`, the key or flag with its value; None: no prefix.
  """

  path: pathlib.Path
  is_published: bool
  is_pretrained: bool = False
  label: str | None = None

  @classmethod
  def from_path(cls, path: str | pathlib.Path) -> 'ModelSource':
    """Returns the source at a path. Raises BadInput if the path is unreachable."""
    from ngrammer_jax.interop.huggingface import checkpoint  # imports JAX

    path = storage.path(path)
    storage.check_reachable(path)
    return cls(path, checkpoint.is_published(path))

  def open(
    self,
    step: int | str = 'newest',
    dtype: Any = None,
    adapter: str | pathlib.Path | None = None,
  ) -> 'Run':
    """Opens it as a run.

    Args:
      step: checkpoint: a step number, `newest` or `best`; a pretrained model has only the newest.
      dtype: dtype of the parameters of a published model, see `precision.loaded_dtype`; other
        models keep their dtypes.
      adapter: folder of a LoRA adapter of a published model; None: no adapter.

    Raises:
      BadInput: neither run nor model, a damaged file, an adapter of another model, or an invalid
        parameter dtype.
    """
    from ngrammer_jax.checkpoints import workdirs  # these import JAX
    from ngrammer_jax.models import precision
    from ngrammer_jax.runs import published_run, run

    if self.is_pretrained:
      step = 'newest'
    with _named(self.label):
      if self.is_published:
        return published_run.open_run(self.path, step, dtype, adapter)
      if adapter is not None:
        raise errors.BadInput(
          f'{self.path} is a run of this package: the adapter {adapter} needs the published model '
          f'that it was trained on'
        )
      if precision.loaded_dtype(dtype) not in (None, 'float32'):
        logging.warning('dtype=%s has no effect: parameters of %s are float32', dtype, self.path)
      if self.label is not None and not (self.path / workdirs.CONFIG).exists():
        raise errors.BadInput(
          f'it holds no {workdirs.CONFIG}; expected a run directory or a published model'
        )
      return run.Run(self.path, workdirs.load_config(self.path), step)

  def config_values(self) -> dict[str, Any]:
    """Returns the values of its config, for a training with the same model.

    Raises:
      BadInput: there is no such model, or one of its files is damaged.
    """
    from ngrammer_jax.checkpoints import workdirs  # these import JAX
    from ngrammer_jax.config import conversion
    from ngrammer_jax.interop.huggingface import published_model

    if self.is_published:
      return published_model.open(self.path).config_values()
    if not self.is_pretrained:
      if not _is_run(self.path):  # says which models are supported
        return published_model.open(self.path).config_values()
      return dataclasses.asdict(workdirs.load_config(self.path))
    values = conversion.read(self.path / workdirs.CONFIG)
    vocabulary = conversion.stored_vocabulary(self.path)
    if vocabulary is not None:
      values['data'] |= {'vocabulary_path': str(vocabulary), 'vocabulary_size': None}
    return values


def resolve(text: str, key: str | None = None) -> ModelSource:
  """Returns the source for a text, see the top of this file.

  Args:
    text: the text.
    key: the key or flag of the text, for messages. With a key, a local path must exist.

  Raises:
    BadInput: an unknown pretrained model, a damaged file, or an unreachable path.
  """
  if key is None:
    return _find(text)
  label = f'{key}={text}'
  with _named(label):
    source = _find(text)
    if not storage.is_remote(source.path) and not source.path.exists():
      raise errors.BadInput('no such folder; expected the workdir of a run')
  return dataclasses.replace(source, label=label)


def read_step(step: int | str) -> int | str:
  """Returns the step of a checkpoint: a number or its text, `newest` or `best`.

  Raises BadInput for anything else.
  """
  if isinstance(step, str) and step.isdecimal():
    return int(step)
  if isinstance(step, numbers.Integral) and not isinstance(step, bool) and step >= 0:
    return int(step)
  if not isinstance(step, str) or step not in ('newest', 'best'):
    raise errors.BadInput(f'step={step!r} is not a step: use a number from 0, "newest" or "best"')
  return step


def _find(text: str) -> ModelSource:
  """Returns the source of a text, without its key."""
  if text.startswith(PRETRAINED):
    return _find_pretrained(text.removeprefix(PRETRAINED))
  return ModelSource.from_path(text.removeprefix(HUGGING_FACE))


def _find_pretrained(name: str) -> ModelSource:
  """Returns the source of a pretrained model, or of a published model at a path."""
  if name in pretrained.all_names():
    source = ModelSource.from_path(pretrained.find(name))
    return dataclasses.replace(source, is_pretrained=True)
  source = ModelSource.from_path(name.removeprefix(HUGGING_FACE))
  if not source.path.exists():
    pretrained.find(name)  # raises, with the nearest name
  if not source.is_published and _is_run(source.path):
    raise errors.BadInput(
      f'{name} is a run directory, not a pretrained model: use --workdir={name} to open it, or '
      f'init_from={name} to start from it'
    )
  # If it is no published model, `open` says why.
  return dataclasses.replace(source, is_published=True, is_pretrained=True)


def _is_run(path: pathlib.Path) -> bool:
  """Whether a path has the files of a run or of an exported run."""
  from ngrammer_jax.checkpoints import workdirs  # imports JAX

  return (path / workdirs.CORPUS).exists()


def _named(label: str | None) -> contextlib.AbstractContextManager[None]:
  """Prefixes the message of a BadInput with a label, if any."""
  if label is None:
    return contextlib.nullcontext()
  return errors.named(label)
