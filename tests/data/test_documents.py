"""Documents that occur twice, in two splits, or that are one because nobody split them."""

import collections
import logging

import numpy as np
import pytest

from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.documents import duplicates, shards
from ngrammer_jax.data.files import file_formats
from ngrammer_jax.data.tokens import learned_vocabulary, token_cache
from tests import tokenizer_files
from tests.data import document_files

pytestmark = pytest.mark.usefixtures('cache')


def prepare(path, vocabulary='bytes', **settings):
  return document_files.prepare(data_config.DataConfig('text', str(path), vocabulary, **settings))


def documents(corpus, split='train'):
  tokens = corpus.splits[split].tokens
  return bytes(np.where(tokens < 256, tokens, 0).astype(np.uint8)).split(b'\0')


def write_splits(folder, **texts_by_split):
  for split, texts in texts_by_split.items():
    document_files.write(folder / f'{split}.jsonl', texts)
  return folder


@pytest.mark.parametrize('copies, level', [(0, logging.INFO), (1, logging.WARNING)])
@pytest.mark.parametrize('corpus', ['text', 'shards'])
def test_held_out_documents_in_the_training_text_are_counted(
  tmp_path, caplog, copies, level, corpus
):
  """In the line of what the corpus holds, also if its tokens are in the cache."""
  caplog.set_level('INFO')
  test = [f'test {i}' for i in range(40)]
  train = [f'train {i}' for i in range(10)] + [f'{text}\n' for text in test[:copies]]
  folder = write_splits(tmp_path / 'text', train=train, validation=['v'], test=test)
  first = ' (of shards, the first 16 MB)' * (corpus == 'shards')
  size, share = sum(map(len, train)), copies / 40
  counts = f'train: {size + 9 + copies} tokens, {size} bytes of text, {10 + copies} documents; '
  found = f'no held-out document is in the training text{first}'
  if copies:
    found = f'{copies} of 40 test documents ({share:.1%}) are also in the training text{first}'
  message = (
    f'{corpus}: {counts * (corpus == "text")}validation: 1 tokens, 1 bytes of text, 1 '
    f'document; test: 309 tokens, 270 bytes of text, 40 documents; {found}'
  )
  for _ in range(2):
    caplog.clear()
    document_files.prepare(data_config.DataConfig(corpus, str(folder), 'bytes'))
    logged = [(record.getMessage(), record.levelno) for record in caplog.records]
    assert logged.count((message, level)) == 1


def test_only_the_first_shards_are_compared(tmp_path, caplog, monkeypatch):
  """A damaged document among them is reported by the training, which may see another file then."""
  caplog.set_level('INFO')
  folder = write_splits(tmp_path / 'text', train=['a', 'b', 'v'], validation=['v'])
  for size, copies in ((2, 0), (3, 1)):
    monkeypatch.setattr(duplicates, 'COMPARED_BYTES', size)
    config = data_config.DataConfig(
      'shards', str(folder), 'bytes', cache_dir=str(tmp_path / str(size))
    )
    document_files.prepare(config)
    found = '1 of 1 validation documents' if copies else 'no held-out document is in the training'
    assert found in caplog.messages[-1]
  with (folder / 'train.jsonl').open('a') as file:
    file.write('{}\n')
  monkeypatch.setattr(duplicates, 'COMPARED_BYTES', 1 << 20)
  document_files.prepare(config)
  assert '1 of 1 validation documents' in caplog.messages[-1]


def test_duplicates_are_dropped(tmp_path, caplog):
  caplog.set_level('INFO')
  folder = write_splits(
    tmp_path / 'text', train=['a', 'b', 'a', 'v', 'c', 't', 'b'], val=['v'], test=['t']
  )
  assert documents(prepare(folder)) == [b'a', b'b', b'a', b'v', b'c', b't', b'b']
  corpus = prepare(folder, drop_duplicates=True)
  assert documents(corpus) == [b'a', b'b', b'c']
  assert documents(corpus, 'test') == [b't']
  assert '4 training documents are left out' in caplog.text


def test_empty_documents_are_skipped_and_counted(tmp_path, caplog):
  caplog.set_level('INFO')
  folder = write_splits(tmp_path / 'text', train=['a', '', ' \n', 'b'], val=['v'])
  corpus = prepare(folder)
  assert documents(corpus) == [b'a', b'b'] and corpus.splits['train'].starts.tolist() == [0, 2]
  assert (
    'train: 3 tokens, 2 bytes of text, 2 documents (2 empty ones skipped); ' in caplog.messages[-1]
  )


