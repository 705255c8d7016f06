"""Token cache: token counts, when a corpus is tokenised again, windows of a split, errors."""

import codecs
import dataclasses
import errno
import io
import itertools
import os
import pathlib
import re
import shutil
import time

from etils.epath import stat_utils
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import mixture, vocabularies
from ngrammer_jax.data.documents import corpora as corpus_files
from ngrammer_jax.data.documents import published_corpora, shards
from ngrammer_jax.data.files import fingerprints, text_files
from ngrammer_jax.data.formats import DocumentText
from ngrammer_jax.data.tokens import cache_folders, token_cache, token_split, token_writer
from ngrammer_jax.system import progress, storage, synced_folder
from tests import tokenizer_files
from tests.checks import bad_input
from tests.data import document_files

pytestmark = pytest.mark.usefixtures('cache')

SPLITS = corpus_files.SPLITS
BYTES = vocabularies.ByteVocabulary()
TEXT = ''.join(f'line {i % 97} of some text\n' for i in range(2000)).encode()


@pytest.fixture
def text(tmp_path):
  """A function that prepares a text file with the given settings."""
  path = tmp_path / 'text.txt'
  path.write_bytes(TEXT)

  def prepare(**settings):
    settings = {'corpus': 'text', 'path': str(path), 'vocabulary': 'bytes'} | settings
    return document_files.prepare(data_config.DataConfig(**settings))

  prepare.path = path
  return prepare


@pytest.fixture
def tokenizer(tmp_path):
  """Settings of a tokenizer.json."""
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(tokenizer_files.byte_level())
  return {'vocabulary': 'tokenizer', 'vocabulary_path': str(path)}


@pytest.mark.parametrize(
  'kind, size, messages',
  [
    ('characters', None, ['learning the vocabulary: all characters of text']),
    ('words', 9, ['learning the vocabulary: words of text']),
    (
      'sentencepiece',
      300,
      [
        'learning the vocabulary: 300 SentencePiece pieces from {train:,} bytes of text',
        'learned the vocabulary in 0s',
      ],
    ),
  ],
)
def test_learning_a_vocabulary_shows_its_progress(kind, size, messages, text, monkeypatch, caplog):
  caplog.set_level('INFO')
  monkeypatch.setattr(progress, 'FIRST_LOG', 0)
  monkeypatch.setattr(progress, 'LOG_INTERVAL', 0)
  monkeypatch.setattr(progress, 'format_duration', lambda seconds: '0s')
  monkeypatch.setattr(text_files, 'CHUNK_SIZE', 10_000)
  train = text().splits['train'].text_bytes
  caplog.clear()
  text(vocabulary=kind, vocabulary_size=size)
  logged = [line for line in caplog.messages if line.startswith('learn')]
  assert logged == [message.format(train=train) for message in messages]
  read = train
  if kind == 'characters':  # of all splits
    read = len(TEXT)
  reading = [line for line in caplog.messages if line.startswith('reading text for the vocabulary')]
  assert f'{read:,} bytes' in reading[-1]
  tokenising = [line for line in caplog.messages if line.startswith('tokenising text')]
  assert f'100% of {len(TEXT):,} bytes' in tokenising[-1]


def write_splits(folder, train, valid, test):
  folder.mkdir()
  for name, content in (('train', train), ('valid', valid), ('test', test)):
    (folder / name).write_bytes(content)
  return str(folder)


def token_counts(corpus):
  return [len(corpus.splits[split].tokens) for split in SPLITS]


def text_bytes(corpus):
  return [corpus.splits[split].text_bytes for split in SPLITS]


def same_tokens(a, b):
  return all(np.array_equal(a.splits[s].tokens, b.splits[s].tokens) for s in SPLITS)


# Published token counts.


@pytest.mark.slow
def test_text8_has_the_published_counts(corpora):
  corpus = document_files.prepare(
    data_config.DataConfig('text8', str(corpora / 'text8.zip'), vocabulary='characters')
  )
  assert corpus.vocabulary.size == 27
  assert token_counts(corpus) == text_bytes(corpus) == [90_000_000, 5_000_000, 5_000_000]
  assert corpus.vocabulary.decode([corpus.splits['train'].document_start]) == b' '


