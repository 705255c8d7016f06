"""Shards: documents read from any position, and errors that name the file and line."""

import gzip
import json

import pytest

from ngrammer_jax.data import shards
from tests.checks import bad_input


def write(folder, name, text):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  content = text.encode() if isinstance(text, str) else text
  path.write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
  return path


def json_lines(*texts):
  return ''.join(json.dumps({'url': 'x', 'text': text}) + '\n' for text in texts)


def read_texts(file_shards, shard=0, document=0, offset=0):
  records = file_shards.read(shard, document, offset)
  return [
    file_shards.text(shard, document + i, record).decode() for i, (record, _) in enumerate(records)
  ]


def test_shards_of_a_split_are_sorted(tmp_path):
  for name in ('c4-train.00001-of-00002.json.gz', 'c4-train.00000-of-00002.json.gz', 'valid.txt'):
    write(tmp_path, f'en/{name}', json_lines('a'))
  write(tmp_path, 'train.md', 'not a shard')
  by_split = shards.find(tmp_path)
  assert list(by_split) == ['train', 'validation']
  names = [path.name for path in by_split['train'].files]
  assert names == ['c4-train.00000-of-00002.json.gz', 'c4-train.00001-of-00002.json.gz']


def test_splits_are_words_of_the_name(tmp_path):
  for name in ('constrained-train.txt', 'latest.valid.txt', 'the_contest.txt', 'train-test.txt'):
    write(tmp_path, name, 'a')
  names = {split: shard.files[0].name for split, shard in shards.find(tmp_path).items()}
  assert names == {
    'train': 'constrained-train.txt',
    'validation': 'latest.valid.txt',
    'test': 'train-test.txt',
  }


def test_words_may_end_with_a_split_if_it_has_no_other_file(tmp_path):
  for name in (
    'latest-train.txt',
    'latest.valid.txt',
    'mytesting.txt',
    'constrain.txt',
    'retested.txt',
  ):
    write(tmp_path, name, 'a')
  names = {split: [path.name for path in s.files] for split, s in shards.find(tmp_path).items()}
  assert names == {
    'train': ['latest-train.txt'],
    'validation': ['latest.valid.txt'],
    'test': ['mytesting.txt'],
  }


def test_train_and_validation_are_required(tmp_path):
  write(tmp_path, 'train.jsonl', json_lines('a'))
  with bad_input(
    f'data.path={tmp_path} has no shards for validation: expected a folder with files such as '
    f'c4-train.00000-of-01024.json.gz or validation.txt, with "train" or "valid" in their names '
    f'and one of the suffixes .jsonl, .json, .txt, optionally followed by .gz'
  ):
    shards.find(tmp_path)


@pytest.mark.parametrize('name', ['train.jsonl', 'train.json.gz', 'train.txt', 'train.txt.gz'])
def test_reading_can_start_at_any_document(tmp_path, name):
  documents = ['one', 'two\nlines of ü', ' three ', 'four']
  plain = '\n\n' + '\n\n\n'.join(documents) + '\n'
  path = write(tmp_path, name, plain if '.txt' in name else json_lines(*documents))
  file_shards = shards.FileShards((path,))
  assert read_texts(file_shards) == documents
  offset = 0
  for document, (_, next_offset) in enumerate(file_shards.read(0)):
    assert read_texts(file_shards, 0, document, offset) == documents[document:]
    offset = next_offset


def test_an_empty_line_is_an_empty_document(tmp_path):
  path = write(tmp_path, 'train.jsonl', '\n' + json_lines('a') + '\n')
  assert read_texts(shards.FileShards((path,))) == ['', 'a', '']


@pytest.mark.parametrize(
  'line, message',
  [
    (
      '{"text": "b"',
      ", line 2 is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12); expected one "
      'object with a "text" per line',
    ),
    ('{"txt": "b"}', ', line 2: expected an object with a "text", found {"txt": "b"}'),
    ('["b"]', ', line 2: expected an object with a "text", found ["b"]'),
    ('{"text": 7}', ', line 2: expected an object with a "text", found {"text": 7}'),
    (b'{"text": "\xff"}', ', line 2 is not valid UTF-8 at byte 10 (0xff): convert it'),
  ],
)
def test_an_invalid_record_is_reported_by_line(tmp_path, line, message):
  line = line.encode() if isinstance(line, str) else line
  path = write(tmp_path, 'train.jsonl', json_lines('a').encode() + line + b'\n')
  with bad_input(f'{path}{message}'):
    read_texts(shards.FileShards((path,)))


def test_windows_line_ends(tmp_path):
  plain = write(tmp_path, 'train.txt', b'one\r\ntwo\r\n\r\n\r\nthree\r\n')
  assert read_texts(shards.FileShards((plain,))) == ['one\r\ntwo', 'three']
  objects = write(tmp_path, 'train.jsonl', b'{"text": "a"}\r\n\r\n {"text": "b"}\r\n')
  assert read_texts(shards.FileShards((objects,))) == ['a', '', 'b']


def test_a_truncated_shard_is_reported(tmp_path):
  path = write(tmp_path, 'train.json.gz', json_lines(*map(str, range(10_000))))
  path.write_bytes(path.read_bytes()[:-2000])
  with pytest.raises(Exception, match=rf'\A{path} is damaged: Compressed'):
    read_texts(shards.FileShards((path,)))
