"""Tokenizers of Hugging Face folders and GGUF files, as a vocabulary: always a tokenizer.json.

  tokenizer.json                    as it is
  tokenizer.model                   SentencePiece, byte pairs (older Llama, Mistral, Gemma)
  vocab.json and merges.txt         byte-level byte pairs (GPT-2, Qwen)
  metadata of a GGUF file           either of the last two

The files of the model determine the begin and end tokens, and whether the begin token is added to
every text. `tokenizer_json` makes a missing tokenizer.json.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import gguf_header, post_processor, tokenizer_json
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary
from ngrammer_jax.system import file_errors, git_lfs, json_files

TOKEN_FILES = ('tokenizer.json', 'tokenizer.model', 'vocab.json')  # a tokenizer has one of them
FILES = (*TOKEN_FILES, 'merges.txt', 'added_tokens.json')
# Ids of the begin and end token that llama.cpp takes for a SentencePiece model.
SENTENCEPIECE_START = 1
SENTENCEPIECE_END = 2
# The classes with which transformers 5 reads the tokenizer of a model, by its model_type: those of
# FIXED_CLASSES always, those of DEFAULT_CLASSES where the files name none.
FIXED_CLASSES = {
  'mistral': 'TokenizersBackend',
  'olmo2': 'TokenizersBackend',
  'phi3': 'TokenizersBackend',
  'qwen2': 'Qwen2Tokenizer',
}
DEFAULT_CLASSES = {
  'gpt2': 'GPT2Tokenizer',
  'gpt_neox': 'GPTNeoXTokenizer',
  'qwen3': 'Qwen2Tokenizer',
}
# The begin token of a class, where neither a tokenizer.json nor the settings tell it; others: <s>.
BEGIN_TOKENS = {
  'GPT2Tokenizer': '<|endoftext|>',
  'GPTNeoXTokenizer': '<|endoftext|>',
  'GemmaTokenizer': '<bos>',
  'Qwen2Tokenizer': None,
}
# The pre-tokenizer of a class, where there is no tokenizer.json.
PRE_TOKENIZER_NAMES = {
  'GPT2Tokenizer': 'gpt-2',
  'GPTNeoXTokenizer': 'gpt-2',
  'Qwen2Tokenizer': 'qwen2',
}


@contextlib.contextmanager
def translate_damage(path: pathlib.Path) -> Iterator[None]:
  """Raises BadInput for any error of reading the tokenizer in a folder or file."""
  name = f'the tokenizer in {path}'
  with file_errors.translate_damage(name, 'download it again'), errors.named(path):
    yield


def has_tokenizer(path: pathlib.Path) -> bool:
  """Whether a folder or a GGUF file has a tokenizer. Raises BadInput for a damaged file."""
  for file in (*gguf_header.parts(path), *(path / name for name in FILES)):
    git_lfs.check_file(file)
  if gguf_header.is_gguf(path):
    with translate_damage(path):
      metadata, _ = gguf_header.read(path)
      return 'tokenizer.ggml.model' in metadata
  return any((path / name).is_file() for name in TOKEN_FILES)


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns the content of each file of the tokenizer in a folder, by name."""
  paths = (folder / name for name in FILES)
  return {path.name: path.read_bytes() for path in paths if path.is_file()}


def read(path: pathlib.Path, size: int | None) -> TokenizerVocabulary:
  """Returns the vocabulary of a published model, also of a folder without weights.

  Args:
    path: a folder, or a GGUF file.
    size: number of ids of the model; None: ids of the tokenizer.

  Raises:
    BadInput: a missing or damaged tokenizer, or one with more ids.
  """
  if not has_tokenizer(path):
    raise errors.BadInput(f'{path} has no tokenizer: add its tokenizer.json')
  with translate_damage(path):
    if path.is_dir():
      return from_folder(path, size)
    metadata, _ = gguf_header.read(path)
    return from_gguf(metadata, size)


