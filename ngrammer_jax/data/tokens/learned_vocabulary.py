"""The vocabulary of a config: read from a file, or learned from the text and cached."""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import json
import logging
import pathlib
import tempfile
import time

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import split_reader
from ngrammer_jax.data.documents.corpus import Corpus, counts_of
from ngrammer_jax.data.tokens import cache_folders, token_writer
from ngrammer_jax.system import json_files, progress, storage


def open_vocabulary(
  config: data_config.DataConfig, all_corpora: Sequence[Corpus], may_delete: bool
) -> vocabularies.Vocabulary:
  """Reads the vocabulary of a config, or loads it from the cache, or learns it.

  Each part of a mixture is read in proportion to its weight.

  Args:
    config: data config.
    all_corpora: its corpus, or the corpora of a mixture.
    may_delete: see `token_cache.prepare`.

  Raises:
    BadInput: a file of another kind, parts that cannot share a learned vocabulary, or too little
      text.
  """
  if config.vocabulary == 'bytes':
    return vocabularies.ByteVocabulary()
  if config.vocabulary_path is not None:
    path = storage.user_path('data.vocabulary_path', config.vocabulary_path)
    return vocabularies.read(config.vocabulary, path, config.vocabulary_size)
  sources = [
    corpus.identity(part) for part, corpus in zip(config.parts().values(), all_corpora, strict=True)
  ]
  key = [config.vocabulary, config.vocabulary_size, config.weights(), sources]
  name = f'vocabulary-{cache_folders.hash_json(key)}'

  def write(folder: pathlib.Path) -> None:
    vocabulary = _learn(config, all_corpora, folder)
    vocabulary.save(folder)
    meta = {'vocabulary_hash': vocabulary.digest}
    (folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')

  def load(folder: pathlib.Path) -> vocabularies.Vocabulary:
    vocabulary = vocabularies.load(folder)
    if json_files.read(folder / 'meta.json')['vocabulary_hash'] != vocabulary.digest:
      raise ValueError('the vocabulary has changed')
    return vocabulary

  return cache_folders.load_or_write(config, name, load, write, may_delete)


def size_without_text(config: data_config.DataConfig) -> int | None:
  """Returns the size of the vocabulary of a config, without reading the corpus.

  None: the text decides. A vocabulary of words has fewer words than the config says if the text
  has.

  Raises:
    BadInput: the file of the vocabulary is not one.
  """
  if config.vocabulary == 'bytes':
    return vocabularies.ByteVocabulary().size
  if config.vocabulary_path is not None:
    path = storage.user_path('data.vocabulary_path', config.vocabulary_path)
    return vocabularies.read(config.vocabulary, path, config.vocabulary_size).size
  if config.vocabulary == 'sentencepiece':
    return config.vocabulary_size or vocabularies.DEFAULT_SIZE
  return config.vocabulary_size


def _learn(
  config: data_config.DataConfig, all_corpora: Sequence[Corpus], folder: pathlib.Path
) -> vocabularies.Vocabulary:
  """Learns a vocabulary from corpora, with temporary files in a folder."""
  if config.vocabulary == 'characters' and len({c.encoding for c in all_corpora}) > 1:
    raise errors.BadInput(
      "data.vocabulary='characters': the characters of enwik8 are bytes, so other parts of "
      'data.mixture cannot share them: use bytes or sentencepiece'
    )
  for corpus in all_corpora:
    corpus.verify()
  names = ', '.join(corpus.name for corpus in all_corpora)
  # Parts of a mixture share a vocabulary of all their documents, also of those that occur twice.
  drops_duplicates = config.drop_duplicates and len(all_corpora) == 1
  with (
    progress.Progress(f'reading {names} for the vocabulary', None, 'bytes') as bar,
    tempfile.TemporaryDirectory(dir=folder) as scratch,
  ):
    readers = []
    for number, corpus in enumerate(all_corpora):
      corpus_scratch = pathlib.Path(scratch) / str(number)
      corpus_scratch.mkdir()
      readers.append(split_reader.SplitReader(corpus.splits, corpus_scratch, drops_duplicates))
    if config.vocabulary == 'characters':
      logging.info('learning the vocabulary: all characters of %s', names)
      return _learn_characters(all_corpora, readers, bar)
    if config.vocabulary == 'words':
      logging.info('learning the vocabulary: words of %s', names)
      texts = itertools.chain.from_iterable(map(_read_train, readers))
      return vocabularies.learn_words(bar.count_bytes(texts), config.vocabulary_size)
    sample: list[bytes] = []
    for corpus, reader, weight in zip(all_corpora, readers, config.weights(), strict=True):
      limit = vocabularies.MAX_TRAINING_BYTES * weight
      if limit:
        sample += _sample(corpus, reader, limit, bar)
  return _learn_sentencepiece(sample, config.vocabulary_size)


def _learn_sentencepiece(sample: Sequence[bytes], size: int | None) -> vocabularies.Vocabulary:
  """Learns a SentencePiece vocabulary: one call of C++ without progress of its own."""
  logging.info(
    'learning the vocabulary: %s SentencePiece pieces from %s bytes of text',
    f'{size or vocabularies.DEFAULT_SIZE:,}',
    f'{sum(map(len, sample)):,}',
  )
  start_time = time.monotonic()
  vocabulary = vocabularies.learn_sentencepiece(sample, size)
  duration = progress.format_duration(time.monotonic() - start_time)
  logging.info('learned the vocabulary in %s', duration)
  return vocabulary


def _learn_characters(
  all_corpora: Sequence[Corpus],
  readers: Sequence[split_reader.SplitReader],
  bar: progress.Progress,
) -> vocabularies.Vocabulary:
  """Returns the vocabulary of the characters of all splits."""
  encoding = all_corpora[0].encoding
  most_documents = 0  # of a split

  def read_all() -> Iterator[bytes]:
    nonlocal most_documents
    for reader in readers:
      for _, documents in reader:
        for number, document in enumerate(documents, 1):
          most_documents = max(number, most_documents)
          yield from token_writer.read_chunks(document, encoding)

  chunks = bar.count_bytes(read_all())
  characters = vocabularies.learn_characters(chunks, encoding, False).fields['characters']
  is_separated = len(all_corpora) > 1 or most_documents > 1
  return vocabularies.CharacterVocabulary(characters, encoding, is_separated)


def _read_train(reader: split_reader.SplitReader) -> Iterator[bytes]:
  """Yields the chunks of the training text as UTF-8 (characters of enwik8 are bytes)."""
  _, documents = next(iter(reader))
  for document in documents:
    yield from token_writer.read_chunks(document, 'utf-8')


def _sample(
  corpus: Corpus, reader: split_reader.SplitReader, limit: float, bar: progress.Progress
) -> list[bytes]:
  """Returns at most about `limit` bytes of a training text.

  They are spread evenly over the whole text, so the text is read to its end. Streamed shards give
  their first bytes.
  """
  if corpus.train_shards is not None:
    train = dataclasses.replace(corpus.splits['train'], max_bytes=limit)
    chunks = (chunk for document in train for chunk in token_writer.read_chunks(document, 'utf-8'))
    return list(bar.count_bytes(chunks))
  sample = evenly_spread(bar.count_bytes(_read_train(reader)), limit)
  if not sample:
    raise corpus.too_little_text('train', counts_of(corpus.splits['train']))
  return sample


def evenly_spread(chunks: Iterable[bytes], limit: float) -> list[bytes]:
  """Returns evenly spread chunks of about `limit` bytes; all chunks if they have fewer bytes."""
  selected: list[bytes] = []
  size, stride = 0, 1
  for number, chunk in enumerate(chunks):
    if number % stride:
      continue
    selected.append(chunk)
    size += len(chunk)
    if size > 2 * limit:  # every second one is enough
      selected = selected[::2]
      size = sum(map(len, selected))
      stride *= 2
  if size <= limit:
    return selected
  share = limit / size
  return [chunk for i, chunk in enumerate(selected) if int((i + 1) * share) > int(i * share)]