def test_spelled_separators_are_counted(tmp_path, caplog):
  path, tokenizer = tmp_path / 'stories.txt', tmp_path / 'tokenizer.json'
  tokenizer.write_bytes(tokenizer_files.byte_level())
  path.write_text(''.join(f'a story {i}\n<|endoftext|>\n' for i in range(60)))
  for vocabulary in ('bytes', 'tokenizer'):
    settings = {} if vocabulary == 'bytes' else {'vocabulary_path': str(tokenizer)}
    caplog.clear()
    assert len(prepare(path, vocabulary, **settings).splits['train'].starts) == 1
    message = (
      'text, train: <|endoftext|> occurs 54 times, as ordinary text: if it separates documents, '
      "set data.document_separator='<|endoftext|>'"
    )
    assert message in caplog.messages
    caplog.clear()
    settings['document_separator'] = '<|endoftext|>'
    corpus = prepare(path, vocabulary, **settings)
    assert len(corpus.splits['train'].starts) == 54 and 'endoftext' not in caplog.text


def test_another_reading_of_the_same_files_has_its_own_cache(tmp_path):
  path = document_files.write(tmp_path / 'x.jsonl', [f'a{i}' for i in range(40)])
  sizes = [len(prepare(path, **s).splits['train'].tokens) for s in ({}, {'validation_share': 0.1})]
  assert sizes[0] > sizes[1]


def test_files_of_documents_are_scored_as_documents(tmp_path, caplog):
  caplog.set_level('INFO')
  texts = ['one', 'two\nlines', 'three']
  for name in document_files.NAMES:
    if '.txt' not in name:
      path = document_files.write(tmp_path / name, [*texts, ''])
      vocabulary = token_cache.vocabularies.ByteVocabulary()
      split = token_cache.encode_file(path, vocabulary)
      assert split.text_bytes == sum(map(len, texts)) and split.starts.tolist() == [0, 4, 14]
      assert split.tokens.tolist() == [*b'one', 256, *b'two\nlines', 256, *b'three']
      assert caplog.messages[-1].startswith(f'{path}: 1 file ({file_formats.identify(path)}')
      size = path.stat().st_size
      assert caplog.messages[-1].endswith(
        f', {size:,} bytes: 19 tokens, 17 bytes of text, 3 documents'
      )


@pytest.fixture
def parsed(monkeypatch):
  """The documents that were parsed, by the number of times."""
  counts, text = collections.Counter(), shards.FileShards.text

  def counting_text(self, shard, document, record):
    counts[f'{self.files[shard].name} {document}'] += 1
    return text(self, shard, document, record)

  monkeypatch.setattr(shards.FileShards, 'text', counting_text)
  return counts


@pytest.mark.parametrize('drop_duplicates', [False, True])
@pytest.mark.parametrize('vocabulary', ['bytes', 'sentencepiece', 'characters', 'words'])
@pytest.mark.parametrize('has_splits', [False, True])
def test_each_document_is_parsed_once(tmp_path, parsed, has_splits, vocabulary, drop_duplicates):
  """For all splits, duplicates, the hash and the tokens; once more if a vocabulary is learned."""
  texts = [f'document {i // 2} of some text' for i in range(100)]
  if has_splits:
    folder = write_splits(tmp_path / 'x', train=texts, valid=texts[:3], test=['another text'])
  else:
    folder = document_files.write(tmp_path / 'x' / 'x.jsonl', texts)
  size = {'vocabulary_size': 282} if vocabulary == 'sentencepiece' else {}
  corpus = prepare(folder, vocabulary, drop_duplicates=drop_duplicates, **size)
  is_learned = vocabulary != 'bytes'
  assert set(parsed.values()) <= ({1, 2} if is_learned else {1})
  assert len(parsed) == (104 if has_splits else 100)
  if not has_splits:
    assert set(parsed.values()) == {1 + is_learned}
  num_train = len(corpus.splits['train'].starts)
  assert num_train < 50 if drop_duplicates else num_train in (90, 100)
  parsed.clear()
  prepare(folder, vocabulary, drop_duplicates=drop_duplicates, **size)
  assert not parsed


@pytest.mark.parametrize('count', [1, 10, 11, 20, 21, 100, 1000])
def test_a_sample_is_spread_evenly(count):
  chunks = [bytes([i % 256, i // 256]) for i in range(count)]
  sample = learned_vocabulary.evenly_spread(iter(chunks), 20)
  numbers = [chunk[0] + 256 * chunk[1] for chunk in sample]
  assert len(numbers) == min(count, 10)
  gaps = np.diff(numbers)
  assert count <= 10 or gaps.max() <= 2 * count / 10 and gaps.min() >= count // 20
