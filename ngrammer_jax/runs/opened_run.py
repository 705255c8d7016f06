"""The interface of `runs.Run` for the functions of this folder.

They import this file instead of `run` to avoid an import cycle.
"""

import pathlib
from typing import Any, Protocol

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.mixture import Mixture
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.interop.huggingface.published_model import PublishedModel
from ngrammer_jax.models import language_model
from ngrammer_jax.models.model_variables import ModelVariables


class OpenedRun(Protocol):
  """An open run; see `runs.Run` for all attributes and methods."""

  workdir: pathlib.Path
  config: experiment.Config
  step: int | str
  published: PublishedModel | None

  vocabulary: vocabularies.Vocabulary
  vocabulary_of_ids: vocabularies.Vocabulary
  vocabulary_size: int
  content_hash: str | None
  origin: dict[str, Any]
  recommended_sampling: dict[str, float | int]
  is_exported: bool

  mesh: jax.sharding.Mesh
  model: language_model.LanguageModel
  abstract_parameters: Any
  parameter_dtypes: dict[str, np.dtype]
  restored: ModelVariables
  engine: inference.Engine
  variables: inference.Variables
  mixture: Mixture

  def find_checkpoint(self) -> int | None:
    """See `runs.Run`."""

  def split(self, name: str) -> token_split.TokenSplit:
    """See `runs.Run`."""

  def evaluate(self, split: str, max_tokens: int | None) -> dict[str, Any]:
    """See `runs.Run`."""