@pytest.mark.slow
@pytest.mark.parametrize(
  'newlines, symbols, tokens, is_raw',
  [
    ('keep', 205, [90_000_000, 5_000_000, 5_000_000], True),
    ('drop', 204, [88_982_818, 4_945_742, 4_943_417], False),
    ('eos', 205, [90_000_001, 5_000_001, 5_000_001], False),
  ],
)
def test_enwik8_has_the_published_counts(corpora, newlines, symbols, tokens, is_raw):
  settings = {'vocabulary': 'characters', 'newlines': newlines}
  corpus = document_files.prepare(
    data_config.DataConfig('enwik8', str(corpora / 'enwik8.gz'), **settings)
  )
  assert corpus.vocabulary.size == symbols
  assert token_counts(corpus) == tokens
  assert text_bytes(corpus) == (tokens if is_raw else [None] * 3)


# Tokens.


@pytest.mark.parametrize('kind', data_config.VOCABULARIES)
def test_tokens_decode_to_the_text(text, kind, tokenizer):
  size = 300 if kind == 'sentencepiece' else None
  settings = tokenizer if kind == 'tokenizer' else {'vocabulary': kind, 'vocabulary_size': size}
  corpus = text(**settings)
  decoded = [corpus.vocabulary.decode(corpus.splits[split].tokens) for split in SPLITS]
  assert b''.join(decoded) == TEXT
  assert text_bytes(corpus) == [len(part) for part in decoded]


def test_documents_are_separated_by_the_document_start(tmp_path):
  folder = tmp_path / 'documents'
  folder.mkdir()
  for i in range(22):
    (folder / f'{i:02}').write_bytes(b'abc'[: i % 3 + 1])
  corpus = document_files.prepare(
    data_config.DataConfig('text', str(folder), vocabulary='characters')
  )
  numbers = [i for i in range(22) if i not in (9, 19)]  # of the training documents
  train = corpus.splits['train']
  assert train.document_start == train.num_characters == 3
  assert train.tokens.tolist() == [token for i in numbers for token in (*range(i % 3 + 1), 3)][:-1]
  lengths = [i % 3 + 2 for i in numbers]
  assert train.starts.tolist() == [sum(lengths[:i]) for i in range(len(numbers))]
  assert train.text_bytes == sum(i % 3 + 1 for i in numbers)


def test_single_text_has_no_separate_document_start(text):
  corpus = text(vocabulary='characters')
  assert corpus.vocabulary.size == len(set(TEXT)) == corpus.splits['test'].num_characters
  assert text(vocabulary='bytes').splits['test'].num_characters is None
  assert corpus.vocabulary.decode([corpus.splits['train'].document_start]) == b'\n'


def test_enwik8_newline_conventions_have_separate_caches(tmp_path, monkeypatch):
  path = tmp_path / 'enwik8'
  path.write_bytes(b'')
  monkeypatch.setattr(published_corpora, '_verify_published_file', lambda name, path: None)
  monkeypatch.setattr(text_files, 'byte_range', lambda blocks, start, stop: iter([b'a\nb\n']))
  for newlines, tokens, is_raw in [('keep', 4, True), ('drop', 2, False), ('eos', 5, False)] * 2:
    config = data_config.DataConfig('enwik8', str(path), 'characters', newlines=newlines)
    corpus = document_files.prepare(config)
    assert token_counts(corpus) == [tokens] * 3
    assert text_bytes(corpus) == [tokens if is_raw else None] * 3


def test_characters_of_enwik8_are_bytes_but_words_are_not(tmp_path, monkeypatch):
  path, text = tmp_path / 'enwik8', 'caf\u00e9 caf\u00e9\n'
  path.write_bytes(b'')
  monkeypatch.setattr(published_corpora, '_verify_published_file', lambda name, path: None)
  monkeypatch.setattr(text_files, 'byte_range', lambda *_: iter([text.encode()]))
  prepare = lambda kind: document_files.prepare(data_config.DataConfig('enwik8', str(path), kind))
  assert token_counts(prepare('characters')) == [12] * 3
  words = prepare('words')
  assert token_counts(words) == [3] * 3 and words.vocabulary.decode([0]) == 'caf\u00e9'.encode()