@dataclasses.dataclass(frozen=True)
class _FolderSettings:
  """The token settings in the JSON files of a folder.

  Attributes:
    config: content of config.json.
    generation: content of generation_config.json.
    tokenizer: content of tokenizer_config.json and special_tokens_map.json. For a token in both,
      the first file decides if it has `added_tokens_decoder` (transformers 5), otherwise the
      second.
    added_ids: content of added_tokens.json: ids of added tokens.
  """

  config: dict[str, Any]
  generation: dict[str, Any]
  tokenizer: dict[str, Any]
  added_ids: dict[str, int]

  @classmethod
  def read(cls, folder: pathlib.Path) -> '_FolderSettings':
    """Reads the existing files; a null in tokenizer_config.json is ignored."""
    special_tokens = _read_if_present(folder / 'special_tokens_map.json')
    own = _read_if_present(folder / 'tokenizer_config.json')
    own = {name: value for name, value in own.items() if value is not None}
    if 'added_tokens_decoder' in own:
      tokenizer = special_tokens | own
    else:
      tokenizer = own | special_tokens
    return cls(
      config=_read_if_present(folder / 'config.json'),
      generation=_read_if_present(folder / 'generation_config.json'),
      tokenizer=tokenizer,
      added_ids=_read_if_present(folder / 'added_tokens.json'),
    )

  @property
  def tokenizer_class(self) -> str | None:
    """The tokenizer class of transformers 5; None: not stated in the files."""
    model_type = self.config.get('model_type')
    named = self.tokenizer.get('tokenizer_class') or self.config.get('tokenizer_class')
    if model_type in FIXED_CLASSES or not named:
      return FIXED_CLASSES.get(model_type, DEFAULT_CLASSES.get(model_type))
    return named.removesuffix('Fast')


def _read_if_present(path: pathlib.Path) -> Any:
  return json_files.read(path) if path.exists() else {}


def from_folder(folder: pathlib.Path, size: int | None) -> TokenizerVocabulary:
  """Returns the vocabulary of a folder.

  Args:
    folder: a folder with a tokenizer.
    size: number of ids, see `TokenizerVocabulary`.

  Raises:
    BadInput: an unsupported kind of tokenizer.
    Exception: a damaged file, see `translate_damage`.
  """
  import tokenizers  # other vocabularies do not need it

  files = _FolderSettings.read(folder)
  settings = files.tokenizer
  content = _folder_content(folder, files)
  tokenizer = tokenizers.Tokenizer.from_buffer(content)
  ids = tokenizer.get_vocab()
  begin = _token_text(settings.get('bos_token'))
  if begin is None and not (folder / 'tokenizer.json').exists():
    begin = BEGIN_TOKENS.get(files.tokenizer_class, '<s>')
  start = ids.get(begin)
  added = post_processor.added_ids(json.loads(content).get('post_processor'))
  adds_start = _adds_start(folder, files, added)
  if adds_start and added.before:
    start = added.before[0]
  _log_added(folder, settings.get('add_bos_token'), adds_start)
  if len(added.before) > 1 or added.after:
    _warn_once(
      f'{folder}: tokenizer.json puts {len(added.before)} tokens before a text and '
      f'{len(added.after)} after it: at most the first of them is put before it here'
    )
  ends = [ids.get(_token_text(settings.get('eos_token')))]
  for source in (files.generation, files.config):
    if start is None:
      start = source.get('bos_token_id')
    end = source.get('eos_token_id')
    ends += end if isinstance(end, list) else [end]
  template = _chat_template(folder, settings)
  return _make_vocabulary(content, size, ids.values(), start, ends, adds_start, template)


