"""Vocabularies: text to token ids and back. One file for each kind of token."""

import codecs
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.data.files import compression, file_formats
from ngrammer_jax.data.vocabularies import gguf_header, published
from ngrammer_jax.data.vocabularies.base import Vocabulary
from ngrammer_jax.data.vocabularies.byte_values import ByteVocabulary
from ngrammer_jax.data.vocabularies.characters import CharacterVocabulary
from ngrammer_jax.data.vocabularies.characters import learn_characters as learn_characters
from ngrammer_jax.data.vocabularies.sentencepiece import DEFAULT_SIZE as DEFAULT_SIZE
from ngrammer_jax.data.vocabularies.sentencepiece import MAX_TRAINING_BYTES as MAX_TRAINING_BYTES
from ngrammer_jax.data.vocabularies.sentencepiece import SentencePieceVocabulary
from ngrammer_jax.data.vocabularies.sentencepiece import learn_sentencepiece as learn_sentencepiece
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary
from ngrammer_jax.data.vocabularies.words import WordVocabulary
from ngrammer_jax.data.vocabularies.words import learn_words as learn_words
from ngrammer_jax.system import file_errors, git_lfs, json_files, storage

CLASSES = (
  ByteVocabulary,
  CharacterVocabulary,
  WordVocabulary,
  SentencePieceVocabulary,
  TokenizerVocabulary,
)
KINDS = {vocabulary.kind: vocabulary for vocabulary in CLASSES}
# What `data.vocabulary_path` is.
FILES = {
  'sentencepiece': 'a SentencePiece model',
  'tokenizer': 'the tokenizer.json of a Hugging Face tokenizer',
}


def read(kind: str, path: pathlib.Path, size: int | None = None) -> Vocabulary:
  """Returns the vocabulary of `data.vocabulary_path`, of the kind `data.vocabulary`.

  Args:
    kind: `sentencepiece` or `tokenizer`.
    path: the file; for a tokenizer also a published model, a folder or a GGUF file.
    size: number of ids of a tokenizer, see `TokenizerVocabulary`.

  Raises BadInput for a file of another kind.
  """
  if kind == 'tokenizer' and (path.is_dir() or gguf_header.is_gguf(path)):
    return published.read(path, size)
  if not path.exists():
    raise errors.BadInput(f'data.vocabulary_path={path} does not exist')
  try:
    with file_errors.translate_damage(path), compression.open_binary(path) as file:
      content = file.read().removeprefix(codecs.BOM_UTF8)
    if size is None:
      return KINDS[kind](content)
    return KINDS[kind](content, size=size)
  except errors.BadInput as error:
    raise errors.BadInput(f'data.vocabulary_path={path}: {error}') from error
  except (ValueError, RuntimeError) as error:
    reason = _describe_wrong_file(kind, content, error)
    raise errors.BadInput(f'data.vocabulary_path={path} is {reason}') from error


def _describe_wrong_file(kind: str, content: bytes, error: Exception) -> str:
  """Describes a file that is not a vocabulary of a kind, with a remedy."""
  (other,) = FILES.keys() - {kind}
  what = file_formats.recognize(content[: file_formats.HEAD])
  if what == file_formats.GGUF:  # it has a tokenizer
    remedy = f'use data.vocabulary={other}'
  elif _is_vocabulary(other, content):
    what = FILES[other]
    remedy = f'use data.vocabulary={other}'
  elif 'UTF' in str(what):
    remedy = file_formats.UTF8_REMEDY
  else:
    remedy = 'name that file'
  if not what:
    return f'not {FILES[kind]}: {error}'
  return f'{what}, not {FILES[kind]}: {remedy}'


def _is_vocabulary(kind: str, content: bytes) -> bool:
  """Whether a file is a vocabulary of a kind."""
  try:
    KINDS[kind](content)
  except (ValueError, RuntimeError):
    return False
  return True


def check_path(kind: str, path: str, vocabulary: Vocabulary, workdir: pathlib.Path) -> None:
  """Raises BadInput if `data.vocabulary_path` differs from the vocabulary of a run."""
  size = vocabulary.size if kind == 'tokenizer' else None
  other = read(kind, storage.user_path('data.vocabulary_path', path), size)
  if other.definition != vocabulary.definition:
    raise errors.BadInput(
      f'data.vocabulary_path={path}, with {other.size:,} token ids, is not the vocabulary of '
      f'--workdir={workdir}, which has {vocabulary.size:,}: use that vocabulary, or another workdir'
    )


def load(folder: pathlib.Path) -> Vocabulary:
  """Loads a vocabulary written by `save`. Raises BadInput if it is damaged."""
  remedy = 'the training command writes it again if steps are left'
  with file_errors.translate_damage(folder / 'vocabulary.json', remedy):
    fields = json_files.read(folder / 'vocabulary.json')
    make = KINDS[fields.pop('kind')]
    if make.file is None:
      return make(**fields)
  with file_errors.translate_damage(folder / make.file, remedy):
    return make(git_lfs.read_bytes(folder / make.file), **fields)
