"""Tiny tokenizers of four kinds, as the files of a Hugging Face folder.

Each has every byte or character, a few longer tokens, and special tokens. All are written out, so
that they stay the same whatever version of a library reads them.
"""

from collections.abc import Sequence
import json
import pathlib
import string

SPACE_MARK = '\u2581'
BEGIN, END, TURN_START, TURN_END = '<s>', '</s>', '<|im_start|>', '<|im_end|>'
UNKNOWN = '<unk>'
SPECIAL = (UNKNOWN, BEGIN, END, TURN_START, TURN_END)
KINDS = ('byte_level', 'metaspace', 'sentencepiece', 'word_level')
# Pieces of words; each is a piece that came before and one more character.
LONGER = ('th', 'the', 'in', 'an', 'and', 'er', 'es', 'on', 'yo', 'you')
WORDS = ('the', 'and', 'you', 'in', 'on', 'yes', 'no', 'a', 'cat', 'sat', 'é', '漢', '\U0001f642')
MARKS = ('.', ',', ':', '?', '!', '#', '<', '>', '|', '/', '_')
# Characters beyond ASCII that are tokens; others are several bytes.
LETTERS = 'éö'


def write(folder: pathlib.Path, kind: str, has_begin: bool) -> None:
  """Writes the files of a tokenizer.

  Args:
    folder: the folder of a model.
    kind: one of KINDS.
    has_begin: whether a text begins with the begin token. Without it there is none, except in a
      SentencePiece model, which always has one.
  """
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'eos_token': END,
    'unk_token': UNKNOWN,
    'additional_special_tokens': [TURN_START, TURN_END],
    'clean_up_tokenization_spaces': False,
    'model_max_length': 1_000_000,
  }
  if kind == 'sentencepiece':
    pieces = _pieces()
    (folder / 'tokenizer.model').write_bytes(_sentencepiece_model(pieces))
    settings |= {'tokenizer_class': 'LlamaTokenizer', 'bos_token': BEGIN, 'legacy': False}
    settings |= {'add_bos_token': has_begin, 'add_eos_token': False}
    settings['added_tokens_decoder'] = {
      str(len(pieces) + i): _added(text) for i, text in enumerate((TURN_START, TURN_END))
    }
  else:
    content = {'byte_level': _byte_level, 'metaspace': _metaspace, 'word_level': _word_level}
    tokenizer = content[kind]()
    if has_begin:
      settings['bos_token'] = BEGIN
      tokenizer['post_processor'] = _begins_with(tokenizer, BEGIN)
    (folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


def vocabulary(kind: str) -> list[str]:
  """The tokens of a kind by id, those of a text as the tokenizer spells them."""
  if kind == 'sentencepiece':
    return [*_pieces(), TURN_START, TURN_END]
  tokenizers = {'byte_level': _byte_level, 'metaspace': _metaspace, 'word_level': _word_level}
  return list(tokenizers[kind]()['model']['vocab'])


def _added(text: str) -> dict[str, object]:
  """The options of a special token."""
  names = ('single_word', 'lstrip', 'rstrip', 'normalized')
  return {'content': text, **dict.fromkeys(names, False), 'special': True}


def _tokenizer(vocabulary: Sequence[str], model: dict, **parts: object) -> dict:
  """The content of a tokenizer.json."""
  ids = {token: i for i, token in enumerate(vocabulary)}
  return {
    'version': '1.0',
    'added_tokens': [{'id': ids[token], **_added(token)} for token in SPECIAL],
    'normalizer': None,
    'pre_tokenizer': None,
    'post_processor': None,
    'decoder': None,
    **parts,
    'model': model | {'vocab': ids},
  }


def _begins_with(tokenizer: dict, token: str) -> dict:
  """A post-processor that puts a special token before a text."""
  special = {'SpecialToken': {'id': token, 'type_id': 0}}
  texts = [{'Sequence': {'id': name, 'type_id': i}} for i, name in enumerate('AB')]
  i = tokenizer['model']['vocab'][token]
  return {
    'type': 'TemplateProcessing',
    'single': [special, texts[0]],
    'pair': [special, *texts],
    'special_tokens': {token: {'id': token, 'ids': [i], 'tokens': [token]}},
  }


def byte_characters() -> dict[int, str]:
  """The character of each byte in byte-level tokenizers."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in plain]
  return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _byte_level() -> dict:
  """Byte pairs over bytes, as in GPT-2; characters beyond ASCII have two to four tokens."""
  characters = byte_characters()
  space = characters[32]
  pairs = [(piece[:-1], piece[-1]) for piece in LONGER]
  pairs += [(space, 't'), (space, 'a'), (f'{space}t', 'h')]
  vocabulary = [*SPECIAL, *(characters[byte] for byte in range(256)), *map(''.join, pairs)]
  model = {'type': 'BPE', 'merges': [' '.join(pair) for pair in pairs]}
  step = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
  return _tokenizer(vocabulary, model, pre_tokenizer=step, decoder=step)


def _metaspace() -> dict:
  """Byte pairs after a mark for each space, with bytes for characters that are no token."""
  pieces = _pieces()
  vocabulary = [*pieces, TURN_START, TURN_END]
  merges = [f'{piece[:-1]} {piece[-1]}' for piece in pieces if _is_longer(piece)]
  model = {'type': 'BPE', 'merges': merges, 'unk_token': UNKNOWN, 'byte_fallback': True}
  decoders = [
    {'type': 'Replace', 'pattern': {'String': SPACE_MARK}, 'content': ' '},
    {'type': 'ByteFallback'},
    {'type': 'Fuse'},
    {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0},
  ]
  space = {'type': 'Metaspace', 'replacement': SPACE_MARK}
  return _tokenizer(
    vocabulary,
    model | {'fuse_unk': True},
    pre_tokenizer=space | {'prepend_scheme': 'first', 'split': False},
    decoder={'type': 'Sequence', 'decoders': decoders},
  )


def _word_level() -> dict:
  """Words and marks; everything else is unknown."""
  model = {'type': 'WordLevel', 'unk_token': UNKNOWN}
  return _tokenizer([*SPECIAL, *WORDS, *MARKS], model, pre_tokenizer={'type': 'Whitespace'})


def _pieces() -> list[str]:
  """The pieces of a SentencePiece model: special ones, bytes, characters, longer ones."""
  bytes_ = [f'<0x{byte:02X}>' for byte in range(256)]
  characters = [SPACE_MARK, *string.ascii_lowercase, *MARKS, *LETTERS]
  longer = [*LONGER, f'{SPACE_MARK}t', f'{SPACE_MARK}a', f'{SPACE_MARK}th']
  return [UNKNOWN, BEGIN, END, *bytes_, *characters, *longer]


def _is_longer(piece: str) -> bool:
  return len(piece) > 1 and not piece.startswith('<')


def _sentencepiece_model(pieces: Sequence[str]) -> bytes:
  """A model whose first pieces are joined first."""
  from sentencepiece import sentencepiece_model_pb2 as schema

  kinds = schema.ModelProto.SentencePiece
  model = schema.ModelProto()
  model.trainer_spec.model_type = schema.TrainerSpec.BPE
  model.trainer_spec.byte_fallback = True
  model.normalizer_spec.name = 'identity'
  model.normalizer_spec.add_dummy_prefix = True
  model.normalizer_spec.remove_extra_whitespaces = False
  for i, piece in enumerate(pieces):
    kind = kinds.NORMAL
    if piece == UNKNOWN:
      kind = kinds.UNKNOWN
    elif piece in (BEGIN, END):
      kind = kinds.CONTROL
    elif piece.startswith('<0x'):
      kind = kinds.BYTE
    model.pieces.add(piece=piece, score=-i, type=kind)
  return model.SerializeToString()
