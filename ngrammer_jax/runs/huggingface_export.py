"""A run as a folder that other libraries read."""

import dataclasses
import json
import logging
import pathlib

from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import published, tokenizer
from ngrammer_jax.interop.huggingface import checkpoint, configs, families, published_model, tensors
from ngrammer_jax.runs.opened_run import OpenedRun
from ngrammer_jax.system import result_files


def save(source: OpenedRun, folder: pathlib.Path, dtype: str | None = None) -> None:
  """Writes a `runs.Run` into a new or empty folder, as a model of a family that has such models.

  It keeps the family, the number of positions and the generation settings of the published model
  that the training started from.

  Args:
    source: the run.
    folder: the folder.
    dtype: dtype of the tensors; None: those of the parameters.

  Raises:
    BadInput: no family has such a model, or the folder is not empty; nothing is created.
  """
  model, origin, V = source.config.model, source.origin, source.vocabulary_size
  preferred, scale = families.FAMILIES[origin.get('family', 'llama')], 1.0
  if model.scale_embeddings and not (model.tie_embeddings or preferred.options['scale_embeddings']):
    model, scale = dataclasses.replace(model, scale_embeddings=False), model.width**0.5
  positions = origin.get('positions', source.config.evaluation_length())
  family, values = configs.write(model, V, positions, preferred)
  token_ids, text_files = dict(origin.get('token_ids', {})), {}
  if source.published is None or published.has_tokenizer(source.workdir):
    text_files = _text_files(source.vocabulary, token_ids)
  if source.published is None:
    token_ids |= _token_ids(source.vocabulary)
  params = source.restored.params
  result_files.make_output_folder(folder)  # once it is known that there is such a model
  if scale != 1:
    params = params | {'embedding': params['embedding'] * scale}
  kind = tensors.save(params, family, model, V, folder / checkpoint.WEIGHTS, dtype)
  # Families have ids of their own where there is no null.
  values |= {'torch_dtype': kind} | dict.fromkeys(published_model.TOKEN_IDS) | token_ids
  generation = origin.get('generation', {}) | token_ids
  contents = {checkpoint.CONFIG: values, published_model.GENERATION: generation}
  text_files |= {name: json.dumps(value, indent=2).encode() for name, value in contents.items()}
  if source.published is not None:  # its own files, byte by byte
    text_files |= source.published.checkpoint.text_files
  for name, content in text_files.items():
    (folder / name).write_bytes(content)


def _token_ids(vocabulary: vocabularies.Vocabulary) -> dict[str, int | list[int]]:
  """Returns the ids of the tokens that begin and end a text, by the name of their field."""
  start, ends = vocabulary.document_start, list(vocabulary.end_tokens)
  if isinstance(vocabulary, tokenizer.TokenizerVocabulary):
    ends.pop()  # the document start
  ids = {'eos_token_id': ends if len(ends) > 1 else ends[0]} if ends else {}
  # A model that reads no token before a text has its end as the document start.
  return ids if start in ends and not vocabulary.adds_start else {'bos_token_id': start} | ids


def _text_files(vocabulary, published_ids):
  """Returns the files of a tokenizer, none if the vocabulary is not one."""
  if not isinstance(vocabulary, tokenizer.TokenizerVocabulary):
    logging.warning('%s has no tokenizer.json: text is encoded here', type(vocabulary).__name__)
    return {}
  padding = {name: id for name, id in published_ids.items() if name == 'pad_token_id'}
  config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'add_bos_token': vocabulary.adds_start}
  if vocabulary.chat_template is not None:  # null would win over a file with a template
    config['chat_template'] = vocabulary.chat_template
  for name, ids in (padding | _token_ids(vocabulary)).items():
    token_id = ids[0] if isinstance(ids, list) else ids
    config[name.removesuffix('_id')] = vocabulary.token(token_id) or None
  encoded = json.dumps(config, ensure_ascii=False).encode()
  return {'tokenizer.json': vocabulary.content, 'tokenizer_config.json': encoded}
