"""Vocabularies: text to token ids and back.

Tokens are bytes, characters, words, SentencePiece pieces, or those of a Hugging Face tokenizer.
"""

import collections
from collections.abc import Iterable, Sequence
import io
import json
import pathlib
import re
from typing import Any, Protocol

import numpy as np

from ngrammer_jax import errors, files, json_files

DEFAULT_SENTENCEPIECE_SIZE = 4096
MAX_TRAINING_BYTES = 50_000_000  # maximum text size to learn a SentencePiece vocabulary from
MAX_FILE_BYTES = 1 << 30
ENCODINGS = ('utf-8', 'latin-1')
UNKNOWN, LINE_END = '<unk>', '<eos>'
SPACE_MARK = '\u2581'  # stands for the space inside SentencePiece
# Special tokens of a tokenizer.json that separate documents, the first that it has.
DOCUMENT_SEPARATORS = (
  *('<s>', '<bos>', '<|bos|>', '[BOS]', '<|begin_of_text|>', '<|startoftext|>'),
  '<｜begin▁of▁sentence｜>',
  *('</s>', '<eos>', '<|eos|>', '[EOS]', '<|end_of_text|>', '<|endoftext|>'),
  '<｜end▁of▁sentence｜>',
)


class Vocabulary(Protocol):
  """Interface of all vocabularies.

  Attributes:
    size: number of ids.
    document_start: id between documents and before the very first token.
    document_end: id that ends a document; None if the document start also occurs inside documents.
    line_end: id of the end of a line; None if that is not a separate word.
    unknown: id of text that is not in the vocabulary; None if there is no such id.
    definition: what determines the text of each id; equal if and only if all ids mean the same.
  """

  size: int
  document_start: int
  document_end: int | None
  line_end: int | None
  unknown: int | None
  definition: tuple[Any, ...]

  def encode(self, text: bytes) -> np.ndarray:
    """Returns the ids of a text."""

  def decode(self, ids: Iterable[int]) -> bytes:
    """Returns the text of ids."""

  def save(self, folder: pathlib.Path) -> None:
    """Writes the files that `load` reads."""


class ByteVocabulary:
  """The 256 byte values as ids, and id 256 as the document start."""

  size, document_start, document_end, line_end, unknown = 257, 256, 256, None, None
  definition = ('bytes',)

  def encode(self, text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)

  def decode(self, ids: Iterable[int]) -> bytes:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()

  def save(self, folder: pathlib.Path) -> None:
    _write_fields(folder, 'bytes')


class CharacterVocabulary:
  """The characters of a corpus, sorted by code point.

  Args:
    characters: the characters, sorted.
    encoding: encoding of the text.
    separated: whether the corpus has several documents. If so, the document start is an additional
      id. Otherwise it is the newline or space, so that the sizes are those of the literature.

  Attributes:
    num_characters: number of characters. Lower ids are characters, a higher one is not.

  Raises:
    ValueError: there are no characters, or not sorted ones, or the encoding is another one.
  """

  line_end, unknown = None, None

  def __init__(self, characters: str, encoding: str, separated: bool):
    if not characters or sorted(set(characters)) != list(characters):
      raise ValueError('expected distinct characters, sorted')
    if encoding not in ENCODINGS:
      raise ValueError(f'encoding {encoding!r} is not one of {", ".join(ENCODINGS)}')
    self._characters, self._encoding, self._separated = characters, encoding, separated
    codes = np.array([ord(c) for c in characters], '<u4')
    # If each character is a byte, texts are not converted to code points.
    self._are_bytes = encoding == 'latin-1' or codes.max(initial=0) < 128
    self._codes = codes.astype(np.uint8) if self._are_bytes else codes
    # Ids by code point. The last entry stands for all higher code points.
    self._ids = np.full(codes.max(initial=0) + 2, -1, np.int32)
    self._ids[codes] = np.arange(len(characters))
    self.num_characters, self.size = len(characters), len(characters) + separated
    separator = next((characters.index(c) for c in '\n ' if c in characters), 0)
    self.document_start = len(characters) if separated else separator
    self.document_end = self.document_start if separated else None
    self.definition = ('characters', characters, separated)

  def encode(self, text: bytes) -> np.ndarray:
    """Returns the ids of a text. Raises BadInput for a character outside the vocabulary."""
    codes = code_points(text, self._encoding)
    ids = self._ids.take(codes, mode='clip')
    if ids.min(initial=0) < 0:
      unknown = codes[np.argmax(ids < 0)]
      raise errors.BadInput(
        f'{chr(unknown)!r} is not among the {len(self._characters)} known characters'
      )
    return ids

  def decode(self, ids: Iterable[int]) -> bytes:
    ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int32)
    text = self._codes[ids[ids < self.num_characters]].tobytes()
    return text if self._are_bytes else text.decode('utf-32-le').encode(self._encoding)

  def save(self, folder: pathlib.Path) -> None:
    fields = {'encoding': self._encoding, 'separated': self._separated}
    _write_fields(folder, 'characters', characters=self._characters, **fields)