def _adds_start(
  folder: pathlib.Path, files: _FolderSettings, added: post_processor.AddedIds
) -> bool:
  """Whether transformers 5 adds a begin token before the texts of a folder.

  The post-processor of a tokenizer.json decides, or `add_bos_token` without one. Two classes ignore
  the file, and one has no begin token unless the settings name it.
  """
  is_code_llama = files.tokenizer_class == 'CodeLlamaTokenizer'
  if not (folder / 'tokenizer.json').exists():
    if files.tokenizer_class == 'Qwen2Tokenizer' and 'bos_token' not in files.tokenizer:
      return False
    return files.tokenizer.get('add_bos_token', is_code_llama)
  if files.tokenizer_class == 'GPTNeoXTokenizer':
    return False
  return is_code_llama or bool(added.before)


def _log_added(folder: pathlib.Path, setting: bool | None, adds_start: bool) -> None:
  """Logs an ignored `add_bos_token`, or a begin token added only by it."""
  begins = f'{folder}: texts begin {"with" if adds_start else "without"} a begin token'
  has_own_file = (folder / 'tokenizer.json').exists()
  if has_own_file and setting is not None and setting != adds_start:
    _warn_once(
      f'{begins}, although add_bos_token is {setting}: as in transformers 5, the post_processor of '
      f'tokenizer.json decides'
    )
  if not has_own_file and setting is None and not adds_start:
    _warn_once(
      f'{begins}, as in transformers 5: tokenizer_config.json has no "add_bos_token": true'
    )


@functools.cache
def _warn_once(message: str) -> None:
  logging.warning(message)


def _chat_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> Any:
  """Returns the chat template of a folder, from its file or the settings; None: no template."""
  path = folder / 'chat_template.jinja'
  if path.exists():
    return path.read_text(encoding='utf-8')
  template = settings.get('chat_template')
  if isinstance(template, list):
    by_name = {named['name']: named['template'] for named in template}
    return by_name.get('default')
  return template


def from_gguf(metadata: Mapping[str, Any], size: int | None) -> TokenizerVocabulary:
  """Returns the vocabulary of the metadata of a GGUF file.

  Args:
    metadata: values by key, including `tokenizer.ggml.model`.
    size: number of ids, see `TokenizerVocabulary`.

  Raises:
    BadInput: an unsupported kind of tokenizer.
    ValueError, LookupError or TypeError: damaged metadata.
  """
  prefix = 'tokenizer.ggml.'
  fields = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
  kind = fields.get('model')
  tokens = fields.get('tokens')
  pre_tokenizer = fields.get('pre')
  types = [tokenizer_json.NORMAL] * len(tokens)
  if fields.get('token_type') is not None:
    types = fields['token_type'].tolist()
  if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
    raise ValueError('tokenizer.ggml.tokens are not distinct, or not as many as their types')
  if kind == 'llama':
    prefix = tokenizer_json.SENTENCEPIECE
    if not fields.get('add_space_prefix', True):
      prefix = tokenizer_json.NEVER
    content = tokenizer_json.from_pieces(
      tokens,
      fields['scores'].tolist(),
      types,
      prefix,
      charsmap=b'',
      added={},
    )
    start = fields.get('bos_token_id', SENTENCEPIECE_START)
    end = fields.get('eos_token_id', SENTENCEPIECE_END)
  elif kind == 'gpt2':
    content = tokenizer_json.from_byte_pairs(
      {token: i for i, token in enumerate(tokens)},
      fields.get('merges'),
      pre_tokenizer,
      added={
        token: token_type == tokenizer_json.CONTROL
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in tokenizer_json.ADDED
      },
      problem=f'tokenizer.ggml.pre is {pre_tokenizer!r}',
    )
    start = fields.get('bos_token_id')
    end = fields.get('eos_token_id')
  else:
    raise errors.BadInput(f'tokenizer.ggml.model is {kind!r}; supported: gpt2, llama')
  # What llama.cpp does where a file does not say it.
  adds_start = fields.get('add_bos_token', kind == 'llama' or pre_tokenizer == 'llama-bpe')
  ends = [end, fields.get('eot_token_id'), fields.get('eom_token_id')]
  template = metadata.get('tokenizer.chat_template')
  return _make_vocabulary(content, size, range(len(tokens)), start, ends, adds_start, template)


