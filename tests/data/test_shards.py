"""Shards: documents read from any position, and errors that name the file and line."""

import gzip
import json

import pytest

from ngrammer_jax.data.documents import corpus, shards
from ngrammer_jax.data.formats import START, DocumentText
from tests.checks import bad_input
from tests.data import document_files
from tests.loops import each

REMEDY = ': set data.text_field to the name of the one with the text'
NO_TEXT = DocumentText(b'')


def write(folder, name, text):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  content = text.encode() if isinstance(text, str) else text
  path.write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
  return path


def json_lines(*texts):
  return ''.join(json.dumps({'url': 'x', 'text': text}) + '\n' for text in texts)


def read_texts(file_shards, shard=0, place=START):
  return [
    (file_shards.text(shard, place.document + i, record) or NO_TEXT).text.decode()
    for i, (record, _) in enumerate(file_shards.read(shard, place))
  ]


def find(folder, *options):
  return shards.find(folder, *options)[0]


def test_shards_of_a_split_are_sorted(tmp_path):
  for name in ('c4-train.00001-of-00002.json.gz', 'c4-train.00000-of-00002.json.gz', 'valid.txt'):
    write(tmp_path, f'en/{name}', json_lines('a'))
  write(tmp_path, 'train.md', 'not a shard')
  by_split = find(tmp_path)
  assert list(by_split) == ['train', 'validation']
  names = [path.name for path in by_split['train'].files]
  assert names == ['c4-train.00000-of-00002.json.gz', 'c4-train.00001-of-00002.json.gz']


def test_reading_can_start_at_any_paragraph(tmp_path):
  documents = ['one', 'two\nlines of ü', ' three ', 'four']
  path = write(tmp_path, 'train.txt', '\n\n' + '\n\n\n'.join(documents) + '\n')
  file_shards = shards.FileShards((path,))
  assert read_texts(file_shards) == documents
  for document, (_, place) in enumerate(file_shards.read(0), 1):
    assert place.document == document
    assert read_texts(file_shards, 0, place) == documents[document:]


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
    (
      '{"txt": "b"}',
      ', line 2: expected an object with a "text", found {"txt": "b"}, with the fields txt'
      + REMEDY,
    ),
    (
      '["b"]',
      ', line 2: expected an object with a "text", found ["b"], with the fields none' + REMEDY,
    ),
    (
      '{"messages": [], "id": 1}',
      ', line 2: expected an object with a "text", found {"messages": [], "id": 1}, with the '
      'fields messages, id: set data.chat=True, which reads the conversations in "messages"',
    ),
    (
      '{"conversations": []}',
      ', line 2: expected an object with a "text", found {"conversations": []}, with the fields '
      'conversations: set data.chat=True and data.text_field=conversations, which read the '
      'conversations there',
    ),
    ('{"text": 7}', ', line 2: "text" is a number, not text' + REMEDY),
    ('{"text": true}', ', line 2: "text" is true or false, not text' + REMEDY),
    ('{"text": {"a": "b"}}', ', line 2: "text" is an object, not text' + REMEDY),
    ('{"text": ["b"]}', ', line 2: "text" is a list, not text' + REMEDY),
    (
      '{"text": [{"role": "user", "content": "b"}]}',
      ', line 2: "text" is a list of messages, not text: rename the field to "messages" and set '
      'data.chat=True',
    ),
    (b'{"text": "\xff"}', ', line 2 is not valid UTF-8 at byte 10 (0xff): convert it'),
  ],
)
def test_an_invalid_record_is_reported_by_line(tmp_path, line, message):
  line = line.encode() if isinstance(line, str) else line
  path = write(tmp_path, 'train.jsonl', json_lines('a').encode() + line + b'\n')
  with bad_input(f'{path}{message}'):
    read_texts(shards.FileShards((path,)))


def test_halves_of_characters_are_replaced_and_null_is_empty(tmp_path):
  lines = [
    r'{"text": "cut \ud83d"}',
    r'{"text": "\udc00\ud83d\ude42\ud83d"}',
    '{"text": null}',
    '{"text": ""}',
  ]
  documents = shards.ShardDocuments(
    shards.FileShards((write(tmp_path, 'train.jsonl', '\n'.join(lines)),))
  )
  texts = [b''.join(document.read_chunks()).decode() for document in documents]
  assert texts == ['cut \ufffd', '\ufffd\U0001f642\ufffd']
  assert documents.counts == corpus.DocumentCounts(empty=2, null=1, replaced=3)


