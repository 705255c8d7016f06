"""Cache of tokenised corpora: tokenised once, then memory-mapped.

A cache folder holds the vocabulary, `meta.json` and, for each split, `<split>.tokens` (raw unsigned
integers) and `<split>.starts.npy`. It is written to a temporary folder and renamed when complete,
so a killed process never leaves an incomplete cache. Only the user can read it.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import pathlib
import shutil
import tempfile
import time
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import corpora, documents, shards, split_files, text_files, vocabularies
from ngrammer_jax.data.formats import ANY, Layout
from ngrammer_jax.system import files, progress

# The files of a published model that decide on its tokens; its weights do not.
TOKENIZER_FILES = (
  *('tokenizer.json', 'tokenizer.model', 'vocab.json', 'merges.txt', 'added_tokens.json'),
  *('tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja'),
  *('config.json', 'generation_config.json'),
)
ADDED_KEYS = (
  *('text_field', 'document_separator', 'validation_share', 'begin_of_text', 'drop_duplicates'),
)
FORMAT_VERSION = 1  # increase it when the format of the cache files changes


@dataclasses.dataclass(frozen=True)
class TokenSplit:
  """The tokens of one split.

  Attributes:
    tokens: memory-mapped ids. Documents are separated by the document start; if that is the line
      end, and each document ends with one, no further token separates them.
    starts: for each document, the index of its first token.
    text_bytes: length of the raw text; None if decoding the tokens does not reproduce the text.
    document_start: the id before the first token.
    num_characters: see `vocabularies.Vocabulary`.
  """

  tokens: np.ndarray
  starts: np.ndarray
  text_bytes: int | None
  document_start: int
  num_characters: int | None = None

  def window(self, first: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs, targets and document starts of the targets [first, first + length).

    The input is the token before the target. Indices beyond the end of the split wrap around to
    its beginning, which starts a document.
    """
    indices = np.arange(first, first + length) % len(self.tokens)
    targets = self.tokens[indices].astype(np.int32)
    inputs = self.tokens[indices - 1].astype(np.int32)
    inputs[indices == 0] = self.document_start
    documents = np.minimum(np.searchsorted(self.starts, indices), len(self.starts) - 1)
    return inputs, targets, self.starts[documents] == indices


def join(splits: Sequence[TokenSplit]) -> TokenSplit:
  """Returns splits one after another, separated by the document start."""
  if len(splits) == 1:
    return splits[0]
  separator = np.array([splits[0].document_start], splits[0].tokens.dtype)
  tokens = [array for split in splits for array in (split.tokens, separator)]
  offsets = itertools.accumulate((len(split.tokens) + 1 for split in splits), initial=0)
  starts = [split.starts + offset for split, offset in zip(splits, offsets, strict=False)]
  return dataclasses.replace(
    splits[0], tokens=np.concatenate(tokens[:-1]), starts=np.concatenate(starts), text_bytes=None
  )


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
  """A tokenised corpus.

  Attributes:
    splits: tokens of each split.
    vocabulary: the vocabulary.
    content_hash: hash of the text and the vocabulary.
    train_shards: shards of the training split, if it is tokenised during training. It is not in
      `splits` then.
  """

  splits: dict[str, TokenSplit]
  vocabulary: vocabularies.Vocabulary
  content_hash: str
  train_shards: shards.Shards | None = None


def open_corpus(config: data_config.DataConfig) -> corpora.Corpus:
  """Opens the corpus of a config, one of `corpora.CORPORA`."""
  layout = layout_of(config)
  return corpora.open_corpus(
    config.corpus, config.path, config.newlines, layout, config.validation_share
  )


def prepare(
  config: data_config.DataConfig,
  corpus: corpora.Corpus | None = None,
  may_delete: bool = True,
  vocabulary: vocabularies.Vocabulary | None = None,
) -> TokenCorpus:
  """Loads a tokenised corpus from the cache, or tokenises it.

  Args:
    config: data config.
    corpus: the corpus of the config. None: open it with `open_corpus`.
    may_delete: whether damaged and abandoned folders of the cache may be deleted; False if
      the user has not named `data.cache_dir`.
    vocabulary: the vocabulary. None: read it, or learn it from the corpus, as the config says.

  Raises:
    BadInput: the corpus is missing, truncated, empty, has a wrong checksum or is not
      valid UTF-8, or the vocabulary does not fit it; or a damaged folder may not be deleted.
  """
  config.check()
  corpus = corpus or open_corpus(config)
  key = _cache_key(config, corpus, vocabulary)
  load = lambda folder: _load(folder, corpus.train_shards)

  def write(folder):
    corpus.verify()
    _write_cache(config, corpus, folder, vocabulary)

  return _load_or_write(config, f'{corpus.name.replace("/", "-")}-{key}', load, write, may_delete)


