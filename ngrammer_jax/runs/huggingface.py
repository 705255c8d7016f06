"""A published model as a run: it is evaluated, sampled, exported and trained on as any other."""

import dataclasses
import functools
import pathlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax import errors, published_models, sharding
from ngrammer_jax.config import conversion
from ngrammer_jax.data import mixture, vocabularies
from ngrammer_jax.models import language_model
from ngrammer_jax.runs import run
from ngrammer_jax.system import files
from ngrammer_jax.training import capacity
from ngrammer_jax.training import state as train_state


@dataclasses.dataclass(frozen=True)
class PublishedRun(run.Run):
  """A published model. It has no training: its step is 0.

  Attributes:
    dtype: dtype of the parameters; None: those of the file.
  """

  dtype: str | None = None

  @functools.cached_property
  def published(self) -> published_models.Model:
    """The files of the model."""
    return published_models.open(self.workdir)

  content_hash = None  # its text is not known
  results_folder = None  # nothing is added to its files

  @property
  def origin(self) -> dict[str, Any]:
    return self.published.origin

  @functools.cached_property
  def vocabulary(self) -> vocabularies.Vocabulary:
    """The tokenizer of the model. Raises BadInput if there is none, or a larger one."""
    return published_models.read_vocabulary(self.workdir, self.published.vocabulary_size)

  @functools.cached_property
  def model(self) -> language_model.LanguageModel:
    return language_model.build(self.config.model, self.published.vocabulary_size)

  @functools.cached_property
  def evaluated(self) -> language_model.LanguageModel:
    c = self.config.evaluation_model()
    return language_model.build(c, self.published.vocabulary_size)

  def find_checkpoint(self) -> None:
    """Returns None: there are no checkpoints. Raises BadInput for another step than 0."""
    if self.step not in ('newest', 'best', 0):
      raise errors.BadInput(
        f'--step={self.step}: {self.workdir} is a published model, without steps'
      )

  def load(self, abstract: Any, dtype: Any = None) -> dict[str, Any]:
    """Returns the parameters, in the shards of `abstract`."""
    return self.published.load(self.config.model, abstract, dtype)

  @functools.cached_property
  def state(self) -> train_state.TrainState:
    self.find_checkpoint()
    boxed = train_state.abstract_variables(self.model)['params']
    shardings = sharding.shardings(boxed, self.mesh)
    dtype = self.dtype or self.published.dtype
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where)
    abstract = jax.tree.map(place, nn.unbox(boxed), shardings)
    self.published.check(self.config.model, abstract)
    capacity.check_parameters(abstract, self.mesh)
    return train_state.TrainState(jnp.int32(0), self.load(abstract, self.dtype), {}, {}, {})

  @functools.cached_property
  def _mixture(self) -> mixture.Mixture:
    data = self.config.data
    return mixture.prepare(data, run.open_corpus, data.cache_dir is None, self.vocabulary)


def open_run(
  path: str | pathlib.Path, step: int | str = 'newest', dtype: str | None = None
) -> PublishedRun:
  """Opens a published model.

  Args:
    path: its folder or GGUF file.
    step: `newest`, `best` or 0.
    dtype: dtype of the parameters; None: those of the file.

  Raises:
    BadInput: it is damaged, of another family, or has a field or value that is not known.
  """
  path = files.path(path)
  model = published_models.open(path)
  values = model.config_values()
  has_text = 'vocabulary_path' in values['data']
  with errors.named(model.checkpoint.config_path):
    config = conversion.resolve(values if has_text else values | {'data': {}})
  return PublishedRun(path, config, step, dtype)
