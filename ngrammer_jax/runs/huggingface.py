"""A published model as a run: it is evaluated, sampled, exported and trained on as any other."""

import dataclasses
import functools
import json
import logging
import pathlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax import errors, published_models, sharding
from ngrammer_jax.config import conversion
from ngrammer_jax.data import token_cache, vocabularies
from ngrammer_jax.data.vocabularies import tokenizer
from ngrammer_jax.models import language_model
from ngrammer_jax.runs import run
from ngrammer_jax.system import files
from ngrammer_jax.training import capacity
from ngrammer_jax.training import state as train_state

TOKENIZER = 'tokenizer.json'


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
  def _splits(self) -> dict[str, token_cache.TokenSplit]:
    data = self.config.data
    return token_cache.prepare(
      data, run.corpus_opener(data), data.cache_dir is None, self.vocabulary
    ).splits


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


def save(source: run.Run, folder: pathlib.Path, dtype: str | None = None) -> None:
  """Writes a run as a folder that other libraries read, see `published_models.save`."""
  config = source.config
  if isinstance(source, PublishedRun):
    published = source.published
    description, files_of_text = published.description, published.checkpoint.tokenizer
    about = (description.positions, published.token_ids)
    text_files = dict(files_of_text.others)
    if files_of_text.read is not None:
      text_files = _about_text(source.vocabulary)[1] | text_files
    options = {'dtype': dtype, 'preferred': description.family}
  else:
    token_ids, text_files = _about_text(source.vocabulary)
    about, options = (config.evaluation_length(), token_ids), {'dtype': dtype}
  V, params = source.model.vocabulary_size, lambda: source.state.params
  published_models.save(params, config.model, V, folder, *about, text_files, **options)


def _about_text(vocabulary: vocabularies.Vocabulary) -> tuple[dict[str, int], dict[str, bytes]]:
  """Returns the ids of special tokens, and the files of a tokenizer if the vocabulary is one."""
  ids = {'bos_token_id': vocabulary.document_start, 'eos_token_id': vocabulary.document_end}
  ids = {name: id for name, id in ids.items() if id is not None}
  if not isinstance(vocabulary, tokenizer.TokenizerVocabulary):
    logging.warning('%s has no tokenizer.json: text is encoded here', type(vocabulary).__name__)
    return ids, {}
  _, tokens = vocabulary.token_texts()
  config = {name.removesuffix('_id'): tokens[id] for name, id in ids.items()}
  config |= {'tokenizer_class': 'PreTrainedTokenizerFast', 'add_bos_token': vocabulary.adds_start}
  if vocabulary.chat_template is not None:
    config['chat_template'] = vocabulary.chat_template
  encoded = json.dumps(config, ensure_ascii=False).encode()
  return ids, {TOKENIZER: vocabulary.content, 'tokenizer_config.json': encoded}