def code_points(text: bytes, encoding: str) -> np.ndarray:
  """Returns the code points of a text, unsigned integers."""
  if encoding == 'latin-1' or text.isascii():  # a byte for each character
    return np.frombuffer(text, np.uint8)
  return np.frombuffer(text.decode(encoding).encode('utf-32-le'), '<u4')


class WordVocabulary:
  """Words separated by spaces; a newline is `<eos>`, a word outside the vocabulary `<unk>`.

  Args:
    words: the words, most frequent first, including `<eos>` and `<unk>`.

  Raises:
    ValueError: these are no such words.
  """

  def __init__(self, words: list[str]):
    if not all(isinstance(word, str) for word in words):
      raise ValueError('a word is not a text')
    self._words = words
    self._ids = {word: i for i, word in enumerate(words)}
    if len(self._ids) < len(words) or not {LINE_END, UNKNOWN} <= self._ids.keys():
      raise ValueError(f'expected distinct words with {LINE_END} and {UNKNOWN}')
    self.size = len(words)
    self.document_start, self.document_end = self._ids[LINE_END], None
    self.line_end = self._ids[LINE_END]
    self.unknown = self._ids[UNKNOWN]
    self.definition = ('words', words)

  def encode(self, text: bytes) -> np.ndarray:
    ids, unknown = self._ids, self.unknown
    words = text.decode().replace('\n', f' {LINE_END} ').split()
    return np.fromiter((ids.get(w, unknown) for w in words), np.int64, len(words))

  def decode(self, ids: Iterable[int]) -> bytes:
    text = ' '.join(self._words[i] for i in ids)
    return re.sub(f' ?{LINE_END} ?', '\n', text).encode()

  def save(self, folder: pathlib.Path) -> None:
    _write_fields(folder, 'words', words=self._words)


class SentencePieceVocabulary:
  """A SentencePiece model.

  Inside SentencePiece the character U+2581 stands for the space. A learned vocabulary encodes
  U+2581 itself as bytes, so it is lossless; a pretrained one keeps SentencePiece's behaviour.

  Args:
    model: the serialised model.
    learned: whether the model is from `learn_sentencepiece`; False for a pretrained one.

  Raises:
    RuntimeError: the model is invalid.
  """

  line_end = None

  def __init__(self, model: bytes, learned: bool = False):
    import sentencepiece  # a slow import that other vocabularies do not need

    if not model:
      raise RuntimeError('an empty SentencePiece model')
    self._model, self._learned, self.definition = model, learned, ('sentencepiece', model)
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self.size = self._processor.vocab_size()
    special = (self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id(), 0)
    self.document_start = next(i for i in special if i >= 0)
    self.unknown = self._processor.unk_id()
    is_unambiguous = self.document_start != self.unknown
    self.document_end = self.document_start if is_unambiguous else None

  def __eq__(self, other: Any) -> bool:
    """Whether both always return the same ids and texts."""
    if not isinstance(other, SentencePieceVocabulary):
      return NotImplemented
    return (self._model, self._learned) == (other._model, other._learned)

  def __hash__(self) -> int:
    return hash((self._model, self._learned))

  def encode(self, text: bytes) -> np.ndarray:
    parts = text.decode().split(SPACE_MARK) if self._learned else [text.decode()]
    ids = self._processor.encode(parts[0])
    for part in parts[1:]:
      ids += [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE_MARK.encode()]
      ids += self._processor.encode(part)
    return np.array(ids, np.int64)

  def encode_all(self, texts: Sequence[bytes], threads: int) -> list[np.ndarray]:
    """Returns the ids of each text, see the function `encode_all`."""
    if self._learned and any(SPACE_MARK.encode() in text for text in texts):
      return [self.encode(text) for text in texts]
    id_lists = self._processor.encode([text.decode() for text in texts], num_threads=threads)
    return [np.array(ids, np.int32) for ids in id_lists]

  def decode(self, ids: Iterable[int]) -> bytes:
    return self._processor.decode([int(i) for i in ids]).encode()

  def token_texts(self) -> tuple[list[str], list[str]]:
    """Returns the text and the piece of every id, see the function `token_texts`."""
    pieces = [self._processor.id_to_piece(i) for i in range(self.size)]
    texts = [piece.replace(SPACE_MARK, ' ') for piece in pieces]
    for i in filter(self._processor.is_byte, range(self.size)):
      texts[i] = bytes([int(pieces[i][1:-1], 16)]).decode(errors='replace')  # <0x41>
    return texts, pieces

  def save(self, folder: pathlib.Path) -> None:
    files.write(folder / 'vocabulary.model', self._model)
    _write_fields(folder, 'sentencepiece', learned=self._learned)


