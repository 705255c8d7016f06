"""Creates a missing tokenizer.json from the tokens and merges of a model.

byte pairs over bytes           GPT-2, Llama 3, Qwen
byte pairs of SentencePiece     older Llama, Mistral, Gemma
"""

from collections.abc import Mapping, Sequence
import typing

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies.base import SPACE_MARK

if typing.TYPE_CHECKING:
  import tokenizers

# Types of tokens, the same in SentencePiece models and in GGUF files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ADDED = (CONTROL, USER_DEFINED)  # types of tokens matched before the others
MAX_IDS = 2**24
# Where a space is put before a text. The last two are those of the class LlamaTokenizer of
# transformers, which puts none before a text that begins with one.
SENTENCEPIECE = 'sentencepiece'  # before each part between added tokens
NEVER = 'never'
FIRST = 'first'  # before a text that begins with no added token
ALWAYS = 'always'  # as SENTENCEPIECE
WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
  r'\s*[\r\n]+|\s+(?!\S)|\s+'
)
# The pre-tokenizers of byte pairs, by the names of llama.cpp: a pattern of words, None for that of
# GPT-2. SmolLM takes single digits apart first.
PRE_TOKENIZERS = {
  'gpt-2': None,
  'default': None,
  'smollm': None,
  'llama-bpe': WORDS % r'\p{N}{1,3}',
  'qwen2': WORDS % r'\p{N}',
}
# A text split differently by the pre-tokenizers.
PROBE = "It's 12345 nai\u0308ve, don'T\n\n  x!?\n\t a"


def from_byte_pairs(
  vocabulary: Mapping[str, int],
  merges: Sequence[str],
  pre_tokenizer: str | None,
  added: Mapping[str, bool],
  problem: str,
) -> bytes:
  """Returns the tokenizer.json of byte pairs over the bytes of words.

  Args:
    vocabulary: ids of all tokens.
    merges: the merged pairs of tokens, separated by a space, in order.
    pre_tokenizer: the key of PRE_TOKENIZERS.
    added: whether each added token is special, by its text.
    problem: description of the pre-tokenizer in the source, for the error message.

  Raises:
    BadInput: the pre-tokenizer is not supported.
    ValueError: an id is too large, or a merge is not a pair.
  """
  from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

  if pre_tokenizer not in PRE_TOKENIZERS:
    raise errors.BadInput(
      f'{problem}: its pre-tokenizer is not supported; expected one of: {", ".join(PRE_TOKENIZERS)}'
    )
  largest = max(vocabulary.values(), default=0)
  if largest >= MAX_IDS:  # the library allocates them
    raise ValueError(f'a token has the id {largest:,}')
  pairs = [tuple(merge.split(' ')) for merge in merges]
  if any(len(pair) != 2 for pair in pairs):
    raise ValueError('a merge is not a pair of tokens')
  # Llama 3's words in the vocabulary are one token, even if no merges lead to it.
  model = models.BPE(vocabulary, pairs, ignore_merges=pre_tokenizer == 'llama-bpe')
  tokenizer = Tokenizer(model)
  pattern = PRE_TOKENIZERS[pre_tokenizer]
  steps = []
  if pre_tokenizer == 'smollm':
    steps.append(pre_tokenizers.Digits(individual_digits=True))
  if pattern is not None:
    steps.append(pre_tokenizers.Split(Regex(pattern), 'isolated'))
  steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
  if pre_tokenizer == 'qwen2':
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.decoder = decoders.ByteLevel()
  return _to_json(tokenizer, added)


def splits_like(content: bytes, pre_tokenizer: str) -> bool:
  """Whether a tokenizer.json has byte pairs and splits words like a pre-tokenizer.

  Args:
    content: the content of the file.
    pre_tokenizer: a key of PRE_TOKENIZERS.
  """
  from tokenizers import Tokenizer, models

  tokenizer = Tokenizer.from_buffer(content)
  if not isinstance(tokenizer.model, models.BPE):
    return False
  expected = Tokenizer.from_buffer(from_byte_pairs({}, [], pre_tokenizer, {}, problem=''))
  return _split(tokenizer, PROBE) == _split(expected, PROBE)


