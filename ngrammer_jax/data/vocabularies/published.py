"""Tokenizers of Hugging Face folders and GGUF files, as a vocabulary: always a tokenizer.json.

  tokenizer.json                    as it is
  tokenizer.model                   SentencePiece, byte pairs (older Llama, Mistral, Gemma)
  vocab.json and merges.txt         byte-level byte pairs (GPT-2, Qwen)
  metadata of a GGUF file           either of the last two

Which tokens begin and end a text, and whether the first is added to every text, is what the files
of the model say.
"""

from collections.abc import Iterator, Mapping
import contextlib
import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import gguf_header
from ngrammer_jax.data.vocabularies.sentencepiece import SPACE_MARK
from ngrammer_jax.data.vocabularies.tokenizer import TokenizerVocabulary
from ngrammer_jax.system import file_errors, json_files

# Types of tokens, the same in SentencePiece models and in GGUF files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ADDED = CONTROL, USER_DEFINED  # types of tokens that are found before the others
MAX_IDS = 2**24
SENTENCEPIECE_IDS = (('bos', 1), ('eos', 2))
WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"""
WORDS += r'\s*[\r\n]+|\s+(?!\S)|\s+'
# The pre-tokenizers of byte pairs, by the names of llama.cpp: a pattern of words, None for that of
# GPT-2. SmolLM takes single digits apart first.
PRE_TOKENIZERS = {
  **{'gpt-2': None, 'default': None, 'smollm': None},
  **{'llama-bpe': WORDS % r'\p{N}{1,3}', 'qwen2': WORDS % r'\p{N}'},
}
# Their names by the class in tokenizer_config.json or model_type, without tokenizer.json.
PRE_TOKENIZER_NAMES = {
  **dict.fromkeys(('GPT2Tokenizer', 'GPTNeoXTokenizer', 'gpt2', 'gpt_neox'), 'gpt-2'),
  **dict.fromkeys(('Qwen2Tokenizer', 'qwen2', 'qwen3'), 'qwen2'),
}


@contextlib.contextmanager
def translate_damage(path: pathlib.Path) -> Iterator[None]:
  """Raises BadInput for any error of reading the tokenizer in a folder or file."""
  with (
    file_errors.translate_damage(f'the tokenizer in {path}', 'download it again'),
    errors.named(path),
  ):
    yield


def has_tokenizer(path: pathlib.Path) -> bool:
  """Whether a folder or a GGUF file has a tokenizer. Raises BadInput for a damaged file."""
  if gguf_header.is_gguf(path):
    with translate_damage(path):
      return 'tokenizer.ggml.model' in gguf_header.read(path)[0]
  return any((path / n).is_file() for n in ('tokenizer.json', 'tokenizer.model', 'vocab.json'))


def read(path: pathlib.Path, size: int | None) -> TokenizerVocabulary:
  """Returns the vocabulary of a published model, also of a folder without weights.

  Args:
    path: a folder, or a GGUF file.
    size: number of ids of the model; None: those of the tokenizer.

  Raises:
    BadInput: it has no tokenizer, a damaged one, or one with more ids.
  """
  if not has_tokenizer(path):
    raise errors.BadInput(f'{path} has no tokenizer, which reads text: add its tokenizer.json')
  with translate_damage(path):
    return from_folder(path, size) if path.is_dir() else from_gguf(gguf_header.read(path)[0], size)


def from_folder(folder: pathlib.Path, size: int | None) -> TokenizerVocabulary:
  """Returns the vocabulary of a folder.

  Args:
    folder: a folder that `has_tokenizer`.
    size: number of ids, see `TokenizerVocabulary`.

  Raises:
    BadInput: the tokenizer is of a kind that is not supported.
    Exception: a file is damaged, see `translate_damage`.
  """
  import tokenizers  # other vocabularies do not need it

  names = 'config', 'generation_config', 'tokenizer_config', 'special_tokens_map', 'added_tokens'
  read_if_present = lambda path: json_files.read(path) if path.exists() else {}
  contents = [read_if_present(folder / f'{name}.json') for name in names]
  config, generation, settings, special_tokens, added = contents
  settings = special_tokens | {k: v for k, v in settings.items() if v is not None}
  content = _folder_content(folder, settings, added, config.get('model_type'))
  tokenizer = tokenizers.Tokenizer.from_buffer(content)
  ids = tokenizer.get_vocab()
  start = ids.get(_text(settings.get('bos_token')))
  encoding = tokenizer.encode('a')
  adds_start = bool(encoding.special_tokens_mask and encoding.special_tokens_mask[0])
  if adds_start:
    start = encoding.ids[0]
  elif not (folder / 'tokenizer.json').exists():
    adds_start = (folder / 'tokenizer.model').exists()  # as Llama, Mistral and Gemma
  # As in the official library, the setting wins over what the tokenizer does by itself.
  adds_start = settings.get('add_bos_token', adds_start)
  ends = [ids.get(_text(settings.get('eos_token')))]
  for source in (generation, config):
    start = source.get('bos_token_id') if start is None else start
    end = source.get('eos_token_id')
    ends += end if isinstance(end, list) else [end]
  template = settings.get('chat_template')
  if isinstance(template, list):
    template = next((t['template'] for t in template if t['name'] == 'default'), None)
  if (path := folder / 'chat_template.jinja').exists():
    template = path.read_text(encoding='utf-8')
  return _vocabulary(content, size, ids.values(), start, ends, adds_start, template)


def from_gguf(metadata: Mapping[str, Any], size: int | None) -> TokenizerVocabulary:
  """Returns the vocabulary of the metadata of a GGUF file.

  Args:
    metadata: values by their keys, of which `tokenizer.ggml.model` is one.
    size: number of ids, see `TokenizerVocabulary`.

  Raises:
    BadInput: the tokenizer is of a kind that is not supported.
    ValueError, LookupError or TypeError: the metadata are damaged.
  """
  get = lambda name, default=None: metadata.get(f'tokenizer.ggml.{name}', default)
  kind = get('model')
  tokens, pre_tokenizer = get('tokens'), get('pre')
  kinds = [NORMAL] * len(tokens) if get('token_type') is None else get('token_type').tolist()
  if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
    raise ValueError('tokenizer.ggml.tokens are not distinct, or not as many as their types')
  if kind == 'llama':
    is_prefixed = bool(get('add_space_prefix', True))
    content = _sentencepiece(tokens, get('scores').tolist(), kinds, is_prefixed, b'', {})
  elif kind == 'gpt2':
    added = {t: k == CONTROL for t, k in zip(tokens, kinds, strict=True) if k in ADDED}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    problem = f'tokenizer.ggml.pre is {pre_tokenizer!r}'
    content = _byte_level(vocabulary, get('merges'), pre_tokenizer, added, problem)
  else:
    raise errors.BadInput(f'tokenizer.ggml.model is {kind!r}; supported: gpt2, llama')
  # What llama.cpp does where a file does not say it.
  adds_start = get('add_bos_token', kind == 'llama' or pre_tokenizer == 'llama-bpe')
  start, end = (get(f'{n}_token_id', i if kind == 'llama' else None) for n, i in SENTENCEPIECE_IDS)
  ends, template = [end, get('eot_token_id')], metadata.get('tokenizer.chat_template')
  return _vocabulary(content, size, range(len(tokens)), start, ends, adds_start, template)


def _vocabulary(content, size, ids, start, ends, adds_start, chat_template):
  """Returns the vocabulary; a start or end that is not one of the ids is left out."""
  exists = lambda i: type(i) is int and i in ids
  ends = list(dict.fromkeys(filter(exists, ends)))
  if not exists(start):
    start, adds_start = None, adds_start and not ends
  return TokenizerVocabulary(content, size, start, ends, bool(adds_start), chat_template)


def _text(token: Any) -> str | None:
  """Returns the text of a token in a JSON file, which may have its options too."""
  return token.get('content') if isinstance(token, dict) else token


def _folder_content(folder, settings, added_ids, model_type) -> bytes:
  """Returns the content of the tokenizer.json of a folder, or makes it."""
  if (path := folder / 'tokenizer.json').exists():
    return path.read_bytes()
  names = [settings.get(f'{name}_token') for name in ('bos', 'eos', 'unk', 'pad')]
  names += settings.get('additional_special_tokens', [])
  added = dict.fromkeys(added_ids, False)
  ids = dict(added_ids)
  for i, token in settings.get('added_tokens_decoder', {}).items():
    ids[token['content']], added[token['content']] = int(i), token.get('special', False)
  added |= {_text(name): True for name in names if name is not None}
  if (path := folder / 'tokenizer.model').exists():
    return _sentencepiece_file(path.read_bytes(), ids, added)
  lines = (folder / 'merges.txt').read_text(encoding='utf-8').splitlines()
  merges = [line for line in lines[lines[0].startswith('#version') :] if line]
  name = settings.get('tokenizer_class', '').removesuffix('Fast')
  pre_tokenizer = PRE_TOKENIZER_NAMES.get(name or model_type)
  problem = f'there is no tokenizer.json, and the class of the tokenizer is {name or None!r}'
  vocabulary = json_files.read(folder / 'vocab.json') | ids
  return _byte_level(vocabulary, merges, pre_tokenizer, added, problem)


def _byte_level(vocabulary, merges, pre_tokenizer, added, problem) -> bytes:
  """Returns the tokenizer.json of byte pairs over the bytes of words.

  Args:
    vocabulary: ids of all tokens.
    merges: the pairs of tokens that are merged, with a space between them, first ones first.
    pre_tokenizer: the key of PRE_TOKENIZERS.
    added: whether a token that is found before the pre-tokenizer is special, by its text.
    problem: what the source says about the pre-tokenizer, for the error message.
  """
  from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

  if pre_tokenizer not in PRE_TOKENIZERS:
    raise errors.BadInput(
      f'{problem}: its pre-tokenizer is not supported; expected one of: {", ".join(PRE_TOKENIZERS)}'
    )
  if (largest := max(vocabulary.values(), default=0)) >= MAX_IDS:  # the library allocates them
    raise ValueError(f'a token has the id {largest:,}')
  pairs = [tuple(merge.split(' ')) for merge in merges]
  if any(len(pair) != 2 for pair in pairs):
    raise ValueError('a merge is not a pair of tokens')
  # All of Llama 3's words that are a token are that token, even if no merges lead to it.
  model = models.BPE(vocabulary, pairs, ignore_merges=pre_tokenizer == 'llama-bpe')
  tokenizer, pattern = Tokenizer(model), PRE_TOKENIZERS[pre_tokenizer]
  words = [pre_tokenizers.Split(Regex(pattern), 'isolated')] if pattern else []
  digits = [pre_tokenizers.Digits(individual_digits=True)] if pre_tokenizer == 'smollm' else []
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, *words, byte_level])
  if pre_tokenizer == 'qwen2':
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.decoder = decoders.ByteLevel()
  return _finish(tokenizer, added)


def _sentencepiece_file(data: bytes, ids: Mapping[str, int], added: Mapping[str, bool]) -> bytes:
  """Returns the tokenizer.json of a SentencePiece model and of tokens beside it."""
  from google.protobuf import message
  from sentencepiece import sentencepiece_model_pb2 as schema

  try:
    model = schema.ModelProto.FromString(data)
  except message.DecodeError as error:
    raise ValueError(f'tokenizer.model is no SentencePiece model: {error}') from error
  options, is_bpe = model.normalizer_spec, model.trainer_spec.model_type == schema.TrainerSpec.BPE
  if not is_bpe or options.remove_extra_whitespaces:
    problem = 'removes white space' if is_bpe else 'is not of byte pairs'
    raise errors.BadInput(f'tokenizer.model {problem}: such models need their tokenizer.json')
  tokens = [piece.piece for piece in model.pieces]
  scores, kinds = [p.score for p in model.pieces], [p.type for p in model.pieces]
  for token in sorted(ids.keys() - set(tokens), key=ids.__getitem__):
    if ids[token] != len(tokens):
      raise ValueError(f'the token {token} has the id {ids[token]}, expected {len(tokens)}')
    tokens, scores, kinds = [*tokens, token], [*scores, 0.0], [*kinds, USER_DEFINED]
  charsmap = options.precompiled_charsmap
  return _sentencepiece(tokens, scores, kinds, options.add_dummy_prefix, charsmap, added)


def _sentencepiece(tokens, scores, kinds, is_prefixed, charsmap, added) -> bytes:
  """Returns the tokenizer.json of byte pairs of SentencePiece.

  Args:
    tokens: the pieces.
    scores: their scores; the pair whose piece has the highest one is merged first.
    kinds: their types.
    is_prefixed: whether a space is put before every text.
    charsmap: the normaliser, empty for none.
    added: whether further tokens that are found before the others are special, by their text.
  """
  from tokenizers import Tokenizer, decoders, models, normalizers

  vocabulary = {token: i for i, token in enumerate(tokens)}
  pieces = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
  best_first = sorted(pieces, key=lambda piece: -pieces[piece])
  pairs = ((piece[:i], piece[i:]) for piece in best_first for i in range(1, len(piece)))
  merges = [(left, right) for left, right in pairs if left in pieces and right in pieces]
  unknown = tokens[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None
  options = {'unk_token': unknown, 'fuse_unk': True, 'byte_fallback': BYTE in kinds}
  tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options))
  prefix = [normalizers.Prepend(SPACE_MARK)] * is_prefixed
  replace = normalizers.Replace(' ', SPACE_MARK)
  charsmaps = [normalizers.Precompiled(charsmap)] if charsmap else []
  tokenizer.normalizer = normalizers.Sequence([*charsmaps, *prefix, replace])
  strip = [decoders.Strip(' ', 1, 0)] * is_prefixed
  steps = [decoders.Replace(SPACE_MARK, ' '), decoders.ByteFallback(), decoders.Fuse(), *strip]
  tokenizer.decoder = decoders.Sequence(steps)
  typed = zip(tokens, kinds, strict=True)
  own = {token: kind != USER_DEFINED for token, kind in typed if kind in (UNKNOWN, *ADDED)}
  return _finish(tokenizer, own | added)


def _finish(tokenizer, added: Mapping[str, bool]) -> bytes:
  """Returns a tokenizer.json with its added tokens, which are spelled as they are."""
  from tokenizers import AddedToken

  for text, is_special in added.items():
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_special)])
  return tokenizer.to_str().encode()
