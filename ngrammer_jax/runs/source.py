"""What a model is read from: a run directory, an exported run, or a published model.

A source is written as one of

  DIR               a run directory or an exported run, also in a bucket
  FOLDER            a published model: a folder of Hugging Face
  FILE.gguf         a published model: a GGUF file
  hf:PATH           the same as PATH
  pretrained:NAME   a model of this package, or of another one (see `runs.pretrained`)

Only this file tells them apart; `runs.load` opens what it found.
"""

import dataclasses
import enum
import pathlib
from typing import Any

from ngrammer_jax.runs import pretrained
from ngrammer_jax.system import json_files, storage

PRETRAINED = 'pretrained:'
PUBLISHED = 'hf:'


class Kind(enum.Enum):
  """What is at the path of a source."""

  RUN = 'run directory'
  EXPORT = 'exported run'
  PUBLISHED = 'published model'


@dataclasses.dataclass(frozen=True)
class ModelSource:
  """Where a model is.

  Attributes:
    path: folder or file.
    kind: what it is. A path where nothing is counts as a run directory.
    pretrained: name of the pretrained model; None: it is not one.
  """

  path: pathlib.Path
  kind: Kind
  pretrained: str | None = None

  @property
  def is_published(self) -> bool:
    """Whether it is a published model, to which no files are added."""
    return self.kind == Kind.PUBLISHED


def resolve(text: str) -> ModelSource:
  """Returns the source that a text stands for, see the top of this file.

  Raises:
    BadInput: there is no pretrained model of this name, or a file of it is damaged.
  """
  if text.startswith(PRETRAINED):
    return find_pretrained(text.removeprefix(PRETRAINED))
  return identify(text.removeprefix(PUBLISHED))


def identify(path: str | pathlib.Path) -> ModelSource:
  """Returns the source at a path. Raises BadInput if the path cannot be reached."""
  from ngrammer_jax.checkpoints import workdirs  # imports JAX
  from ngrammer_jax.interop.huggingface import checkpoint

  path = storage.path(path)
  storage.check_reachable(path)
  if checkpoint.is_published(path):
    return ModelSource(path, Kind.PUBLISHED)
  if workdirs.is_exported(path):
    return ModelSource(path, Kind.EXPORT)
  return ModelSource(path, Kind.RUN)


def find_pretrained(name: str) -> ModelSource:
  """Returns the source of a pretrained model. Raises BadInput, see `pretrained.find`."""
  return dataclasses.replace(identify(pretrained.find(name)), pretrained=name)


def resolve_pretrained(name: str) -> ModelSource:
  """Returns the source of --pretrained: a pretrained model by its name, or a published model.

  Raises BadInput, see `resolve`.
  """
  path = storage.path(name)
  if name in pretrained.all_names() or not path.exists():
    return find_pretrained(name)
  return ModelSource(path, Kind.PUBLISHED)


def read_config_values(source: ModelSource) -> dict[str, Any]:
  """Returns the values of the config of a source, for a training with the same model.

  Raises:
    BadInput: there is no such model, or a file of it is damaged.
  """
  from ngrammer_jax.checkpoints import workdirs  # these import JAX
  from ngrammer_jax.config import conversion
  from ngrammer_jax.interop.huggingface import published_model

  if source.is_published:
    return published_model.open(source.path).config_values()
  if source.pretrained is None:
    if not (source.path / workdirs.CORPUS).exists():  # not a run, and no model that is supported
      return published_model.open(source.path).config_values()
    return dataclasses.asdict(workdirs.load_config(source.path))
  values = json_files.read(source.path / workdirs.CONFIG)
  vocabulary = conversion.stored_vocabulary(source.path)
  if vocabulary is not None:
    values['data'] |= {'vocabulary_path': str(vocabulary), 'vocabulary_size': None}
  return values