def learn_shared_vocabulary(
  config: data_config.DataConfig, all_corpora: Sequence[corpora.Corpus], may_delete: bool = True
) -> vocabularies.Vocabulary | None:
  """Loads the vocabulary of the parts of a mixture from the cache, or learns it from all of them.

  Each part is read in proportion to its weight. None: the vocabulary is not learned.

  Raises:
    BadInput: the parts cannot share such a vocabulary.
  """
  if config.vocabulary == 'bytes' or config.vocabulary_path is not None:
    return None
  weights = config.weights()
  encoded = [_with_encoding(config, corpus) for corpus in all_corpora]
  if len({corpus.encoding for corpus in encoded}) > 1:
    raise errors.BadInput(
      f'data.vocabulary={config.vocabulary!r}: the characters of enwik8 are bytes, so other parts '
      f'of data.mixture cannot share them: use bytes or sentencepiece'
    )
  parts = zip(config.parts().values(), all_corpora, strict=True)
  keys = [_cache_key(part, corpus, None) for part, corpus in parts]
  name = hashlib.sha256(json.dumps([keys, weights]).encode()).hexdigest()[:16]

  def write(folder):
    sizes = [_measure(corpus)[0] for corpus in encoded]
    _create_vocabulary(config, encoded, sizes, weights).save(folder)
    meta = {'vocabulary_hash': _vocabulary_hash(folder)}
    (folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')

  load = lambda folder: _load_vocabulary(folder, files.read_json(folder / 'meta.json'))
  return _load_or_write(config, f'vocabulary-{name}', load, write, may_delete)


def _load_or_write(config, name, load, write, may_delete):
  """Loads a folder of the cache, after writing it if it is missing or damaged.

  Args:
    config: data config.
    name: name of the folder.
    load: loads a folder; raises one of `files.DAMAGE_ERRORS` if it is damaged.
    write: writes an empty folder.
    may_delete: see `prepare`.
  """
  if config.cache_dir:
    root = files.user_path('data.cache_dir', config.cache_dir)
  else:
    root = files.user_cache('data.cache_dir')
  folder = root / name
  if folder.exists():
    try:
      return load(folder)
    except files.DAMAGE_ERRORS as error:
      if files.is_busy(error):
        raise
      if not may_delete:
        raise errors.BadInput(
          f'{folder} is damaged ({error}), and only the config of the run names this cache: delete '
          f'the folder, and it is prepared again'
        ) from error
      logging.warning('%s is damaged (%s); preparing it again', folder, error)
      files.remove(folder)
  try:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if may_delete:
      _remove_abandoned(root)
    _create_folder(folder, write)
  except OSError as error:
    raise errors.BadInput(
      f'data.cache_dir={root} cannot be written: {error.strerror}; no incomplete cache is left'
      f'{"" if config.cache_dir else "; name another folder with NGRAMMER_JAX_CACHE"}'
    ) from error
  return load(folder)


def layout_of(config: data_config.DataConfig, has_paragraphs: bool = True) -> Layout:
  """Returns where the text of a document is, see `formats.Layout`."""
  fields, separator = config.text_field, config.document_separator
  return Layout(fields, separator, has_paragraphs, config.vocabulary == 'bytes')


def _create_folder(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
  """Writes a folder of the cache, unless another process is faster."""
  with tempfile.TemporaryDirectory(
    prefix='preparing-', dir=folder.parent, ignore_cleanup_errors=True
  ) as name:
    scratch = pathlib.Path(name)
    write(scratch)
    try:
      scratch.rename(folder)
    except OSError:
      if not folder.exists():
        raise


def _remove_abandoned(root: pathlib.Path) -> None:
  """Removes incomplete caches that are more than a day old: their processes were killed."""
  for folder in root.glob('preparing-*'):
    if time.time() - folder.stat().st_mtime > 86_400:
      shutil.rmtree(folder, ignore_errors=True)


def _cache_key(
  config: data_config.DataConfig, corpus: corpora.Corpus, vocabulary: vocabularies.Vocabulary | None
) -> str:
  """Returns a hash of the settings and of the paths, sizes and times of the files."""
  paths = list(corpus.files)
  if config.vocabulary_path is not None:
    path = files.user_path('data.vocabulary_path', config.vocabulary_path)
    own = [path / name for name in TOKENIZER_FILES if (path / name).exists()]
    paths += own if path.is_dir() else [path]
  stats = list(map(split_files.stamp, paths))
  settings = [config.vocabulary, config.vocabulary_size, config.newlines]
  if vocabulary is not None:
    settings.append(hashlib.sha256(repr(vocabulary.definition).encode()).hexdigest())
  if corpus.first_sizes:
    settings.append(sorted(corpus.first_sizes.items()))
  if corpus.reading:
    settings.append(corpus.reading)
  # Keys that an earlier version did not have: only other values than the default change the name.
  for field in (f for f in dataclasses.fields(config) if f.name in ADDED_KEYS):
    if (value := getattr(config, field.name)) != field.default:
      settings.append([field.name, value])
  text = json.dumps([FORMAT_VERSION, corpus.name, stats, settings])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write_cache(
  config: data_config.DataConfig,
  corpus: corpora.Corpus,
  folder: pathlib.Path,
  vocabulary: vocabularies.Vocabulary | None,
) -> None:
  """Learns the vocabulary, if there is none, and tokenises all splits into an empty folder."""
  logging.info('preparing %s into %s', corpus.name, folder.parent)
  corpus = _with_encoding(config, corpus)
  if config.drop_duplicates:
    corpus = documents.without_duplicates(corpus)
  sizes, digest = _measure(corpus)
  vocabulary = vocabulary or _create_vocabulary(config, [corpus], [sizes], [1.0])
  vocabulary.save(folder)
  splits_meta = {}
  with progress.Progress(f'tokenising {corpus.name}', sum(sizes.values()), 'bytes') as bar:
    for split in sizes:
      separator = vocabulary.separator(config.begin_of_text)
      meta = splits_meta[split] = _write_split(corpus, split, vocabulary, separator, folder, bar)
      counts = (f'{meta[key]:,}' for key in ('tokens', 'bytes', 'documents'))
      empty = getattr(corpus.splits[split], 'num_empty', 0)
      skipped = f'; {empty:,} empty ones skipped' if empty else ''
      logging.info('%s: %s tokens, %s bytes, %s documents%s', split, *counts, skipped)
  vocabulary_hash = _vocabulary_hash(folder)
  digest.update(vocabulary_hash.encode())
  meta = {
    'corpus': corpus.name,
    'content_hash': digest.hexdigest(),
    'vocabulary_hash': vocabulary_hash,
    'splits': splits_meta,
  }
  (folder / 'meta.json').write_text(json.dumps(meta, indent=2), encoding='utf-8')


def _with_encoding(config: data_config.DataConfig, corpus: corpora.Corpus) -> corpora.Corpus:
  """Returns a corpus with the encoding in which the vocabulary reads it."""
  # Characters of enwik8 are bytes by convention; all other vocabularies read UTF-8.
  encodings = {'bytes': 'bytes', 'characters': corpus.encoding}
  return dataclasses.replace(corpus, encoding=encodings.get(config.vocabulary, 'utf-8'))


def _measure(corpus: corpora.Corpus) -> tuple[dict[str, int], Any]:
  """Returns the bytes of each split that is tokenised in advance, and the hash of all text."""
  sizes, digest, overlap = {}, hashlib.sha256(), documents.Overlap(corpus)
  for split, split_documents in corpus.splits.items():
    if split == 'train' and corpus.train_shards is not None:
      continue
    sizes[split] = 0
    digest.update(split.encode())
    for document in split_documents:
      key = documents.key()
      for chunk in _read_chunks([document], corpus.encoding):
        sizes[split] += len(chunk)
        digest.update(chunk)
        key.update(chunk.strip())
      overlap.add(split, key.digest())
    digest.update(str(sizes[split]).encode())
    if not sizes[split]:
      raise errors.BadInput(
        f'the {split} split of {corpus.name} is empty: {corpus.files[0]} holds too little text'
      )
  overlap.log()
  if corpus.train_shards is not None:  # too large to hash their contents
    for file in corpus.files:
      size = corpus.first_sizes.get(file.name, file.stat().st_size)
      digest.update(f'{file.name} {size}'.encode())
  return sizes, digest


def _vocabulary_hash(folder: pathlib.Path) -> str:
  digest = hashlib.sha256()
  for path in sorted(folder.glob('vocabulary.*')):
    digest.update(path.read_bytes())
  return digest.hexdigest()


def _create_vocabulary(
  config: data_config.DataConfig,
  all_corpora: Sequence[corpora.Corpus],
  sizes: Sequence[dict[str, int]],
  weights: Sequence[float],
) -> vocabularies.Vocabulary:
  """Returns the vocabulary of a config, learned from corpora whose splits have these sizes."""
  if config.vocabulary == 'bytes':
    return vocabularies.ByteVocabulary()
  if config.vocabulary_path is not None:
    path = files.user_path('data.vocabulary_path', config.vocabulary_path)
    size = config.vocabulary_size if config.vocabulary == 'tokenizer' else None
    return vocabularies.read(config.vocabulary, path, size)
  encoding = all_corpora[0].encoding
  if config.vocabulary == 'characters':
    splits = [split for corpus in all_corpora for split in corpus.splits.values()]
    has_several = lambda split: len(list(itertools.islice(split, 2))) > 1
    separated = len(all_corpora) > 1 or any(map(has_several, splits))
    chunks = _read_chunks(itertools.chain(*splits), encoding)
    chunks = _show_progress(chunks, sum(sum(part.values()) for part in sizes))
    return vocabularies.learn_characters(chunks, encoding, separated)
  texts = [_read_chunks(corpus.splits['train'], encoding) for corpus in all_corpora]
  train_bytes = [part.get('train', 0) for part in sizes]
  if config.vocabulary == 'words':
    chunks = _show_progress(itertools.chain(*texts), sum(train_bytes))
    return vocabularies.learn_words(chunks, config.vocabulary_size)
  limits = [vocabularies.MAX_TRAINING_BYTES * weight for weight in weights]
  samples = [
    _take_bytes(chunks, limit)
    if corpus.train_shards is not None
    else itertools.islice(chunks, 0, None, math.ceil(size / limit))
    for corpus, chunks, size, limit in zip(all_corpora, texts, train_bytes, limits, strict=True)
    if limit
  ]
  logging.info('learning the vocabulary from at most %s bytes', f'{sum(limits):,.0f}')
  return vocabularies.learn_sentencepiece(itertools.chain(*samples), config.vocabulary_size)


def _show_progress(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
  """Yields the chunks, of that many bytes in all, and shows the progress of learning."""
  with progress.Progress('learning the vocabulary', size, 'bytes') as bar:
    for chunk in chunks:
      yield chunk
      bar.advance(len(chunk))


def _take_bytes(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
  """Yields chunks until they hold at least `size` bytes."""
  for chunk in chunks:
    yield chunk
    size -= len(chunk)
    if size <= 0:
      return


def _read_chunks(documents, encoding: str) -> Iterator[bytes]:
  """Yields the chunks of all documents. Raises BadInput if a chunk is not valid UTF-8."""
  for document in documents:
    offset = 0
    for chunk in document.read_chunks():
      if encoding == 'utf-8':
        remedy = 'convert it, or use data.vocabulary=bytes'
        text_files.decode(chunk, document.name, remedy, offset)
      offset += len(chunk)
      yield chunk


def _write_split(corpus, split, vocabulary, separator, folder, bar) -> dict[str, Any]:
  """Writes the tokens and document starts of a split. Returns its entry in meta.json."""
  dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.uint32
  tokens, text_bytes, lossless, starts = 0, 0, not corpus.is_altered, []
  spelled = documents.SpelledSeparators(corpus.name, vocabulary)
  separated = not (corpus.is_sectioned and vocabulary.line_end == vocabulary.document_start)
  with (folder / f'{split}.tokens').open('wb') as file:
    for i, document in enumerate(corpus.splits[split]):
      if i and separated:
        file.write(np.array(separator, dtype).tobytes())
        tokens += len(separator)
      starts.append(tokens)
      for chunk in _read_chunks([document], corpus.encoding):
        spelled.count(chunk)
        ids = vocabulary.encode(chunk)
        lossless = lossless and vocabulary.decode(ids) == chunk
        file.write(ids.astype(dtype).tobytes())
        tokens += len(ids)
        text_bytes += len(chunk)
        bar.advance(len(chunk))
  spelled.log(split)
  np.save(folder / f'{split}.starts.npy', np.array(starts, np.int64))
  return {
    'tokens': tokens,
    'bytes': text_bytes,
    'documents': len(starts),
    'lossless': lossless,
    'dtype': np.dtype(dtype).name,
  }


def encode_file(
  path: pathlib.Path, vocabulary: vocabularies.Vocabulary, layout: Layout = ANY
) -> TokenSplit:
  """Returns the tokens of a file, in memory: a text as one document, other files as their own.

  For a model that reads no document start, the first token is read and not predicted.

  Raises:
    BadInput: the file is missing, empty, damaged or no text, it is not valid UTF-8, or the
      vocabulary lacks a character of it.
  """
  if not path.is_file():
    raise errors.BadInput(f'{path}: no such file; expected a text file')
  ids, starts, num_tokens, text_bytes, is_lossless = [], [], 0, 0, True
  spelled = documents.SpelledSeparators(str(path), vocabulary)
  for document in corpora.open_documents(path, layout):
    if starts:
      ids.append(np.array(vocabulary.separator(), np.int32))
      num_tokens += len(ids[-1])
    starts.append(num_tokens)
    offset = 0
    for chunk in document.read_chunks():
      spelled.count(chunk)
      try:
        ids.append(vocabulary.encode(chunk).astype(np.int32))
      except UnicodeDecodeError:
        text_files.decode(chunk, document.name, offset=offset)  # raises BadInput with the position
        raise
      except errors.BadInput as error:
        raise errors.BadInput(f'{path}: {error}') from error
      offset += len(chunk)
      num_tokens += len(ids[-1])
      is_lossless = is_lossless and vocabulary.decode(ids[-1]) == chunk
    text_bytes += offset
  if not text_bytes:
    raise errors.BadInput(f'{path} is empty; expected text')
  spelled.log('the text')
  tokens, start, starts = np.concatenate(ids), vocabulary.document_start, np.array(starts, np.int64)
  if not vocabulary.adds_start and len(tokens) > 1:
    start, tokens, starts = int(tokens[0]), tokens[1:], np.maximum(starts - 1, 0)
  text_bytes = text_bytes if is_lossless else None
  return TokenSplit(tokens, starts, text_bytes, start, vocabulary.num_characters)


def _load(folder: pathlib.Path, train_shards: shards.Shards | None) -> TokenCorpus:
  """Loads a cache folder. Raises one of `files.DAMAGE_ERRORS` if it is damaged."""
  meta = files.read_json(folder / 'meta.json')
  vocabulary, splits = _load_vocabulary(folder, meta), {}
  for split, fields in meta['splits'].items():
    tokens = np.memmap(folder / f'{split}.tokens', fields['dtype'], mode='r')
    if len(tokens) != fields['tokens']:
      raise ValueError(f'{split}.tokens has {len(tokens)} tokens, expected {fields["tokens"]}')
    starts = np.load(folder / f'{split}.starts.npy')
    text_bytes = fields['bytes'] if fields['lossless'] else None
    start = vocabulary.document_start
    splits[split] = TokenSplit(tokens, starts, text_bytes, start, vocabulary.num_characters)
  return TokenCorpus(splits, vocabulary, meta['content_hash'], train_shards)


def _load_vocabulary(folder: pathlib.Path, meta: dict[str, Any]) -> vocabularies.Vocabulary:
  """Loads the vocabulary of a cache folder. Raises ValueError if it has changed."""
  if _vocabulary_hash(folder) != meta['vocabulary_hash']:
    raise ValueError('the vocabulary has changed')
  return vocabularies.load(folder)
