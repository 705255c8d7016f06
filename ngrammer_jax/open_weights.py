"""Published models: opens one, describes it as one of ours, and writes one.

model = open_weights.open(path)     a folder of Hugging Face, or a GGUF file
model.config_values()                   of a config of ours, with its vocabulary
model.load(config, abstract)            its parameters, in the dtypes and shards of `abstract`
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import json
import logging
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.data.vocabularies import gguf_header, published
from ngrammer_jax.interop.huggingface import checkpoint as checkpoints
from ngrammer_jax.interop.huggingface import configs, families, gguf, tensors
from ngrammer_jax.system import files

GENERATION = 'generation_config.json'
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


@dataclasses.dataclass(frozen=True)
class Model:
  """A published model.

  Attributes:
    checkpoint: its files; the tensors have the names of the family, see `tensors.canonical`.
    description: what its config.json says; heads are untied if the file has another one.
  """

  checkpoint: checkpoints.Checkpoint
  description: configs.Description

  @property
  def vocabulary_size(self) -> int:
    """V, rows of the embedding; the tokenizer may have fewer ids."""
    return self.description.vocabulary_size

  @property
  def origin(self) -> dict[str, Any]:
    """What a config of ours does not have, as JSON. Raises BadInput for damaged settings."""
    with files.translate_damage(self.checkpoint.path / GENERATION, 'download it again'):
      generation = dict(json.loads(self.checkpoint.text_files.get(GENERATION, '{}')))
    config = self.checkpoint.config
    config = config | (config.get('text_config') or {})
    return {
      'family': self.description.family.model_type,
      'positions': self.description.positions,
      'token_ids': {name: config[name] for name in TOKEN_IDS if config.get(name) is not None},
      'generation': generation,
    }

  def config_values(self) -> dict[str, Any]:
    """Returns the values of the config of a run with this model."""
    length = min(self.description.positions, configs.DEFAULT_LENGTH)
    scaling = self.description.model['positional'].get('scaling')
    if scaling is not None and scaling['kind'] == 'longrope':  # up to there it has short factors
      length = min(length, scaling['original_length'])
    data: dict[str, Any] = {'vocabulary': 'tokenizer'}
    if published.has_tokenizer(path := self.checkpoint.path):
      data |= {'vocabulary_path': str(path), 'vocabulary_size': self.vocabulary_size}
    return {'model': self.description.model, 'data': data, 'training': {'segment_length': length}}

  def load(self, config: ModelConfig, abstract: Any) -> dict[str, Any]:
    """Loads the parameters, see `tensors.load`."""
    return tensors.load(self.checkpoint, self._slices(config, abstract), abstract)

  def dtypes(self, config: ModelConfig, abstract: Any) -> dict[str, np.dtype]:
    """Returns the dtype of each parameter in the files, by its path. Raises as `tensors.check`."""
    slices = self._slices(config, abstract)
    return {path: self.checkpoint.tensors[each.name].dtype for path, each in slices.items()}

  def _slices(self, config, abstract):
    """Returns where each parameter is in the files, which are checked for it."""
    family = self.description.family
    slices = tensors.find_all(family, config, self.vocabulary_size, abstract)
    tensors.check(self.checkpoint, family, slices)
    return slices


def open(path: pathlib.Path) -> Model:
  """Opens a published model, of which only headers are read.

  Raises:
    BadInput: it is damaged, of another family, or has a field or value that is not known.
  """
  open_checkpoint = gguf.open_file if gguf_header.is_gguf(path) else checkpoints.open_folder
  checkpoint = open_checkpoint(path)
  name = checkpoint.config_path
  with files.translate_damage(name), errors.named(name):
    description = configs.read(checkpoint.config)
  family, model = description.family, description.model
  stored = tensors.canonical(checkpoint.tensors, family)
  if model['tie_embeddings'] and tensors.has_own_head(stored, family):
    logging.warning('%s has an output matrix other than the embedding: they are not tied', path)
    model['tie_embeddings'] = False
  return Model(dataclasses.replace(checkpoint, tensors=stored), description)


def save(
  params: Callable[[], Any],
  config: ModelConfig,
  vocabulary_size: int,
  folder: pathlib.Path,
  positions: int,
  token_ids: Mapping[str, Any],
  text_files: Mapping[str, bytes],
  dtype: Any = None,
  preferred: families.Family = families.LLAMA,
) -> None:
  """Writes a model as a folder of a family that has such models.

  Args:
    params: function that returns the parameters, once it is known that they can be written.
    config: the config of the model.
    vocabulary_size: V.
    folder: an empty folder.
    positions: number of positions that the model was made for.
    token_ids: the ids of TOKEN_IDS that there are.
    text_files: content of the files of the tokenizer and of generation by name.
    dtype: dtype of the tensors; None: those of the parameters.
    preferred: the family if it has such models.

  Raises:
    BadInput: no family has such a model.
  """
  if config.scale_embeddings and not (
    config.tie_embeddings or preferred.options['scale_embeddings']
  ):
    params = functools.partial(_with_scaled_embedding, params, config)
    config = dataclasses.replace(config, scale_embeddings=False)
  family, values = configs.write(config, vocabulary_size, positions, preferred)
  weights = folder / checkpoints.WEIGHTS
  kind = tensors.save(params(), family, config, vocabulary_size, weights, dtype)
  # Families have ids of their own where there is no null.
  values |= {'torch_dtype': kind} | dict.fromkeys(TOKEN_IDS) | dict(token_ids)
  (folder / checkpoints.CONFIG).write_text(json.dumps(values, indent=2))
  for name, content in text_files.items():
    (folder / name).write_bytes(content)


def _with_scaled_embedding(params, config):
  """Returns parameters for a model that does not scale its embedding as ours does."""
  tree = params()
  return tree | {'embedding': tree['embedding'] * config.width**0.5}
