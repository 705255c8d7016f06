"""Export of a run to a Hugging Face folder, for other libraries."""

import dataclasses
import json
import logging
import pathlib
from typing import Any

from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import post_processor, published, tokenizer, tokenizer_json
from ngrammer_jax.interop.huggingface import checkpoint, configs, families, published_model, tensors
from ngrammer_jax.runs.opened_run import OpenedRun
from ngrammer_jax.system import result_files

TokenIds = dict[str, int | list[int]]  # ids by the name of their field, such as eos_token_id


def save(run: OpenedRun, folder: pathlib.Path, dtype: str | None = None) -> None:
  """Writes a run into a new or empty folder, as a model of a compatible family.

  It keeps the family, the number of positions and the generation settings of the published model in
  `init_from`.

  Args:
    run: the run.
    folder: the folder.
    dtype: dtype of the tensors; None: dtypes of the parameters.

  Raises:
    BadInput: no family is compatible, or the folder is not empty; nothing is created.
  """
  V = run.vocabulary_size
  origin = run.origin
  preferred = families.FAMILIES[origin.get('family', 'llama')]
  model = run.config.model
  is_scale_in_weights = _puts_scale_in_weights(model, preferred)
  if is_scale_in_weights:
    model = dataclasses.replace(model, scale_embeddings=False)
  positions = origin.get('positions', run.config.evaluation_length())
  family, config = configs.write(model, V, positions, preferred)
  token_ids = dict(origin.get('token_ids', {}))
  if run.published is None:
    token_ids |= _token_ids(run.vocabulary)
  text_files = _text_files(run, family, token_ids)
  params = run.restored.params
  result_files.make_output_folder(folder)  # once it is known that there is such a model
  if is_scale_in_weights:
    params = params | {'embedding': params['embedding'] * model.width**0.5}
  stored_dtype = tensors.save(params, family, model, V, folder / checkpoint.WEIGHTS, dtype)
  # Families have ids of their own where there is no null.
  config |= {'torch_dtype': stored_dtype} | dict.fromkeys(published_model.TOKEN_IDS) | token_ids
  generation = origin.get('generation', {}) | token_ids
  contents = {checkpoint.CONFIG: config, published_model.GENERATION: generation}
  for name, content in contents.items():
    text_files[name] = json.dumps(content, indent=2).encode()
  if run.published is not None:
    text_files |= run.published.checkpoint.text_files  # byte by byte
  for name, content in text_files.items():
    (folder / name).write_bytes(content)


def _puts_scale_in_weights(model: ModelConfig, family: families.Family) -> bool:
  """Whether the stored embedding includes its scale, for families without a scale.

  A tied embedding is also the head, and the head has no scale.
  """
  if not model.scale_embeddings or model.tie_embeddings:
    return False
  return not family.options['scale_embeddings']


def _text_files(run: OpenedRun, family: families.Family, token_ids: TokenIds) -> dict[str, bytes]:
  """Returns the tokenizer files by name, from the published folder or newly written.

  A published model may have no tokenizer.
  """
  if run.published is not None and not published.has_tokenizer(run.workdir):
    return {}
  if run.published is not None and run.workdir.is_dir():
    return published.read_files(run.workdir)
  _warn_of_other_words(run.vocabulary, family)
  return _tokenizer_files(run.vocabulary, token_ids)


def _token_ids(vocabulary: vocabularies.Vocabulary) -> TokenIds:
  """Returns the ids of the begin and end tokens of a text."""
  start = vocabulary.document_start
  ends = list(vocabulary.end_tokens)
  if isinstance(vocabulary, tokenizer.TokenizerVocabulary):
    ends.pop()  # the document start
  ids: TokenIds = {}
  # A model that reads no token before a text has its end as the document start.
  is_end_only = start in ends and not vocabulary.adds_start
  if not is_end_only:
    ids['bos_token_id'] = start
  if ends:
    ids['eos_token_id'] = ends if len(ends) > 1 else ends[0]
  return ids


def _warn_of_other_words(vocabulary: vocabularies.Vocabulary, family: families.Family) -> None:
  """Warns that transformers 5 tokenises texts of a family by its own rules."""
  if family.model_type != 'qwen2' or not isinstance(vocabulary, tokenizer.TokenizerVocabulary):
    return
  if not tokenizer_json.splits_like(vocabulary.content, 'qwen2'):
    logging.warning(
      'this is written as a Qwen 2, whose texts transformers 5 cuts into words like Qwen 2, other '
      'than this tokenizer: read texts with the package tokenizers, or here'
    )


def _tokenizer_files(vocabulary: vocabularies.Vocabulary, token_ids: TokenIds) -> dict[str, bytes]:
  """Returns the files of a tokenizer by name; empty for other vocabularies.

  Args:
    vocabulary: the vocabulary.
    token_ids: special ids of the model; a vocabulary has no padding id.
  """
  if not isinstance(vocabulary, tokenizer.TokenizerVocabulary):
    logging.warning('%s has no tokenizer.json: text is encoded here', type(vocabulary).__name__)
    return {}
  # Transformers 5 reads the post-processor, and the converter of llama.cpp the setting.
  config: dict[str, Any] = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'add_bos_token': vocabulary.adds_start,
  }
  if vocabulary.chat_template is not None:  # null would win over a file with a template
    config['chat_template'] = vocabulary.chat_template
  named_ids: TokenIds = {}
  if 'pad_token_id' in token_ids:
    named_ids['pad_token_id'] = token_ids['pad_token_id']
  named_ids |= _token_ids(vocabulary)
  for name, ids in named_ids.items():
    token_id = ids[0] if isinstance(ids, list) else ids
    config[name.removesuffix('_id')] = vocabulary.token(token_id) or None
  begin = vocabulary.document_start if vocabulary.adds_start else None
  return {
    'tokenizer.json': post_processor.with_begin_token(
      vocabulary.content, vocabulary.token(vocabulary.document_start), begin
    ),
    'tokenizer_config.json': json.dumps(config, ensure_ascii=False).encode(),
  }
