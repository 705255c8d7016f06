"""A run as a folder that other libraries read."""

import json
import logging
import pathlib
from typing import Any

from ngrammer_jax import open_weights
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import published, tokenizer
from ngrammer_jax.interop.huggingface import families


def save(source: Any, folder: pathlib.Path, dtype: str | None = None) -> None:
  """Writes a `runs.Run`, see `open_weights.save`.

  It keeps the family, the number of positions and the generation settings of the published model
  that the training started from.
  """
  config, origin, V = source.config, source.origin, source.vocabulary_size
  token_ids, text_files = dict(origin.get('token_ids', {})), {}
  if source.published is None or published.has_tokenizer(source.workdir):
    text_files = _text_files(source.vocabulary, token_ids)
  if source.published is None:
    token_ids |= _token_ids(source.vocabulary)
  generation = origin.get('generation', {}) | token_ids
  text_files[open_weights.GENERATION] = json.dumps(generation, indent=2).encode()
  if source.published is not None:  # its own files, byte by byte
    text_files |= source.published.checkpoint.text_files
  positions = origin.get('positions', config.evaluation_length())
  family = families.FAMILIES[origin.get('family', 'llama')]
  about = positions, token_ids, text_files, dtype, family
  open_weights.save(lambda: source.state.params, config.model, V, folder, *about)


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
  for name, ids in (padding | _token_ids(vocabulary)).items():
    token = vocabulary.token(ids[0] if isinstance(ids, list) else ids)
    config |= {name.removesuffix('_id'): token} if token else {}
  if vocabulary.chat_template is not None:
    config['chat_template'] = vocabulary.chat_template
  encoded = json.dumps(config, ensure_ascii=False).encode()
  return {'tokenizer.json': vocabulary.content, 'tokenizer_config.json': encoded}