def test_windows_line_ends(tmp_path):
  plain = write(tmp_path, 'train.txt', b'one\r\ntwo\r\n\r\n\r\nthree\r\n')
  assert read_texts(shards.FileShards((plain,))) == ['one\r\ntwo', 'three']
  objects = write(tmp_path, 'train.jsonl', b'{"text": "a"}\r\n\r\n {"text": "b"}\r\n')
  assert read_texts(shards.FileShards((objects,))) == ['a', '', 'b']


# What is held out.


@each('count, share', [(1, None), (4, 0.25), (10, None)])
def test_without_validation_files_a_share_is_held_out(tmp_path_factory, count, share):
  folder = tmp_path_factory.mktemp('held_out')
  documents = [[f'{shard}/{i}' for i in range(200)] for shard in range(count)]
  for shard, texts in enumerate(documents):
    document_files.write(folder / f'{shard:03}_00000.parquet', texts)
  by_split = find(folder, shards.DEFAULT_OPTIONS, share)
  assert list(by_split) == ['train', 'validation']
  parts = {
    split: [{*read_texts(part, shard)} - {''} for shard in range(len(part.files))]
    for split, part in by_split.items()
  }
  train, validation = (set().union(*parts[split]) for split in ('train', 'validation'))
  assert train | validation == {text for texts in documents for text in texts}
  assert not train & validation
  if count == 1:
    assert len(validation) == 10
    assert len({int(text.split('/')[1]) // 40 for text in validation}) == 5  # spread evenly
  else:
    assert len(by_split['validation'].files) == 1 and len(by_split['train'].files) == count - 1
    moved = folder.rename(folder.with_name(f'moved {count}'))
    again = find(moved, shards.DEFAULT_OPTIONS, share)['validation'].files
    assert [p.name for p in again] == [p.name for p in by_split['validation'].files]


def test_documents_that_are_held_out_are_of_all_rows_that_share_a_file(tmp_path):
  document_files.write(tmp_path / 'x.jsonl', [f'{i}' for i in range(2000)])
  texts = read_texts(find(tmp_path / 'x.jsonl')['validation'])
  rows = {i % 20 for i, text in enumerate(texts) if text}
  assert rows == set(range(20)) and sum(map(bool, texts)) == 100


def test_only_so_much_of_what_is_held_out_is_read(tmp_path, monkeypatch):
  for shard in range(3):
    document_files.write(tmp_path / f'{shard}.jsonl', ['x' * 100] * 50)
  monkeypatch.setattr(shards, 'HELD_OUT_BYTES', 1000)
  corpus = document_files.open_corpus('shards', str(tmp_path))
  assert len(list(corpus.splits['validation'])) == 10


def test_what_is_left_out_is_said(tmp_path, caplog):
  caplog.set_level('INFO')
  for name in ('train-0.jsonl', 'train-1.jsonl.zst', 'valid.parquet'):
    document_files.write(tmp_path / name, ['a'])
  for name in ('train-2.tar', 'README.md'):
    (tmp_path / name).write_text('x')
  document_files.open_corpus('shards', str(tmp_path))
  size = sum((tmp_path / name).stat().st_size for name in ('train-0.jsonl', 'train-1.jsonl.zst'))
  assert caplog.messages == [
    f'data.path={tmp_path}: train: 2 files (JSON lines, zstandard), {size:,} bytes; validation: '
    f'1 file (Parquet), {(tmp_path / "valid.parquet").stat().st_size:,} bytes; left out: '
    f'README.md, train-2.tar'
  ]


def test_the_first_document_is_looked_at_before_training(tmp_path):
  for name in ('train.parquet', 'valid.parquet'):
    document_files.write(tmp_path / name, ['a'], field='content')
  with bad_input(
    f"{tmp_path}/train.parquet has no column 'text', but id, content: set data.text_field to the "
    f'name of the one with the text'
  ):
    document_files.open_corpus('shards', str(tmp_path))


def test_subfolders_belong_to_shards(tmp_path):
  for name in ('train.jsonl', 'valid.jsonl', 'more/train.jsonl'):
    document_files.write(tmp_path / name, ['a'])
  assert len(find(tmp_path)['train'].files) == 2
