"""From text to token ids and back: bytes, characters, words, SentencePiece.

Every vocabulary has `size`, `document_start` (the id that stands between documents and
before the very first token), `document_end` (the id that tells in a text that it is over;
None where the document start may also stand inside), `line_end` (the id of the end of a line
where that is a word of its own, else None), `unknown` (the id of whatever it cannot write, None
where it has no such id), `encode(bytes) -> ids`, `decode(ids) -> bytes`, and is kept as a few
files by `save` and `load`.
"""

import collections
from collections.abc import Iterable, Sequence
import io
import json
import pathlib
import re
from typing import Protocol

import numpy as np

from ngrammer_jax import errors, files

KINDS = ('bytes', 'characters', 'words', 'sentencepiece')
DEFAULT_PIECES = 4096
LEARN_FROM = 50_000_000  # bytes that a SentencePiece vocabulary is learned from, at most
UNKNOWN, END = '<unk>', '<eos>'
SPACE_MARK = '\u2581'


class Vocabulary(Protocol):
  """What the rest of the program knows of a vocabulary."""

  size: int
  document_start: int
  document_end: int | None
  line_end: int | None
  unknown: int | None

  def encode(self, text: bytes) -> np.ndarray: ...

  def decode(self, ids: Iterable[int]) -> bytes: ...

  def save(self, folder: pathlib.Path) -> None: ...


class ByteVocabulary:
  """The 256 bytes, and 256 as the document start."""

  size, document_start, document_end, line_end, unknown = 257, 256, 256, None, None

  def encode(self, text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)

  def decode(self, ids: Iterable[int]) -> bytes:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()

  def save(self, folder: pathlib.Path) -> None:
    _write(folder, {'kind': 'bytes'})


class CharacterVocabulary:
  """The characters of a corpus, in the order of their code points.

  A corpus of several documents has one id more, the document start. A single text is
  entered through its newline or space, so that the counts are those of the literature.
  """

  line_end, unknown = None, None

  def __init__(self, characters: str, encoding: str, separated: bool):
    self._characters, self._encoding, self._separated = characters, encoding, separated
    self._codes = np.array([ord(c) for c in characters], np.uint32)
    self.size = len(characters) + separated
    entry = next((characters.index(c) for c in '\n ' if c in characters), 0)
    self.document_start = len(characters) if separated else entry
    self.document_end = self.document_start if separated else None

  def encode(self, text: bytes) -> np.ndarray:
    """Raises BadInput for a character that the vocabulary does not have."""
    codes = np.frombuffer(text.decode(self._encoding).encode('utf-32-le'), np.uint32)
    ids = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
    unknown = codes[self._codes[ids] != codes]
    if unknown.size:
      raise errors.BadInput(
        f'{chr(unknown[0])!r} is not among the {len(self._characters)} known characters'
      )
    return ids

  def decode(self, ids: Iterable[int]) -> bytes:
    text = ''.join(self._characters[i] for i in ids if i < len(self._characters))
    return text.encode(self._encoding)

  def save(self, folder: pathlib.Path) -> None:
    _write(
      folder,
      {
        'kind': 'characters',
        'characters': self._characters,
        'encoding': self._encoding,
        'separated': self._separated,
      },
    )


class WordVocabulary:
  """Words between spaces, most frequent first; a newline is `<eos>`, a rare word `<unk>`."""

  def __init__(self, words: list[str]):
    self._words = words
    self._ids = {word: i for i, word in enumerate(words)}
    self.size = len(words)
    self.document_start, self.document_end = self._ids[END], None
    self.line_end = self._ids[END]
    self.unknown = self._ids[UNKNOWN]

  def encode(self, text: bytes) -> np.ndarray:
    ids, unknown = self._ids, self.unknown
    words = text.decode().replace('\n', f' {END} ').split()
    return np.fromiter((ids.get(w, unknown) for w in words), np.int64, len(words))

  def decode(self, ids: Iterable[int]) -> bytes:
    text = ' '.join(self._words[i] for i in ids)
    return re.sub(f' ?{END} ?', '\n', text).encode()

  def save(self, folder: pathlib.Path) -> None:
    _write(folder, {'kind': 'words', 'words': self._words})


