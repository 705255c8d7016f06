"""Cache of tokenised corpora: tokenised once, then memory-mapped.

A cache folder holds a learned vocabulary, or `meta.json` and, for each split, `<split>.tokens` (raw
unsigned integers), `<split>.starts.npy` and `<split>.keys.npy`. It is written to a temporary folder
and renamed when complete, so a killed process never leaves an incomplete cache. Only the user can
read it.
"""

import array
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import math
import pathlib
import shutil
import tempfile
import time
from typing import Any, BinaryIO

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import corpora, documents, kinds, split_files, text_files, vocabularies
from ngrammer_jax.data.formats import ANY, Layout
from ngrammer_jax.data.shards import Shards
from ngrammer_jax.system import files, progress

# The keys of a config that decide on its text, beside the files.
KEYS = (
  *('newlines', 'text_field', 'document_separator', 'validation_share', 'begin_of_text'),
  'drop_duplicates',
)
REMEDY = 'convert it, or use data.vocabulary=bytes'  # for text that is not UTF-8
FORMAT_VERSION = 3  # increase it when the cache files or the reading of a corpus change


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
    document_keys: a hash of each document of each split, sorted, uint64; of `train_shards` those
      of the first documents.
    counts: numbers of tokens, bytes and documents of each split, for the log.
    train_shards: shards of the training split, if it is tokenised during training. It is not in
      `splits` then.
  """

  splits: dict[str, TokenSplit]
  vocabulary: vocabularies.Vocabulary
  content_hash: str
  document_keys: dict[str, np.ndarray]
  counts: str
  train_shards: Shards | None = None


def prepare(
  config: data_config.DataConfig,
  corpus: corpora.Corpus,
  vocabulary: vocabularies.Vocabulary,
  may_delete: bool,
) -> TokenCorpus:
  """Loads a tokenised corpus from the cache, or tokenises it.

  Args:
    config: data config.
    corpus: the corpus of the config.
    vocabulary: the vocabulary.
    may_delete: whether damaged and abandoned folders of the cache may be deleted; False if
      the user has not named `data.cache_dir`.

  Raises:
    BadInput: the corpus is truncated, empty, has a wrong checksum or is not valid UTF-8, or the
      vocabulary does not fit it; or a damaged folder may not be deleted.
  """
  name = f'{corpus.name.replace("/", "-")}-{_hash([_source(config, corpus), vocabulary.digest])}'

  def write(folder):
    logging.info('preparing %s into %s', corpus.name, folder.parent)
    corpus.verify()
    as_read, splits_meta = documents.drop_duplicates(config, corpus), {}
    sizes, keys_by_split, digest = _measure(as_read, vocabulary.encoding)
    for split, keys in keys_by_split.items():
      np.save(folder / f'{split}.keys.npy', np.sort(np.frombuffer(keys, np.uint64)))
    with progress.Progress(f'tokenising {corpus.name}', sum(sizes.values()), 'bytes') as bar:
      for split in sizes:
        separator = vocabulary.separator(config.begin_of_text)
        with (folder / f'{split}.tokens').open('wb') as file:
          starts, meta = _encode(as_read, split, vocabulary, separator, file, bar.advance)
        np.save(folder / f'{split}.starts.npy', starts)
        splits_meta[split] = meta | {'empty': getattr(corpus.splits[split], 'num_empty', 0)}
        if not meta['tokens']:
          raise _too_little_text(corpus, split)
    digest.update(vocabulary.digest.encode())
    meta = {'corpus': corpus.name, 'content_hash': digest.hexdigest(), 'splits': splits_meta}
    (folder / 'meta.json').write_text(json.dumps(meta, indent=2), encoding='utf-8')

  def load(folder):
    meta, splits = files.read_json(folder / 'meta.json'), {}
    for split, fields in meta['splits'].items():
      tokens = np.memmap(folder / f'{split}.tokens', fields['dtype'], mode='r')
      if len(tokens) != fields['tokens']:
        raise ValueError(f'{split}.tokens has {len(tokens)} tokens, expected {fields["tokens"]}')
      starts = np.load(folder / f'{split}.starts.npy')
      splits[split] = _split(tokens, starts, fields, vocabulary)
    keys = {
      split: np.load(folder / f'{split}.keys.npy', mmap_mode='r')
      for split in dict.fromkeys(['train', *splits])
    }
    counts = [f'{split}: {_format_counts(fields)}' for split, fields in meta['splits'].items()]
    text_hash = meta['content_hash']
    return TokenCorpus(splits, vocabulary, text_hash, keys, '; '.join(counts), corpus.train_shards)

  return _load_or_write(config, name, load, write, may_delete)


def open_vocabulary(
  config: data_config.DataConfig, all_corpora: Sequence[corpora.Corpus], may_delete: bool
) -> vocabularies.Vocabulary:
  """Reads the vocabulary of a config, or loads it from the cache, or learns it.

  Each part of a mixture is read in proportion to its weight.

  Args:
    config: data config.
    all_corpora: its corpus, or those of the parts of a mixture.
    may_delete: see `prepare`.

  Raises:
    BadInput: the file is no such vocabulary, the parts cannot share a learned one, or there is too
      little text.
  """
  if config.vocabulary == 'bytes':
    return vocabularies.ByteVocabulary()
  if config.vocabulary_path is not None:
    path = files.user_path('data.vocabulary_path', config.vocabulary_path)
    return vocabularies.read(config.vocabulary, path, config.vocabulary_size)
  parts = [*zip(config.parts().values(), all_corpora, strict=True)]
  # Parts of a mixture share a vocabulary of all their documents, also of those that occur twice.
  as_read = all_corpora if len(parts) > 1 else [documents.drop_duplicates(*parts[0])]
  sources = [_source(part, corpus) for part, corpus in parts]
  name = _hash([config.vocabulary, config.vocabulary_size, config.weights(), sources])

  def write(folder):
    vocabulary = _learn_vocabulary(config, as_read)
    vocabulary.save(folder)
    meta = {'vocabulary_hash': vocabulary.digest}
    (folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')

  def load(folder):
    vocabulary = vocabularies.load(folder)
    if files.read_json(folder / 'meta.json')['vocabulary_hash'] != vocabulary.digest:
      raise ValueError('the vocabulary has changed')
    return vocabulary

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
  key, named = 'data.cache_dir', config.cache_dir
  root = files.user_path(key, named) if named else files.user_cache(key)
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
      with contextlib.suppress(FileNotFoundError):  # another process may remove it too
        files.remove(folder)
  try:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if may_delete:
      _remove_abandoned(root)
    options = {'prefix': 'preparing-', 'ignore_cleanup_errors': True}
    with tempfile.TemporaryDirectory(dir=root, **options) as scratch:
      write(pathlib.Path(scratch))
      pathlib.Path(scratch).rename(folder)
  except OSError as error:
    if not folder.exists():  # else another process was faster
      raise errors.BadInput(
        f'data.cache_dir={root} cannot be written: {error.strerror}; no incomplete cache is left'
        f'{"" if config.cache_dir else "; name another folder with NGRAMMER_JAX_CACHE"}'
      ) from error
  return load(folder)


def _remove_abandoned(root: pathlib.Path) -> None:
  """Removes incomplete caches that are more than a day old: their processes were killed."""
  for folder in root.glob('preparing-*'):
    with contextlib.suppress(OSError):  # another process may remove it too
      changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
      if time.time() - changed > 86_400:
        shutil.rmtree(folder, ignore_errors=True)


def _source(config: data_config.DataConfig, corpus: corpora.Corpus) -> list[Any]:
  """Returns what decides on the text of a corpus: files with sizes, times and splits, and keys."""
  stamps, sizes = [*map(split_files.stamp, corpus.files)], sorted(corpus.first_sizes.items())
  return [corpus.name, stamps, sizes, corpus.reading, [getattr(config, key) for key in KEYS]]


def _hash(value: Any) -> str:
  """Returns a hash of a JSON value, for the name of a folder of the cache."""
  return hashlib.sha256(json.dumps([FORMAT_VERSION, value]).encode()).hexdigest()[:16]


def _measure(corpus: corpora.Corpus, encoding: str) -> tuple[dict[str, int], dict, Any]:
  """Measures the splits that are tokenised in advance.

  Returns the bytes of each, the keys of the documents of each split, one after another, and the
  hash of all text.
  """
  splits, sizes, keys, digest = dict(corpus.splits), {}, {}, hashlib.sha256()
  if corpus.train_shards is not None:
    keys['train'] = documents.sample_keys(splits.pop('train'))

  def measure(split, document):
    for chunk in _read_chunks([document], encoding):
      sizes[split] += len(chunk)
      digest.update(chunk)
      yield chunk

  for split, split_documents in splits.items():
    sizes[split], keys[split] = 0, bytearray()
    digest.update(split.encode())
    for document in split_documents:
      keys[split] += documents.key(measure(split, document))[: documents.SHORT_KEY]
    digest.update(str(sizes[split]).encode())
    if not sizes[split]:
      raise _too_little_text(corpus, split)
  if corpus.train_shards is not None:  # too large to hash their contents
    for number, file in enumerate(corpus.files):
      size = corpus.first_sizes.get((number, file.name), files.size(file))
      digest.update(f'{file.name} {size}'.encode())
  return sizes, keys, digest


def _too_little_text(corpus: corpora.Corpus, split: str) -> errors.BadInput:
  return errors.BadInput(
    f'the {split} split of {corpus.name} is empty: {corpus.files[0]} holds too little text'
  )


def _learn_vocabulary(
  config: data_config.DataConfig, all_corpora: Sequence[corpora.Corpus]
) -> vocabularies.Vocabulary:
  """Returns a vocabulary that is learned from corpora."""
  if config.vocabulary == 'characters' and len({c.encoding for c in all_corpora}) > 1:
    raise errors.BadInput(
      "data.vocabulary='characters': the characters of enwik8 are bytes, so other parts of "
      'data.mixture cannot share them: use bytes or sentencepiece'
    )
  for corpus in all_corpora:
    corpus.verify()
  logging.info('learning the vocabulary')
  if config.vocabulary == 'characters':
    splits = [split for corpus in all_corpora for split in corpus.splits.values()]
    has_several = lambda split: len(list(itertools.islice(split, 2))) > 1
    separated = len(all_corpora) > 1 or any(map(has_several, splits))
    encoding = all_corpora[0].encoding
    chunks = _read_chunks(itertools.chain(*splits), encoding)
    return vocabularies.learn_characters(chunks, encoding, separated)
  # Characters of enwik8 are bytes by convention; all other vocabularies read UTF-8.
  read_train = lambda corpus: _read_chunks(corpus.splits['train'], 'utf-8')
  if config.vocabulary == 'words':
    texts = itertools.chain.from_iterable(map(read_train, all_corpora))
    return vocabularies.learn_words(texts, config.vocabulary_size)
  samples = []
  for corpus, weight in zip(all_corpora, config.weights(), strict=True):
    limit, train = vocabularies.MAX_TRAINING_BYTES * weight, corpus.splits['train']
    if limit and corpus.train_shards is not None:
      samples.append(_read_chunks(dataclasses.replace(train, max_bytes=limit), 'utf-8'))
    elif limit:
      size = sum(map(len, read_train(corpus)))
      if not size:
        raise _too_little_text(corpus, 'train')
      samples.append(itertools.islice(read_train(corpus), 0, None, math.ceil(size / limit)))
  return vocabularies.learn_sentencepiece(itertools.chain(*samples), config.vocabulary_size)


def _read_chunks(documents, encoding: str, remedy: str = REMEDY) -> Iterator[bytes]:
  """Yields the chunks of all documents. Raises BadInput if one that has to be UTF-8 is not."""
  for document in documents:
    offset = 0
    for chunk in document.read_chunks():
      if encoding == 'utf-8':
        text_files.decode(chunk, document.name, remedy, offset)
      offset += len(chunk)
      yield chunk


def _encode(
  corpus: corpora.Corpus,
  split: str,
  vocabulary: vocabularies.Vocabulary,
  separator: Sequence[int],
  file: BinaryIO,
  advance: Callable[[int], None] = lambda size: None,
) -> tuple[np.ndarray, dict[str, Any]]:
  """Writes the ids of a split, and of what separates its documents, to a file.

  Returns the index of the first token of each document, and the entry of the split in meta.json.

  Raises BadInput if the text of a document is not in the vocabulary.
  """
  dtype = np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)
  if corpus.is_sectioned and vocabulary.line_end == vocabulary.document_start:
    separator = ()
  starts, text_bytes, is_lossless = array.array('q'), 0, not corpus.is_altered
  spelled = dict.fromkeys(documents.separators(vocabulary), 0)
  for document in corpus.splits[split]:
    if starts:
      file.write(np.array(separator, dtype).tobytes())
    starts.append(file.tell() // dtype.itemsize)
    for chunk in _read_chunks([document], vocabulary.encoding, 'convert it'):
      for token in spelled:
        spelled[token] += chunk.count(token.encode())
      with errors.named(document.name):
        ids = vocabulary.encode(chunk)
      is_lossless = is_lossless and vocabulary.decode(ids) == chunk
      text_bytes += len(chunk)
      file.write(ids.astype(dtype).tobytes())
      advance(len(chunk))
  documents.log_separators(f'{corpus.name}, {split}', spelled)
  counts = {'tokens': file.tell() // dtype.itemsize, 'bytes': text_bytes, 'documents': len(starts)}
  meta = counts | {'lossless': is_lossless, 'dtype': dtype.name}
  return np.array(starts, np.int64), meta


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
  formats = {path: kinds.identify(path, layout.any_bytes)}
  text = corpora.open_documents([path], layout, formats.values())
  corpus = corpora.Corpus(str(path), (path,), {'the text': text})
  file = io.BytesIO()
  starts, meta = _encode(corpus, 'the text', vocabulary, vocabulary.separator(), file)
  if not meta['bytes']:
    raise errors.BadInput(f'{path} is empty; expected text')
  kinds.log_files(str(path), {'': [path]}, counts=_format_counts(meta), formats=formats)
  split = _split(np.frombuffer(file.getbuffer(), meta['dtype']), starts, meta, vocabulary)
  if vocabulary.adds_start or len(split.tokens) < 2:
    return split
  start, starts = int(split.tokens[0]), np.maximum(starts - 1, 0)
  return dataclasses.replace(split, tokens=split.tokens[1:], starts=starts, document_start=start)


def _format_counts(fields: dict[str, Any]) -> str:
  """Formats the entry of a split in meta.json."""
  empty = f' ({fields["empty"]:,} empty ones skipped)' if fields.get('empty') else ''
  tokens, size, count = (f'{fields[key]:,}' for key in ('tokens', 'bytes', 'documents'))
  return f'{tokens} tokens, {size} bytes of text, {count} documents{empty}'


def _split(tokens, starts, meta, vocabulary):
  """Returns the tokens that `_encode` wrote, with the arrays and the entry that it returned."""
  text_bytes = meta['bytes'] if meta['lossless'] else None
  start, num_characters = vocabulary.document_start, vocabulary.num_characters
  return TokenSplit(tokens, starts, text_bytes, start, num_characters)