def _split(tokenizer: 'tokenizers.Tokenizer', text: str) -> list[str]:
  """Returns the words of a text, before merging pairs."""
  if tokenizer.normalizer is not None:
    text = tokenizer.normalizer.normalize_str(text)
  if tokenizer.pre_tokenizer is None:
    return [text]
  return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def from_sentencepiece_model(
  data: bytes, ids: Mapping[str, int], added: Mapping[str, bool], prefix: str = SENTENCEPIECE
) -> bytes:
  """Returns the tokenizer.json of a SentencePiece model and of added tokens.

  Args:
    data: the serialised model.
    ids: ids of the added tokens.
    added: see `from_byte_pairs`.
    prefix: see `from_pieces`; for SENTENCEPIECE, the model decides.

  Raises:
    BadInput: a kind of model that needs its tokenizer.json.
    ValueError: a damaged model, or non-consecutive ids.
  """
  from google.protobuf import message
  from sentencepiece import sentencepiece_model_pb2 as schema

  try:
    model = schema.ModelProto.FromString(data)
  except message.DecodeError as error:
    raise ValueError(f'tokenizer.model is no SentencePiece model: {error}') from error
  options = model.normalizer_spec
  needs_file = 'such models need their tokenizer.json'
  if model.trainer_spec.model_type != schema.TrainerSpec.BPE:
    raise errors.BadInput(f'tokenizer.model is not of byte pairs: {needs_file}')
  if options.remove_extra_whitespaces:
    raise errors.BadInput(f'tokenizer.model removes white space: {needs_file}')
  tokens = [piece.piece for piece in model.pieces]
  scores = [piece.score for piece in model.pieces]
  types = [piece.type for piece in model.pieces]
  for token in sorted(ids.keys() - set(tokens), key=ids.__getitem__):
    if ids[token] != len(tokens):
      raise ValueError(f'the token {token} has the id {ids[token]}, expected {len(tokens)}')
    tokens.append(token)
    scores.append(0.0)
    types.append(USER_DEFINED)
  if prefix == SENTENCEPIECE and not options.add_dummy_prefix:
    prefix = NEVER
  charsmap = options.precompiled_charsmap
  return from_pieces(tokens, scores, types, prefix, charsmap, added)


def from_pieces(
  tokens: Sequence[str],
  scores: Sequence[float],
  types: Sequence[int],
  prefix: str,
  charsmap: bytes,
  added: Mapping[str, bool],
) -> bytes:
  """Returns the tokenizer.json of byte pairs of SentencePiece.

  Args:
    tokens: the pieces.
    scores: their scores; the pair with the highest score is merged first.
    types: their types.
    prefix: rule for a space before a text: SENTENCEPIECE, NEVER, FIRST or ALWAYS.
    charsmap: the normaliser, empty for none.
    added: whether each added token is special, by its text.
  """
  from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

  vocabulary = {token: i for i, token in enumerate(tokens)}
  unknown = None
  if UNKNOWN in types:
    unknown = tokens[types.index(UNKNOWN)]
  model = models.BPE(
    vocabulary,
    _merges(tokens, scores, types),
    unk_token=unknown,
    fuse_unk=True,
    byte_fallback=BYTE in types,
  )
  tokenizer = Tokenizer(model)
  normalizing = []
  if charsmap:
    normalizing.append(normalizers.Precompiled(charsmap))
  if prefix == SENTENCEPIECE:
    normalizing.append(normalizers.Prepend(SPACE_MARK))
  if prefix in (FIRST, ALWAYS):
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
  normalizing.append(normalizers.Replace(' ', SPACE_MARK))
  tokenizer.normalizer = normalizers.Sequence(normalizing)
  decoding = [decoders.Replace(SPACE_MARK, ' '), decoders.ByteFallback(), decoders.Fuse()]
  if prefix != NEVER:
    decoding.append(decoders.Strip(' ', 1, 0))
  tokenizer.decoder = decoders.Sequence(decoding)
  is_special = {
    token: token_type != USER_DEFINED
    for token, token_type in zip(tokens, types, strict=True)
    if token_type in (UNKNOWN, *ADDED)
  }
  return _to_json(tokenizer, is_special | added)


def _merges(
  tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
  """Returns all pairs of pieces that form a piece, highest score first."""
  pieces = {
    token: score
    for token, score, token_type in zip(tokens, scores, types, strict=True)
    if token_type == NORMAL
  }
  merges = []
  for piece in sorted(pieces, key=lambda piece: -pieces[piece]):
    for i in range(1, len(piece)):
      left, right = piece[:i], piece[i:]
      if left in pieces and right in pieces:
        merges.append((left, right))
  return merges


def _to_json(tokenizer: 'tokenizers.Tokenizer', added: Mapping[str, bool]) -> bytes:
  """Returns a tokenizer.json with verbatim added tokens."""
  from tokenizers import AddedToken

  for text, is_special in added.items():
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_special)])
  return tokenizer.to_str().encode()
