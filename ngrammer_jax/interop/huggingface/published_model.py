"""Opens published models, and converts their configs to ours.

model = published_model.open(path)    a folder of Hugging Face, or a GGUF file
model.config_values()               of a config of ours, with its vocabulary
"""

import dataclasses
import json
import logging
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import gguf_header, published
from ngrammer_jax.interop.huggingface import adapters, configs, gguf, tensors
from ngrammer_jax.interop.huggingface import checkpoint as checkpoints
from ngrammer_jax.system import file_errors

GENERATION = 'generation_config.json'
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


@dataclasses.dataclass(frozen=True)
class PublishedModel:
  """A published model.

  Attributes:
    checkpoint: its files; the tensors have the names of the family, see `tensors.canonical`.
    description: content of its config.json; the head is untied if the file has a separate one.
    slices: the tensor slice of each parameter, by path.
  """

  checkpoint: checkpoints.Checkpoint
  description: configs.Description
  slices: tensors.Slices

  @property
  def origin(self) -> dict[str, Any]:
    """Information outside of our config, as JSON. Raises BadInput for damaged settings."""
    with file_errors.translate_damage(self.checkpoint.path / GENERATION, 'download it again'):
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
      data |= {'vocabulary_path': str(path), 'vocabulary_size': self.description.vocabulary_size}
    return {'model': self.description.model, 'data': data, 'training': {'segment_length': length}}


def open(path: pathlib.Path, adapter: pathlib.Path | None = None) -> PublishedModel:
  """Opens a published model; reads only headers.

  Args:
    path: its folder or GGUF file.
    adapter: folder of a LoRA adapter to merge into it, see `adapters`.

  Raises:
    BadInput: a damaged model, another family, an unknown field or value, tensors that do not match
      the config, or an adapter of another model.
  """
  if gguf_header.is_gguf(path):
    checkpoint = gguf.open_file(path)
  else:
    checkpoint = checkpoints.open_folder(path)
  name = checkpoint.config_path
  with file_errors.translate_damage(name), errors.named(name):
    description = configs.read(checkpoint.config)
    config = description.config()
  family, V = description.family, description.vocabulary_size
  stored = tensors.canonical(checkpoint.tensors, family, str(path))
  checkpoint = dataclasses.replace(checkpoint, tensors=stored)
  slices = tensors.find_all(family, config, V, tensors.parameter_paths(family, config))
  tensors.check_tensors(checkpoint, family, slices, config.tie_embeddings)
  if adapter is not None:
    checkpoint = adapters.merge(adapters.open_folder(adapter), checkpoint, family, slices)
    stored = checkpoint.tensors
  if config.tie_embeddings:
    with file_errors.translate_damage(path):
      has_own_head = tensors.has_own_head(stored, slices)
    if has_own_head:
      logging.warning('%s has an output matrix other than the embedding: they are not tied', path)
      description.model['tie_embeddings'] = False
    else:
      del slices[tensors.HEAD]
  return PublishedModel(checkpoint, description, slices)