class TokenizerVocabulary:
  """A Hugging Face tokenizer, from its file `tokenizer.json`.

  The document start is the first special token that the tokenizer itself adds to a text; if it adds
  none, the first of DOCUMENT_SEPARATORS that is one of its special tokens. A text that spells a
  special token is ordinary text, so no text contains the document start.

  Args:
    content: the content of the file.

  Raises:
    ValueError: the file is not a tokenizer.
    BadInput: no special token separates documents.
  """

  line_end = None

  def __init__(self, content: bytes):
    import tokenizers  # other vocabularies do not need it

    self._content, self.definition = content, ('tokenizer', content)
    self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # A tokenizer of a model with short inputs cuts and pads texts.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    model = json.loads(content)['model']
    self.unknown = model.get('unk_id')
    if model.get('unk_token') is not None:
      self.unknown = self._tokenizer.token_to_id(model['unk_token'])
    self.document_start = self.document_end = self._find_separator()
    self.size = 1 + max(self._tokenizer.get_vocab().values())  # some tokenizers leave ids out

  def _find_separator(self) -> int:
    """Returns the id of the document start. Raises BadInput if there is none."""
    added = self._tokenizer.get_added_tokens_decoder()
    special = {t.content: i for i, t in added.items() if t.special and i != self.unknown}
    own = [i for i in self._tokenizer.encode('').ids if i in special.values()]
    named = [special[name] for name in DOCUMENT_SEPARATORS if name in special]
    if not own and not named:
      raise errors.BadInput(
        f'the tokenizer has no special token that separates documents: it adds none to a text, and '
        f'none of {", ".join(DOCUMENT_SEPARATORS)} is among its special tokens '
        f'({", ".join(special) or "none"}); add one of them to its added_tokens'
      )
    return (own or named)[0]

  def __eq__(self, other: Any) -> bool:
    """Whether both always return the same ids and texts."""
    if not isinstance(other, TokenizerVocabulary):
      return NotImplemented
    return self._content == other._content

  def __hash__(self) -> int:
    return hash(self._content)

  def encode(self, text: bytes) -> np.ndarray:
    return self.encode_all([text])[0]

  def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """Returns the ids of each text, see the function `encode_all`."""
    decoded = [text.decode() for text in texts]
    encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
    id_arrays = [np.array(encoding.ids, np.int32) for encoding in encodings]
    # Some models have a piece that is spelled as the document start: T5's Unigram, for example.
    return [ids[ids != self.document_start] for ids in id_arrays]

  def decode(self, ids: Iterable[int]) -> bytes:
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True).encode()

  def token_texts(self) -> tuple[list[str], list[str]]:
    """Returns the text and the token of every id, see the function `token_texts`."""
    single_ids = [[i] for i in range(self.size)]
    texts = self._tokenizer.decode_batch(single_ids, skip_special_tokens=False)
    return texts, [self._tokenizer.id_to_token(i) or '' for i in range(self.size)]

  def save(self, folder: pathlib.Path) -> None:
    files.write(folder / 'vocabulary.tokenizer.json', self._content)
    _write_fields(folder, 'tokenizer')


def read(kind: str, path: pathlib.Path) -> Vocabulary:
  """Returns the vocabulary of `data.vocabulary_path`, of the kind `data.vocabulary`."""
  return read_tokenizer(path) if kind == 'tokenizer' else read_sentencepiece(path)


def read_sentencepiece(path: pathlib.Path) -> SentencePieceVocabulary:
  """Returns the vocabulary of a pretrained model. Raises BadInput for another file."""
  try:
    return SentencePieceVocabulary(path.read_bytes())
  except RuntimeError as error:
    raise errors.BadInput(f'data.vocabulary_path={path} is not a SentencePiece model') from error


