"""Documents of shards, from any place on, and what is wrong with them said by file and line."""

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


def lines(*texts):
  return ''.join(json.dumps({'url': 'x', 'text': text}) + '\n' for text in texts)


def texts(found, shard=0, number=0, offset=0):
  read = found.read(shard, number, offset)
  return [found.text(shard, number + i, stored).decode() for i, (stored, _) in enumerate(read)]


def test_shards_of_a_split_in_order(tmp_path):
  for name in ('c4-train.00001-of-00002.json.gz', 'c4-train.00000-of-00002.json.gz', 'valid.txt'):
    write(tmp_path, f'en/{name}', lines('a'))
  write(tmp_path, 'train.md', 'no shard')
  found = shards.find(tmp_path)
  assert list(found) == ['train', 'validation']
  names = [path.name for path in found['train'].files]
  assert names == ['c4-train.00000-of-00002.json.gz', 'c4-train.00001-of-00002.json.gz']


def test_both_splits_are_needed(tmp_path):
  write(tmp_path, 'train.jsonl', lines('a'))
  with bad_input(
    f'data.path={tmp_path} has no shards of validation: expected a folder with files such as '
    f'c4-train.00000-of-01024.json.gz or validation.txt, that have "train" or "valid" in their '
    f'names and end in .jsonl, .json, .txt, with or without .gz'
  ):
    shards.find(tmp_path)


@pytest.mark.parametrize('name', ['train.jsonl', 'train.json.gz', 'train.txt', 'train.txt.gz'])
def test_documents_from_any_place_on(tmp_path, name):
  documents = ['one', 'two\nlines of ü', ' three ', 'four']
  plain = '\n\n' + '\n\n\n'.join(documents) + '\n'
  path = write(tmp_path, name, plain if '.txt' in name else lines(*documents))
  found = shards.FileShards((path,))
  assert texts(found) == documents
  offset = 0
  for number, (_, after) in enumerate(found.read(0)):
    assert texts(found, 0, number, offset) == documents[number:]
    offset = after


def test_an_empty_line_is_an_empty_document(tmp_path):
  found = shards.FileShards((write(tmp_path, 'train.jsonl', '\n' + lines('a') + '\n'),))
  assert texts(found) == ['', 'a', '']


@pytest.mark.parametrize(
  'line, said',
  [
    ('{"text": "b"', ", line 2: not JSON, column 13: Expecting ',' delimiter"),
    ('{"txt": "b"}', ', line 2: expected an object with a "text", found {"txt": "b"}'),
    ('["b"]', ', line 2: expected an object with a "text", found ["b"]'),
    ('{"text": 7}', ', line 2: expected an object with a "text", found {"text": 7}'),
    (b'{"text": "\xff"}', ', document 2: invalid start byte in UTF-8'),
  ],
)
def test_a_line_that_is_no_document(tmp_path, line, said):
  line = line.encode() if isinstance(line, str) else line
  path = write(tmp_path, 'train.jsonl', lines('a').encode() + line + b'\n')
  with bad_input(f'{path}{said}'):
    texts(shards.FileShards((path,)))


def test_lines_that_end_as_on_windows(tmp_path):
  plain = write(tmp_path, 'train.txt', b'one\r\ntwo\r\n\r\n\r\nthree\r\n')
  assert texts(shards.FileShards((plain,))) == ['one\r\ntwo', 'three']
  objects = write(tmp_path, 'train.jsonl', b'{"text": "a"}\r\n\r\n {"text": "b"}\r\n')
  assert texts(shards.FileShards((objects,))) == ['a', '', 'b']


def test_what_a_reader_does_is_not_an_error_of_the_file(tmp_path):
  read = shards.FileShards((write(tmp_path, 'train.jsonl', lines('a', 'b')),)).read(0)
  next(read)
  with pytest.raises(TimeoutError):
    read.throw(TimeoutError('of a signal'))


def test_a_shard_that_is_cut_off(tmp_path):
  path = write(tmp_path, 'train.json.gz', lines(*map(str, range(10_000))))
  path.write_bytes(path.read_bytes()[:-2000])
  with pytest.raises(Exception, match=rf'\A{path} cannot be read after byte [\d,]+: Compressed'):
    texts(shards.FileShards((path,)))
