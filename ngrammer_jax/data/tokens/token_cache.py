"""Cache of tokenised corpora: tokenised once, then memory-mapped.

A cache folder holds `meta.json` and, for each split, `<split>.tokens` (raw unsigned integers),
`<split>.starts.npy` and `<split>.keys.npy`; with `data.loss_on=assistant` also `<split>.counts`, a
byte for each token, 1 with loss. A streamed training split only has keys.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import pathlib
import tempfile
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import duplicates, shards, split_reader
from ngrammer_jax.data.documents.corpus import Corpus, Shards, counts_of
from ngrammer_jax.data.files import compression, file_formats, file_log
from ngrammer_jax.data.formats import DEFAULT_OPTIONS, ReadOptions
from ngrammer_jax.data.tokens import cache_folders, document_encoder, token_split, token_writer
from ngrammer_jax.system import files, json_files, progress


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
  """A tokenised corpus.

  Attributes:
    splits: tokens of each split.
    vocabulary: the vocabulary.
    content_hash: hash of the text (for streamed files, of names and sizes) and the vocabulary.
    document_keys: a hash of each document of each split, sorted, uint64; for `train_shards` only of
      the first documents.
    counts: numbers of tokens, bytes and documents of each split, for the log.
    encoder: encoder of documents.
    train_shards: shards of a streamed training split, not in `splits`.
  """

  splits: dict[str, token_split.TokenSplit]
  vocabulary: vocabularies.Vocabulary
  content_hash: str
  document_keys: dict[str, np.ndarray]
  counts: str
  encoder: document_encoder.DocumentEncoder
  train_shards: Shards | None = None


def prepare(
  config: data_config.DataConfig,
  corpus: Corpus,
  vocabulary: vocabularies.Vocabulary,
  may_delete: bool,
) -> TokenCorpus:
  """Loads a tokenised corpus from the cache, or tokenises it.

  Args:
    config: data config.
    corpus: the corpus of the config.
    vocabulary: the vocabulary.
    may_delete: whether damaged and abandoned folders of the cache may be deleted; False unless the
      user has set `data.cache_dir`.

  Raises:
    BadInput: a truncated or empty corpus, a wrong checksum, invalid UTF-8, an unsuitable
      vocabulary, or a damaged folder that must not be deleted.
  """
  encoder = document_encoder.make(vocabulary, config.chat, config.loss_on)
  if corpus.train_shards is not None and config.chat:
    _check_first(corpus, encoder)
  key = cache_folders.hash_json([corpus.identity(config), vocabulary.digest])
  name = f'{corpus.name.replace("/", "-")}-{key}'

  def write(folder: pathlib.Path) -> None:
    _write(config, corpus, encoder, folder)

  def load(folder: pathlib.Path) -> TokenCorpus:
    return _load(corpus, encoder, folder)

  return cache_folders.load_or_write(config, name, load, write, may_delete)


def _check_first(corpus: Corpus, encoder: document_encoder.DocumentEncoder) -> None:
  """Raises BadInput if the first document of a streamed training split cannot be encoded."""
  for document in corpus.splits['train']:
    with errors.named(document.name):
      encoder.prepare(b''.join(document.read_chunks()))
    return


def _write(
  config: data_config.DataConfig,
  corpus: Corpus,
  encoder: document_encoder.DocumentEncoder,
  folder: pathlib.Path,
) -> None:
  """Tokenises a corpus into a folder. Each document is parsed once."""
  vocabulary = encoder.vocabulary
  logging.debug('preparing %s into %s', corpus.name, folder.parent)
  corpus.verify()
  splits = dict(corpus.splits)
  separator = vocabulary.separator(config.begin_of_text)
  if corpus.is_sectioned and vocabulary.line_end == vocabulary.document_start:
    separator = []
  digest = hashlib.sha256()
  metas = {}
  with (
    progress.Progress(f'tokenising {corpus.name}', _text_size(corpus), 'bytes') as bar,
    tempfile.TemporaryDirectory(dir=folder) as scratch,
  ):
    if corpus.train_shards is not None:
      keys = duplicates.sample_keys(splits.pop('train'), bar.count_bytes)
      np.save(folder / 'train.keys.npy', np.sort(np.frombuffer(keys, np.uint64)))
    reader = split_reader.SplitReader(splits, pathlib.Path(scratch), config.drop_duplicates)
    for split, documents in reader:
      digest.update(split.encode())

      def add_chunk(chunk: bytes) -> None:
        digest.update(chunk)
        bar.advance(len(chunk))

      name = f'{corpus.name}, {split}'
      with _open_token_files(folder, split, encoder) as token_files:
        written = token_writer.write(name, documents, encoder, separator, token_files, add_chunk)
      if not written.meta['tokens']:
        raise corpus.too_little_text(split, counts_of(splits[split]))
      if split == 'train' and not token_files.num_counted:
        raise errors.BadInput(
          f'no token of the {split} split of {corpus.name} counts in the loss: with data.loss_on='
          f'assistant the conversations need messages with the role "assistant"'
        )
      _write_arrays(split, written, folder)
      metas[split] = written.meta
      digest.update(str(metas[split]['bytes']).encode())
  for split, meta in metas.items():
    meta['lossless'] = meta['lossless'] and not corpus.is_altered
    counts = counts_of(splits[split])
    meta['empty'] = counts.empty
    if counts.replaced:
      meta['replaced'] = counts.replaced
    for warning in counts.warnings():
      logging.warning('%s, %s: %s', corpus.name, split, warning)
  if corpus.train_shards is not None:  # too large to hash their contents
    for number, file in enumerate(corpus.files):
      size = corpus.first_sizes.get((number, file.name), files.size(file))
      digest.update(f'{file.name} {size}'.encode())
  digest.update(vocabulary.digest.encode())
  meta = {'corpus': corpus.name, 'content_hash': digest.hexdigest(), 'splits': metas}
  (folder / 'meta.json').write_text(json.dumps(meta, indent=2), encoding='utf-8')


def _text_size(corpus: Corpus) -> int | None:
  """Returns the bytes of a corpus of plain text files, by their names; None for other corpora."""
  if corpus.train_shards is not None:
    return None
  for path in corpus.files:
    is_compressed = path.suffix.lower() in compression.SUFFIXES
    if is_compressed or file_formats.format_of_suffix(path) != file_formats.TEXT:
      return None
  return sum(map(files.size, corpus.files))


@contextlib.contextmanager
def _open_token_files(
  folder: pathlib.Path, split: str, encoder: document_encoder.DocumentEncoder
) -> Iterator[token_writer.TokenFiles]:
  """Opens the files of the tokens of a split for writing."""
  with contextlib.ExitStack() as stack:
    tokens = stack.enter_context((folder / f'{split}.tokens').open('wb'))
    counts = None
    if encoder.has_counts:
      counts = stack.enter_context((folder / f'{split}.counts').open('wb'))
    dtype = token_writer.token_dtype(encoder.vocabulary)
    yield token_writer.TokenFiles(tokens, dtype, counts)


def _write_arrays(split: str, written: token_writer.WrittenSplit, folder: pathlib.Path) -> None:
  """Writes the arrays of a split beside its tokens."""
  np.save(folder / f'{split}.starts.npy', written.starts)
  np.save(folder / f'{split}.keys.npy', np.sort(written.keys))


def _load(
  corpus: Corpus, encoder: document_encoder.DocumentEncoder, folder: pathlib.Path
) -> TokenCorpus:
  """Loads the folder of a corpus. Raises one of `file_errors.DAMAGE_ERRORS` if it is damaged."""
  meta = json_files.read(folder / 'meta.json')
  splits = {}
  for split, fields in meta['splits'].items():
    tokens = _map_tokens(folder / f'{split}.tokens', fields['dtype'], fields)
    counts = None
    if encoder.has_counts:
      counts = _map_tokens(folder / f'{split}.counts', 'bool', fields)
    starts = np.load(folder / f'{split}.starts.npy')
    splits[split] = _token_split(tokens, counts, starts, fields, encoder.vocabulary)
  keys = {
    split: np.load(folder / f'{split}.keys.npy', mmap_mode='r')
    for split in dict.fromkeys(['train', *splits])
  }
  formatted = [f'{split}: {_format_counts(fields)}' for split, fields in meta['splits'].items()]
  return TokenCorpus(
    splits,
    encoder.vocabulary,
    meta['content_hash'],
    keys,
    '; '.join(formatted),
    encoder,
    corpus.train_shards,
  )


def _map_tokens(path: pathlib.Path, dtype: str, fields: dict[str, Any]) -> np.ndarray:
  """Returns a memory-mapped file with a value for each token of a split."""
  values = np.memmap(path, dtype, mode='r')
  if len(values) != fields['tokens']:
    raise ValueError(f'{path.name} has {len(values)} tokens, expected {fields["tokens"]}')
  return values


def encode_file(
  path: pathlib.Path,
  vocabulary: vocabularies.Vocabulary,
  options: ReadOptions = DEFAULT_OPTIONS,
  loss_on: str = data_config.DataConfig.loss_on,
) -> token_split.TokenSplit:
  """Returns the tokens of the documents of a file, in memory.

  A text without separator in `options` is one document.

  For a model without document start, the first token of a text is read but not predicted.

  Args:
    path: the file.
    vocabulary: the vocabulary.
    options: options of reading its documents.
    loss_on: see `data.loss_on`.

  Raises:
    BadInput: a missing, empty, damaged or non-text file, invalid UTF-8, or a character outside the
      vocabulary.
  """
  if not path.is_file():
    raise errors.BadInput(f'{path}: no such file; expected a text file')
  formats = {path: file_formats.identify(path, options.any_bytes)}
  documents = shards.open_documents([path], options, formats.values())
  encoder = document_encoder.make(vocabulary, options.is_chat, loss_on)
  tokens_file = io.BytesIO()
  counts_file = io.BytesIO() if encoder.has_counts else None
  token_files = token_writer.TokenFiles(
    tokens_file, token_writer.token_dtype(vocabulary), counts_file
  )
  written = token_writer.write(
    f'{path}, the text',
    documents,
    encoder,
    vocabulary.separator(),
    token_files,
    remedy='convert it',
  )
  if not written.meta['bytes']:
    raise errors.BadInput(f'{path} is empty; expected text')
  file_log.log_files(str(path), {'': [path]}, counts=_format_counts(written.meta), formats=formats)
  tokens = np.frombuffer(tokens_file.getbuffer(), written.meta['dtype'])
  counts = None
  if counts_file is not None:
    counts = np.frombuffer(counts_file.getbuffer(), bool)
  split = _token_split(tokens, counts, written.starts, written.meta, vocabulary)
  if vocabulary.adds_start or options.is_chat or len(split.tokens) < 2:
    return split
  return dataclasses.replace(
    split,
    tokens=split.tokens[1:],
    starts=np.maximum(written.starts - 1, 0),
    document_start=int(split.tokens[0]),
  )


def _format_counts(meta: dict[str, Any]) -> str:
  """Formats the entry of a split in meta.json."""
  counts = f'{meta["tokens"]:,} tokens'
  if 'counted' in meta:
    counts += f' ({meta["counted"]:,} count in the loss)'
  counts += f', {meta["bytes"]:,} bytes of text, '
  counts += f'{meta["documents"]:,} document'
  if meta['documents'] != 1:
    counts += 's'
  if meta.get('empty'):
    counts += f' ({meta["empty"]:,} empty ones skipped)'
  if meta.get('replaced'):
    counts += f', {meta["replaced"]:,} halves of UTF-16 characters replaced by U+FFFD'
  return counts


def _token_split(
  tokens: np.ndarray,
  counts: np.ndarray | None,
  starts: np.ndarray,
  meta: dict[str, Any],
  vocabulary: vocabularies.Vocabulary,
) -> token_split.TokenSplit:
  """Returns the tokens written by `token_writer.write`, with their entry in meta.json."""
  text_bytes = meta['bytes'] if meta['lossless'] else None
  return token_split.TokenSplit(
    tokens, starts, text_bytes, vocabulary.document_start, vocabulary.num_characters, counts
  )