def read_tokenizer(path: pathlib.Path) -> TokenizerVocabulary:
  """Returns the vocabulary of a tokenizer.json. Raises BadInput for another file."""
  try:
    return TokenizerVocabulary(path.read_bytes())
  except errors.BadInput as error:
    raise errors.BadInput(f'data.vocabulary_path={path}: {error}') from error
  except ValueError as error:
    raise errors.BadInput(
      f'data.vocabulary_path={path} is not the tokenizer.json of a Hugging Face tokenizer: {error}'
    ) from error


def encode_all(vocabulary: Vocabulary, texts: Sequence[bytes], threads: int) -> list[np.ndarray]:
  """Returns the ids of each text, with several threads if the vocabulary supports it."""
  if isinstance(vocabulary, SentencePieceVocabulary):
    return vocabulary.encode_all(texts, threads)
  if isinstance(vocabulary, TokenizerVocabulary):
    return vocabulary.encode_all(texts)  # it has a pool of threads
  return [vocabulary.encode(text) for text in texts]


def token_texts(vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
  """Returns the text of every token id, and the token as the vocabulary writes it.

  The text of a token that is a piece of a UTF-8 character contains U+FFFD. A space before a word
  belongs to the text. A special token is a text of its own.
  """
  if isinstance(vocabulary, SentencePieceVocabulary | TokenizerVocabulary):
    return vocabulary.token_texts()
  tokens = [vocabulary.decode([i]) for i in range(vocabulary.size)]
  return [t.decode(errors='replace') for t in tokens], [f'<0x{t.hex().upper()}>' for t in tokens]


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


def learn_characters(texts: Iterable[bytes], encoding: str, separated: bool) -> CharacterVocabulary:
  """Returns the vocabulary of all characters that occur in the texts, which may be all splits."""
  codes: set[int] = set()
  for text in texts:
    codes.update(np.flatnonzero(np.bincount(code_points(text, encoding))).tolist())
  return CharacterVocabulary(''.join(map(chr, sorted(codes))), encoding, separated)


def learn_words(texts: Iterable[bytes], size: int | None) -> WordVocabulary:
  """Returns the most frequent words, ties in order of appearance. A size of None takes all."""
  counts: collections.Counter[str] = collections.Counter()
  for text in texts:
    counts.update(text.decode().replace('\n', f' {LINE_END} ').split())
  for symbol in (UNKNOWN, LINE_END):
    counts.setdefault(symbol, 0)
  words = [word for word, _ in counts.most_common()]
  if size is not None and size < len(words):
    frequent = [w for w in words if w not in (UNKNOWN, LINE_END)][: size - 2]
    selected = {*frequent, UNKNOWN, LINE_END}
    words = [w for w in words if w in selected]
  return WordVocabulary(words)


def learn_sentencepiece(texts: Iterable[bytes], size: int | None) -> SentencePieceVocabulary:
  """Learns a lossless byte-pair SentencePiece vocabulary.

  The text is not normalised, white space is kept, a newline is a separate piece, and rare
  characters are encoded as bytes. The result depends on the text alone.

  Args:
    texts: UTF-8 texts, whose lines are the training sentences.
    size: number of pieces. None: DEFAULT_SENTENCEPIECE_SIZE.

  Raises:
    BadInput: the size is too small or too large for this text.
  """
  import sentencepiece

  size = DEFAULT_SENTENCEPIECE_SIZE if size is None else size
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=(line for t in texts for line in t.decode().split('\n') if line),
      model_writer=model,
      model_type='bpe',
      vocab_size=size,
      normalization_rule_name='identity',
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      allow_whitespace_only_pieces=True,
      byte_fallback=True,
      user_defined_symbols=['\n'],
      character_coverage=0.9999,
      max_sentence_length=1 << 20,
      unk_id=0,
      bos_id=1,
      eos_id=-1,
      pad_id=-1,
      minloglevel=2,
    )
  except RuntimeError as error:
    reason = re.sub(r' Increase vocab_size.*', '', ' '.join(str(error).split('] ')[-1].split()))
    raise errors.BadInput(
      f'data.vocabulary_size={size} does not fit this text: {reason}'
    ) from error
  return SentencePieceVocabulary(model.getvalue(), learned=True)


def _write_fields(folder: pathlib.Path, kind: str, **fields) -> None:
  text = json.dumps({'kind': kind, **fields}, ensure_ascii=False)
  files.write(folder / 'vocabulary.json', text)
