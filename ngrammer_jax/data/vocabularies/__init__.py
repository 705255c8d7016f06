"""Vocabularies: text to token ids and back. One file for each kind of token."""

import pathlib

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies.base import Vocabulary
from ngrammer_jax.data.vocabularies.byte_values import ByteVocabulary
from ngrammer_jax.data.vocabularies.characters import CharacterVocabulary, learn_characters
from ngrammer_jax.data.vocabularies.sentencepiece import (
  MAX_TRAINING_BYTES,
  SentencePieceVocabulary,
  learn_sentencepiece,
  read_sentencepiece,
)
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary, read_tokenizer
from ngrammer_jax.data.vocabularies.words import WordVocabulary, learn_words
from ngrammer_jax.system import files, json_files

__all__ = [
  'MAX_TRAINING_BYTES',
  'ByteVocabulary',
  'CharacterVocabulary',
  'SentencePieceVocabulary',
  'TokenizerVocabulary',
  'Vocabulary',
  'WordVocabulary',
  'learn_characters',
  'learn_sentencepiece',
  'learn_words',
  'load',
  'read',
  'read_sentencepiece',
  'read_tokenizer',
]

MAX_FILE_BYTES = 1 << 30
# Class, types of the fields of vocabulary.json and name of a further file, by kind.
KINDS = {
  'bytes': (ByteVocabulary, {}, None),
  'characters': (
    CharacterVocabulary,
    {'characters': str, 'encoding': str, 'separated': bool},
    None,
  ),
  'words': (WordVocabulary, {'words': list}, None),
  'sentencepiece': (SentencePieceVocabulary, {'learned': bool}, 'vocabulary.model'),
  'tokenizer': (TokenizerVocabulary, {}, 'vocabulary.tokenizer.json'),
}


def read(kind: str, path: pathlib.Path) -> Vocabulary:
  """Returns the vocabulary of `data.vocabulary_path`, of the kind `data.vocabulary`."""
  return read_tokenizer(path) if kind == 'tokenizer' else read_sentencepiece(path)


def load(folder: pathlib.Path) -> Vocabulary:
  """Loads the vocabulary of a folder that `save` wrote. Raises BadInput if it is damaged."""
  name = 'vocabulary.json'
  try:
    fields = json_files.read_object(folder / name, MAX_FILE_BYTES)
    kind = fields.pop('kind', None)
    if type(kind) is not str or kind not in KINDS:
      raise files.DamagedError(f'kind {kind!r} is not one of {", ".join(KINDS)}')
    make, types, file_name = KINDS[kind]
    for key, value in fields.items():
      if key not in types or type(value) is not types[key]:
        raise files.DamagedError(f'{key} is unknown, or of a wrong type')
    if file_name is None:
      if missing := types.keys() - fields.keys():
        raise files.DamagedError(f'{", ".join(sorted(missing))} missing')
      return make(**fields)
    name = file_name
    return make(files.read(folder / name, MAX_FILE_BYTES), **fields)
  except OSError as error:
    reason = error.strerror
  except (ValueError, RuntimeError, TypeError) as error:
    reason = str(error)
  raise errors.BadInput(
    f'{folder} has no intact vocabulary ({name}: {reason}); the training command writes it again '
    f'if steps are left'
  )