class SentencePieceVocabulary:
  """Pieces of words, learned (`learn_pieces`) or given as a model file.

  Inside SentencePiece the character U+2581 stands for the space. A learned vocabulary
  spells it in bytes, and so loses nothing; a given one behaves as it was made to.
  """

  line_end = None

  def __init__(self, model: bytes, learned: bool = False):
    import sentencepiece  # here, so that other vocabularies do not wait for it

    if not model:
      raise RuntimeError('an empty SentencePiece model')
    self._model, self._learned = model, learned
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self.size = self._processor.vocab_size()
    special = (self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id(), 0)
    self.document_start = next(i for i in special if i >= 0)
    self.unknown = self._processor.unk_id()
    ends = self.document_start != self.unknown
    self.document_end = self.document_start if ends else None

  def encode(self, text: bytes) -> np.ndarray:
    parts = text.decode().split(SPACE_MARK) if self._learned else [text.decode()]
    ids = self._processor.encode(parts[0])
    for part in parts[1:]:
      ids += [self._processor.piece_to_id(f'<0x{byte:02X}>') for byte in SPACE_MARK.encode()]
      ids += self._processor.encode(part)
    return np.array(ids, np.int64)

  def encode_all(self, texts: Sequence[bytes], threads: int) -> list[np.ndarray]:
    """The ids of each text."""
    if self._learned and any(SPACE_MARK.encode() in text for text in texts):
      return [self.encode(text) for text in texts]
    ids = self._processor.encode([text.decode() for text in texts], num_threads=threads)
    return [np.array(of_text, np.int32) for of_text in ids]

  def decode(self, ids: Iterable[int]) -> bytes:
    return self._processor.decode([int(i) for i in ids]).encode()

  def save(self, folder: pathlib.Path) -> None:
    files.write(folder / 'vocabulary.model', self._model)
    _write(folder, {'kind': 'sentencepiece', 'learned': self._learned})


def encode_all(vocabulary: Vocabulary, texts: Sequence[bytes], threads: int) -> list[np.ndarray]:
  """The ids of each text, by some threads where the vocabulary can."""
  if isinstance(vocabulary, SentencePieceVocabulary):
    return vocabulary.encode_all(texts, threads)
  return [vocabulary.encode(text) for text in texts]


def load(folder: pathlib.Path) -> Vocabulary:
  """The vocabulary that `save` wrote into a folder. Raises BadInput where it is damaged."""
  try:
    fields = json.loads((folder / 'vocabulary.json').read_text(encoding='utf-8'))
    kind = fields.pop('kind')
    if kind == 'sentencepiece':
      return SentencePieceVocabulary((folder / 'vocabulary.model').read_bytes(), **fields)
    classes = {'bytes': ByteVocabulary, 'characters': CharacterVocabulary, 'words': WordVocabulary}
    return classes[kind](**fields)
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
    raise errors.BadInput(
      f'{folder} holds no whole vocabulary ({type(error).__name__}: {error}); the command that '
      f'trains writes it again where steps are left'
    ) from error


def learn_characters(texts: Iterable[bytes], encoding: str, separated: bool) -> CharacterVocabulary:
  """Every character that occurs: an alphabet, so all splits may be looked at."""
  codes: set[int] = set()
  for text in texts:
    decoded = text.decode(encoding).encode('utf-32-le')
    codes.update(np.unique(np.frombuffer(decoded, np.uint32)).tolist())
  return CharacterVocabulary(''.join(map(chr, sorted(codes))), encoding, separated)


def learn_words(texts: Iterable[bytes], size: int | None) -> WordVocabulary:
  """Words in order of frequency, ties in order of appearance."""
  counts: collections.Counter[str] = collections.Counter()
  for text in texts:
    counts.update(text.decode().replace('\n', f' {END} ').split())
  for symbol in (UNKNOWN, END):
    counts.setdefault(symbol, 0)
  words = [word for word, _ in counts.most_common()]
  if size is not None and size < len(words):
    kept = [w for w in words if w not in (UNKNOWN, END)][: size - 2]
    words = [w for w in words if w in {*kept, UNKNOWN, END}]
  return WordVocabulary(words)


def learn_pieces(texts: Iterable[bytes], size: int | None) -> SentencePieceVocabulary:
  """Byte-pair pieces that lose nothing of the text.

  The text is not normalised, white space is kept, a newline is a piece of its own and a
  character that has none is spelled in bytes. The result depends on the text alone.

  Raises:
    BadInput: the size is too small or too large for this text.
  """
  import sentencepiece

  size = DEFAULT_PIECES if size is None else size
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


def _write(folder: pathlib.Path, fields: dict) -> None:
  files.write(folder / 'vocabulary.json', json.dumps(fields, ensure_ascii=False))