@pytest.mark.parametrize('size, dtype', [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_ids_have_16_bits_if_the_vocabulary_fits(text, monkeypatch, size, dtype):
  monkeypatch.setattr(vocabularies.ByteVocabulary, 'size', size)
  assert text().splits['train'].tokens.dtype == dtype


@pytest.mark.parametrize(
  'replacement, settings',
  [
    (' ', {'vocabulary': 'words', 'vocabulary_size': 10}),
    ('é', {'vocabulary_path': True, 'vocabulary': 'sentencepiece'}),
  ],
)
def test_text_bytes_of_a_lossy_tokenisation_are_none(text, request, replacement, settings):
  """Rare words, characters outside the T5 vocabulary."""
  text.path.write_bytes(TEXT.replace(b' ', replacement.encode()))
  if 'vocabulary_path' in settings:
    model = request.getfixturevalue('corpora') / 'vocab' / 't5_32k.model'
    settings = settings | {'vocabulary_path': str(model)}
  assert text_bytes(text(**settings)) == [None] * 3


def test_text_bytes_are_none_if_the_tokenizer_changes_the_text(text, tmp_path):
  path = tmp_path / 'tokenizer.json'
  path.write_bytes(tokenizer_files.unigram())
  corpus = text(vocabulary='tokenizer', vocabulary_path=str(path))
  assert text_bytes(corpus) == [None] * 3
  assert corpus.vocabulary.unknown in corpus.splits['train'].tokens


def test_text_bytes_are_none_only_for_the_lossy_split(tmp_path):
  path = write_splits(tmp_path / 'splits', b'a b\n', b'a  b\n', b'b a\n')
  corpus = document_files.prepare(data_config.DataConfig('wikitext', path, vocabulary='words'))
  assert text_bytes(corpus) == [4, None, 4]


# The cache.


@pytest.fixture
def write_calls(monkeypatch):
  """A list with one entry for each time a corpus was tokenised."""
  write, calls = token_cache._write, []
  monkeypatch.setattr(token_cache, '_write', lambda *args: calls.append(args) or write(*args))
  return calls


def test_second_call_reads_the_cache(text, write_calls, monkeypatch):
  first = text()
  # Nothing but the beginning of the text is read either.
  monkeypatch.setattr(text_files, 'read_bytes', None)
  second = text()
  assert len(write_calls) == 1
  assert same_tokens(first, second)
  assert second.content_hash == first.content_hash
  assert text_bytes(second) == text_bytes(first)
  assert isinstance(second.splits['train'].tokens, np.memmap)


@pytest.mark.parametrize('source', ['variable', 'setting'])
def test_cache_folder_can_be_configured(text, cache, tmp_path, source):
  configured = tmp_path / 'configured'
  text(cache_dir=str(configured) if source == 'setting' else None)
  used, unused = (configured, cache) if source == 'setting' else (cache, configured)
  assert [path.name[:5] for path in used.iterdir()] == ['text-']
  assert used.stat().st_mode & 0o777 == 0o700 and not unused.exists()


def change_text(text):
  text.path.write_bytes(TEXT.replace(b'some', b'more'))


def change_time(text):
  os.utime(text.path, ns=(0, 0))


@pytest.mark.parametrize('change', [change_text, change_time])
def test_changed_file_is_tokenised_again(text, write_calls, change):
  text()
  change(text)
  corpus = text()
  assert len(write_calls) == 2
  assert (
    corpus.vocabulary.decode(corpus.splits['train'].tokens)
    == text.path.read_bytes()[: len(corpus.splits['train'].tokens)]
  )


def test_changed_tokenizer_is_tokenised_again(text, write_calls, tokenizer):
  path = pathlib.Path(tokenizer['vocabulary_path'])
  sizes, hashes = [], set()
  for size in (270, 280):
    path.write_bytes(tokenizer_files.byte_level(size=size))
    corpora = [text(**tokenizer), text(**tokenizer)]
    sizes.append(corpora[1].vocabulary.size)
    hashes.add(corpora[1].content_hash)
  assert sizes == [270, 280] and len(hashes) == len(write_calls) == 2


def test_weights_and_results_beside_a_tokenizer_change_no_tokens(text, write_calls, tmp_path):
  folder = tmp_path / 'model'
  (folder / 'evaluation').mkdir(parents=True)
  (folder / 'tokenizer.json').write_bytes(tokenizer_files.byte_level())
  settings = {'vocabulary': 'tokenizer', 'vocabulary_path': str(folder)}
  for name, content, calls in (
    *(('model.safetensors', '{}', 1), ('evaluation/test.json', '{}', 1)),
    *(('tokenizer_config.json', '{}', 1), ('generation_config.json', '{"eos_token_id": 3}', 2)),
  ):
    text(**settings)
    (folder / name).write_text(content)
    text(**settings)
    assert len(write_calls) == calls, name


def shorten(path):
  path.write_bytes(path.read_bytes()[:-8])


def empty(path):
  path.write_bytes(b'')


def remove(path):
  path.unlink()


@pytest.mark.full
def test_damaged_cache_is_written_again(text, cache, write_calls, caplog):
  """Whichever of its files is damaged, and however."""
  settings = {'vocabulary': 'sentencepiece', 'vocabulary_size': 290}
  tokens = {split: part.tokens.tolist() for split, part in text(**settings).splits.items()}
  paths = sorted(path for folder in cache.iterdir() for path in folder.iterdir())
  names = {path.name for path in paths}
  assert {'train.tokens', 'train.starts.npy', 'meta.json', 'vocabulary.json'} < names
  cases = [*itertools.product(paths, (shorten, empty, remove))]
  for number, (path, damage) in enumerate(cases, 1):
    damage(path)
    del write_calls[:]
    for _ in range(2):
      splits = text(**settings).splits
      assert len(write_calls) == path.parent.name.startswith('text-'), (path, damage)
    assert {split: part.tokens.tolist() for split, part in splits.items()} == tokens
    assert caplog.text.count(' is damaged (') == number
  assert caplog.text.count('preparing it again') == len(cases)


class Killed(BaseException):
  """An exception that the program does not handle."""


def kill(*args, **kwargs):
  raise Killed


def kill_at_validation(name, *args):
  return kill() if name.endswith('validation') else WRITE(name, *args)


WRITE = token_writer.write


@pytest.mark.parametrize(
  'owner, name, replacement',
  [
    (np, 'save', kill),
    (token_writer, 'write', kill_at_validation),
    (pathlib.Path, 'rename', kill),
  ],
)
def test_killed_preparation_leaves_no_cache(text, cache, monkeypatch, owner, name, replacement):
  with monkeypatch.context() as patch:
    patch.setattr(owner, name, replacement)
    with pytest.raises(Killed):
      text()
  assert list(cache.iterdir()) == []
  assert sum(token_counts(text())) == len(TEXT)


def test_cache_of_a_faster_process_is_used(text, cache, monkeypatch):
  """The slower process removes its own cache."""
  write = token_cache._write

  def slow_write(*arguments):
    with monkeypatch.context() as patch:
      patch.setattr(token_cache, '_write', write)
      text()
    return write(*arguments)

  monkeypatch.setattr(token_cache, '_write', slow_write)
  assert sum(token_counts(text())) == len(TEXT)
  assert len(list(cache.iterdir())) == 1


def test_published_files_are_verified_before_they_are_tokenised(tmp_path, cache, write_calls):
  path = tmp_path / 'text8'
  path.write_bytes(b'too short')
  with pytest.raises(errors.BadInput, match='has 9 bytes, md5 .*, but text8 has 100,000,000, md5 '):
    document_files.prepare(data_config.DataConfig('text8', str(path)))
  assert write_calls == [] and not any(cache.iterdir())


# The content hash, which a resumed run compares.


def test_content_hash_depends_on_the_text_not_on_its_path(text, tmp_path):
  other_path = tmp_path / 'other' / 'other.txt'
  other_path.parent.mkdir()
  other_path.write_bytes(TEXT)
  first = text().content_hash
  assert text(path=str(other_path)).content_hash == first
  other_path.write_bytes(TEXT.replace(b'some', b'more'))
  assert text(path=str(other_path)).content_hash != first


def test_content_hash_and_cache_depend_on_the_vocabulary(text, write_calls):
  settings = [{'vocabulary': kind} for kind in ('bytes', 'characters', 'words')]
  settings += [{'vocabulary': 'words', 'vocabulary_size': size} for size in (9, 10)]
  hashes = [text(**kwargs).content_hash for kwargs in (*settings, *settings)]
  assert len({*hashes}) == len(write_calls) == 5 and hashes[:5] == hashes[5:]


def test_content_hash_depends_on_the_pretrained_model(text, write_calls, tmp_path):
  """Of the same size and under the same name."""
  hashes = set()
  for content in (TEXT, TEXT.swapcase()):
    vocabularies.learn_sentencepiece([content], 290).save(tmp_path)
    model = str(tmp_path / 'vocabulary.model')
    hashes.add(text(vocabulary='sentencepiece', vocabulary_path=model).content_hash)
  assert len(hashes) == len(write_calls) == 2


def test_a_run_knows_where_its_documents_begin(tmp_path):
  """The text of both is the same, and a workdir of an earlier version has the hash of it alone."""
  hashes = []
  for number, parts in enumerate(
    ((b'one two\n', b'three four\n'), (b'one ', b'two\nthree four\n'))
  ):
    folder = tmp_path / str(number)
    folder.mkdir()
    for name, part in zip(('train-0', 'train-1', 'valid'), (*parts, b'five'), strict=True):
      (folder / name).write_bytes(part)
    config = data_config.DataConfig('text', str(folder), vocabulary='bytes')
    hashes.append(mixture.prepare(config).content_hash)
  assert len({*hashes}) == 2 and len({text.split('-')[0] for text in hashes}) == 1


def test_shards_of_tfds_in_a_bucket(monkeypatch, tmp_path):
  """Their paths are those of `epath`, whose `stat` has other names."""
  paths = [storage.path(f'gs://bucket/c4/{name}') for name in ('train-0', 'train-1', 'valid')]
  times = []
  stat = lambda path: stat_utils.StatResult(False, len(path.name), times[-1])
  monkeypatch.setattr(type(paths[0]), 'stat', stat)
  monkeypatch.setattr(type(paths[0]), 'open', lambda path, mode: io.BytesIO(path.name.encode()))
  monkeypatch.setattr(
    shards.FileShards, 'read', lambda *arguments: iter([(DocumentText(b'a text'), None)])
  )
  monkeypatch.setattr(shards.FileShards, 'text', lambda self, shard, number, record: record)
  by_split = {
    s: shards.FileShards((*p,)) for s, p in (('train', paths[:2]), ('validation', paths[2:]))
  }
  config = data_config.DataConfig('shards', 'gs://bucket/c4', vocabulary='bytes')
  for mtime in (1, 1, 2):
    times.append(mtime)
    token_cache.prepare(config, corpus_files.from_shards('c4', by_split), BYTES, True)
  assert len(list((tmp_path / 'cache').glob('*'))) == 2
  checked = fingerprints.ShardFingerprints(synced_folder.SyncedFolder(tmp_path, ''), paths)
  checked.check(0)
  assert '"size": 7, "content": "7-' in (tmp_path / 'files-0.jsonl').read_text()


def test_a_damaged_shard_is_known_by_its_number(tmp_path):
  """As of FineWeb, where each folder has the same names."""
  paths = [tmp_path / folder / '000_00000.jsonl' for folder in ('a', 'b', 'valid')]
  for path in paths:
    path.parent.mkdir()
    path.write_text('{"text": "a"}\n')
  config, hashes = data_config.DataConfig('shards', str(tmp_path), vocabulary='bytes'), []
  by_split = {
    'train': shards.FileShards((*paths[:2],)),
    'validation': shards.FileShards((paths[2],)),
  }
  for content, sizes in (('a', {}), ('abc', {(1, '000_00000.jsonl'): 14}), ('abc', {})):
    paths[1].write_text(f'{{"text": "{content}"}}\n')
    corpus = dataclasses.replace(corpus_files.from_shards('shards', by_split), first_sizes=sizes)
    hashes.append(token_cache.prepare(config, corpus, BYTES, True).content_hash)
  paths[0].write_text('{"text": "abcd"}\n')
  corpus = dataclasses.replace(corpus, first_sizes={(1, '000_00000.jsonl'): 14})
  hashes.append(token_cache.prepare(config, corpus, BYTES, True).content_hash)
  assert hashes[0] == hashes[1] and len({*hashes}) == 3


def test_content_hash_depends_on_the_splits(text, tmp_path):
  paths = [
    write_splits(tmp_path / 'a', b'ab', b'c', b'd'),
    write_splits(tmp_path / 'b', b'a', b'bc', b'd'),
  ]
  assert len({text(path=path).content_hash for path in paths}) == 2


# Windows of a split.


def make_split(lengths, document_start=0):
  """Returns a split of documents with tokens 1, 2, 3, ..."""
  tokens, starts = [], []
  for length in lengths:
    tokens += [document_start] * bool(starts)
    starts.append(len(tokens))
    tokens += range(len(tokens) + 1, len(tokens) + 1 + length)
  return token_split.TokenSplit(np.array(tokens, np.uint16), np.array(starts), None, document_start)


@pytest.mark.parametrize(
  'lengths', [[9], [1], [3, 4], [2, 1, 5], [1, 1, 1], [0, 3], [3, 0, 2], [4, 0]]
)
def test_inputs_of_a_window_are_the_tokens_before_the_targets(lengths):
  split = make_split(lengths)
  n = len(split.tokens)
  for first in range(2 * n):
    inputs, targets, starts = split.window(first, n + 3)
    for t in range(n + 3):
      index = (first + t) % n
      assert targets[t] == split.tokens[index]
      assert inputs[t] == (split.tokens[index - 1] if index else split.document_start)
      assert starts[t] == (index in split.starts)
    assert inputs.dtype == targets.dtype == np.int32 and starts.dtype == bool


def test_the_first_input_of_a_document_is_its_separator():
  inputs, targets, starts = make_split([2, 3]).window(0, 8)
  assert targets.tolist() == [1, 2, 0, 4, 5, 6, 1, 2]
  assert inputs.tolist() == [0, 1, 2, 0, 4, 5, 0, 1]
  assert np.flatnonzero(starts).tolist() == [0, 3, 6]


# Errors.


def test_nothing_is_prepared_for_a_config_that_is_refused(text, cache):
  with bad_input("data.newlines='drop' is not for data.corpus='text', but for enwik8: use 'keep'"):
    text(newlines='drop')
  assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize('content', [b'not a model', b''])
def test_other_files_are_refused_as_models(text, tmp_path, content):
  path = tmp_path / 'other.model'
  path.write_bytes(content)
  message = f'data.vocabulary_path={path} is not a SentencePiece model: '
  with pytest.raises(errors.BadInput, match=f'^{re.escape(message)}'):
    text(vocabulary='sentencepiece', vocabulary_path=str(path))


def test_other_files_are_refused_as_tokenizers(text, tokenizer):
  path = pathlib.Path(tokenizer['vocabulary_path'])
  whole = path.read_bytes()
  for content in (b'', b'\xff', b'{}', b'[]', whole[:-9]):
    path.write_bytes(content)
    message = f'data.vocabulary_path={path} is not the tokenizer.json of a Hugging Face tokenizer: '
    with pytest.raises(errors.BadInput, match=f'^{re.escape(message)}'):
      text(**tokenizer)
  path.write_bytes(tokenizer_files.byte_level(special=('<pad>',)))
  message = f'data.vocabulary_path={path}: the tokenizer has no special token that separates'
  with pytest.raises(errors.BadInput, match=f'^{re.escape(message)}'):
    text(**tokenizer)


@pytest.mark.parametrize(
  'kind, make, message',
  [
    (
      'sentencepiece',
      lambda model, json: json,
      '{json}, not {model}: use data.vocabulary=tokenizer',
    ),
    (
      'tokenizer',
      lambda model, json: model,
      '{model}, not {json}: use data.vocabulary=sentencepiece',
    ),
    (
      'tokenizer',
      lambda model, json: json.decode().encode('utf-16'),
      'UTF-16, not {json}: convert it to UTF-8',
    ),
    (
      'sentencepiece',
      lambda model, json: b'PAR1\0' + model,
      'Parquet, not {model}: name that file',
    ),
    (
      'sentencepiece',
      lambda model, json: b'GGUF\3\0\0\0' + model,
      'a GGUF model, not {model}: use data.vocabulary=tokenizer',
    ),
  ],
)
def test_what_is_no_vocabulary_is_named(text, tmp_path, kind, make, message):
  model = vocabularies.learn_sentencepiece([TEXT[:3000]], 290).content
  path = tmp_path / 'vocabulary'
  path.write_bytes(make(model, tokenizer_files.byte_level()))
  names = {
    'model': 'a SentencePiece model',
    'json': 'the tokenizer.json of a Hugging Face tokenizer',
  }
  with bad_input(f'data.vocabulary_path={path} is {message.format(**names)}'):
    text(vocabulary=kind, vocabulary_path=str(path))


def test_a_byte_order_mark_is_no_part_of_a_tokenizer(text, tokenizer):
  path = pathlib.Path(tokenizer['vocabulary_path'])
  expected = text(**tokenizer).vocabulary.definition
  path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
  assert text(**tokenizer).vocabulary.definition == expected


@pytest.mark.parametrize('name, magic', [('x.json.gz', b'\x1f\x8b'), ('x.zip', b'PK\x03\x04')])
@pytest.mark.parametrize('kind', ['tokenizer', 'sentencepiece'])
def test_damaged_archives_are_refused_as_vocabularies(text, tmp_path, kind, name, magic):
  (tmp_path / name).write_bytes(magic + b'cut')
  message = f'data.vocabulary_path={tmp_path}/{name}: {tmp_path}/{name} is damaged: '
  with pytest.raises(errors.BadInput, match=f'^{re.escape(message)}'):
    text(vocabulary=kind, vocabulary_path=f'{tmp_path}/{name}')


@pytest.mark.parametrize('offset', [0, 1234, text_files.CHUNK_SIZE + 17])
def test_invalid_utf8_is_reported_with_its_byte_offset(text, offset):
  content = bytearray(b'text and more\n' * 100_000)
  content[offset] = 0xE9
  text.path.write_bytes(content)
  with bad_input(
    f'{text.path} is not valid UTF-8 at byte {offset:,} (0xe9): convert it, or use '
    'data.vocabulary=bytes'
  ):
    text(vocabulary='characters')


def test_byte_vocabulary_encodes_any_bytes(text):
  content = bytes(range(256)) * 100
  text.path.write_bytes(content)
  corpus = text()
  assert sum(token_counts(corpus)) == sum(text_bytes(corpus)) == len(content)
  tokens = np.concatenate([corpus.splits[split].tokens for split in SPLITS])
  assert tokens.astype(np.uint8).tobytes() == content


@pytest.mark.parametrize('length, split', [(0, 'train'), (5, 'validation')])
def test_too_little_text_is_refused(text, cache, length, split):
  text.path.write_bytes(TEXT[:length])
  with bad_input(f'the {split} split of text is empty: {text.path} holds too little text'):
    text()
  assert list(cache.iterdir()) == []


def test_a_split_without_a_word_is_refused(tmp_path):
  path = write_splits(tmp_path / 'folder', b'a text', b'  ', b'a text')
  message = f'the validation split of text is empty: {path}/train holds too little text'
  with bad_input(message):
    document_files.prepare(data_config.DataConfig('text', path, vocabulary='words'))


def test_unwritable_cache_folder_is_reported(text, tmp_path):
  (tmp_path / 'file').write_bytes(b'')
  end = 'no incomplete cache is left'
  with bad_input(f'data.cache_dir={tmp_path}/file cannot be written: File exists; {end}'):
    text(cache_dir=f'{tmp_path}/file')
  with bad_input(f'data.cache_dir={tmp_path}/file/below cannot be written: Not a directory; {end}'):
    text(cache_dir=f'{tmp_path}/file/below')


def test_only_old_incomplete_caches_are_removed_and_none_is_read(text, cache):
  day = 86_400  # the last one is old, but its file still grows; the link is to what is gone
  for name, *ages in (('old', 2 * day, 2 * day), ('now', 60, 60), ('grows', 60, 2 * day)):
    folder = cache / f'preparing-{name}'
    folder.mkdir(parents=True)
    (folder / 'meta.json').write_text('{')
    for path, age in zip((folder / 'meta.json', folder), ages, strict=True):
      os.utime(path, (time.time() - age,) * 2)
  (cache / 'preparing-gone').symlink_to(cache / 'nothing')
  assert sum(token_counts(text())) == len(TEXT)
  names = {path.name for path in cache.glob('preparing-*')}
  assert names == {'preparing-now', 'preparing-grows', 'preparing-gone'}


def test_a_damaged_cache_that_another_process_removes_is_no_error(text, cache, monkeypatch):
  text()
  for path in cache.glob('*/meta.json'):
    path.write_text('{')

  def remove(folder):
    shutil.rmtree(folder)
    raise FileNotFoundError(2, 'No such file or directory', 'meta.json')

  monkeypatch.setattr(cache_folders.files, 'remove', remove)
  assert sum(token_counts(text())) == len(TEXT)


def test_full_disk_is_reported_and_leaves_no_cache(text, cache, monkeypatch):
  def raise_disk_full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(token_cache.np, 'save', raise_disk_full)
  message = (
    f'data.cache_dir={cache} cannot be written: No space left on device; no incomplete cache is '
    f'left; name another folder with NGRAMMER_JAX_CACHE'
  )
  with bad_input(message):
    text(vocabulary='bytes')
  assert not list(cache.iterdir())


def test_a_vocabulary_that_is_there_is_not_learned_again(text, monkeypatch):
  config = data_config.DataConfig('text', str(text.path), 'sentencepiece', 300)
  model = vocabularies.learn_sentencepiece([TEXT[:3000]], 290)
  with monkeypatch.context() as patch:
    patch.setattr(vocabularies, 'learn_sentencepiece', None)
    for _ in range(2):  # and from the cache
      corpus = document_files.prepare(config, vocabulary=model)
      assert corpus.vocabulary.definition == model.definition
  learned = document_files.prepare(config)  # its cache is another one
  assert learned.vocabulary.size == 300
  again = document_files.prepare(config, vocabulary=learned.vocabulary)
  assert again.content_hash == learned.content_hash != corpus.content_hash
  assert same_tokens(again, learned)


def test_a_file_is_encoded_as_one_document(tmp_path):
  path = tmp_path / 'text.txt'
  content = 'caf\u00e9 and\ntea\n'
  path.write_text(content)
  characters = vocabularies.CharacterVocabulary(''.join(sorted(set(content))), 'utf-8', False)
  split = token_cache.encode_file(path, characters)
  assert characters.decode(split.tokens).decode() == content and split.starts.tolist() == [0]
  assert (split.text_bytes, split.num_characters) == (14, characters.size)
  assert split.document_start == characters.document_start
  words = vocabularies.WordVocabulary(['<eos>', '<unk>', 'and'])
  split = token_cache.encode_file(path, words)
  assert split.tokens.tolist() == [1, 2, 0, 1, 0]
  assert (split.text_bytes, split.num_characters) == (None, None)
  path.write_text('cafe')
  with bad_input(f"{path}: 'f' is not among the 2 known characters"):
    token_cache.encode_file(path, vocabularies.CharacterVocabulary('ac', 'utf-8', False))
  path.write_bytes(b'tea\xff')
  message = f'{path} is not valid UTF-8 at byte 3 (0xff): convert it'
  for vocabulary in (characters, words):
    with bad_input(message):
      token_cache.encode_file(path, vocabulary)
  assert token_cache.encode_file(path, vocabularies.ByteVocabulary()).tokens[-1] == 0xFF


def test_other_splits_of_the_same_file_are_another_text(tmp_path):
  """As a file it is cut in three; in a folder its name says that it is for training."""
  (tmp_path / 'train.txt').write_text('one two three four five six\n' * 40)
  options = {'corpus': 'text', 'validation_share': 0.1, 'vocabulary': 'bytes'}
  options['cache_dir'] = str(tmp_path / 'cache')
  splits = []
  for path in (tmp_path / 'train.txt', tmp_path):
    config = data_config.DataConfig(path=str(path), **options)
    splits.append(set(document_files.prepare(config).splits))
  assert splits == [{'train', 'validation', 'test'}, {'train', 'validation'}]