def _make_vocabulary(
  content: bytes,
  size: int | None,
  ids: Collection[int],
  start: Any,
  ends: Sequence[Any],
  adds_start: Any,
  chat_template: Any,
) -> TokenizerVocabulary:
  """Returns the vocabulary; start or end tokens without a valid id or row are dropped.

  Raises:
    BadInput: texts begin with a token without a row.
    TypeError: the chat template is not a text.
  """
  if chat_template is not None and not isinstance(chat_template, str):
    raise TypeError(f'the chat template is {chat_template!r}, expected a text')

  def exists(i: Any) -> bool:
    return type(i) is int and i in ids and (size is None or i < size)

  if adds_start and type(start) is int and start in ids and not exists(start):
    raise errors.BadInput(f'texts begin with the id {start:,}, but the model has {size:,} rows')
  ends = list(dict.fromkeys(end for end in ends if exists(end)))
  if not exists(start):
    start = None
    adds_start = adds_start and not ends
  vocabulary = TokenizerVocabulary(content, size, start, ends, bool(adds_start), chat_template)
  if vocabulary.tokens_without_row:
    logging.info(
      'added tokens without a row in the model: %d, such as %s; no text may have them',
      len(vocabulary.tokens_without_row),
      vocabulary.tokens_without_row[0],
    )
  return vocabulary


def _token_text(token: Any) -> str | None:
  """Returns the text of a token in a JSON file, with or without options."""
  return token.get('content') if isinstance(token, dict) else token


def _folder_content(folder: pathlib.Path, files: _FolderSettings) -> bytes:
  """Returns the tokenizer.json of a folder, or creates it."""
  if (folder / 'tokenizer.json').exists():
    return (folder / 'tokenizer.json').read_bytes()
  settings = files.tokenizer
  ids = dict(files.added_ids)
  added = dict.fromkeys(files.added_ids, False)
  for i, token in settings.get('added_tokens_decoder', {}).items():
    ids[token['content']] = int(i)
    added[token['content']] = token.get('special', False)
  special_tokens = [settings.get(f'{name}_token') for name in ('bos', 'eos', 'unk', 'pad')]
  special_tokens += settings.get('additional_special_tokens', [])
  for token in special_tokens:
    if token is not None:
      added[_token_text(token)] = True
  if (folder / 'tokenizer.model').exists():
    data = (folder / 'tokenizer.model').read_bytes()
    return tokenizer_json.from_sentencepiece_model(data, ids, added, _space_prefix(files))
  class_name = files.tokenizer_class
  return tokenizer_json.from_byte_pairs(
    json_files.read(folder / 'vocab.json') | ids,
    _read_merges(folder / 'merges.txt'),
    PRE_TOKENIZER_NAMES.get(class_name),
    added,
    problem=f'there is no tokenizer.json, and the class of the tokenizer is {class_name!r}',
  )


def _space_prefix(files: _FolderSettings) -> str:
  """Returns the rule for a space before the text of a SentencePiece model, as in transformers 5."""
  class_name = files.tokenizer.get('tokenizer_class', '').removesuffix('Fast')
  is_llama = files.config.get('model_type') == 'llama'
  if class_name:
    is_llama = class_name == 'LlamaTokenizer'
  if not is_llama:
    return tokenizer_json.SENTENCEPIECE
  if not files.tokenizer.get('add_prefix_space', True):
    return tokenizer_json.NEVER
  if files.tokenizer.get('legacy', False):
    return tokenizer_json.ALWAYS
  return tokenizer_json.FIRST


def _read_merges(path: pathlib.Path) -> list[str]:
  """Returns the merges of a merges.txt, without a version line."""
  lines = path.read_text(encoding='utf-8').splitlines()
  if lines[0].startswith('#version'):
    del lines[0]
  return [line for line in lines if line]
