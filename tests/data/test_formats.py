"""What a file is, and its documents from any place on."""

import codecs
import gzip
import io
import json
import pathlib
import tarfile
import types
import zipfile

import numpy as np
import pyarrow as pa
from pyarrow import parquet
import pytest
import zstandard

from ngrammer_jax import errors
from ngrammer_jax.data import formats, prompts
from ngrammer_jax.data.files import compression, file_formats, text_files
from tests.checks import bad_input
from tests.data import document_files
from tests.loops import each

TEXTS = [f'document {i} of\nsome ünïcode ' + 'x' * (37 * i % 90) + '.' for i in range(40)]
REMEDY = 'set data.text_field to the name of the one with the text'


def read_all(file, place=formats.START):
  records = enumerate(file.read(place), place.document)
  return [(file.text(i, record).text.decode(), after) for i, (record, after) in records]


def open_file(path, **layout):
  return formats.DocumentFile.open(path, formats.ReadOptions(**layout))


@each('name', document_files.NAMES)
def test_reading_can_start_at_any_document(tmp_path, name):
  file = open_file(document_files.write(tmp_path / name, TEXTS))
  documents = read_all(file)
  assert [text for text, _ in documents] == TEXTS
  for number, (_, place) in enumerate(documents, 1):
    assert place.document == number
    assert [text for text, _ in read_all(file, place)] == TEXTS[number:]


@each(
  'name, value',
  [
    ('SMALL_GROUP', 0),
    ('PART_BYTES', 300),
    ('PART_BYTES', 1 << 20),
    ('MAX_DECODERS', 0),
    ('MAX_DECODERS', 1),
  ],
)
def test_row_groups_of_every_size_are_read_from_any_row(tmp_path, monkeypatch, name, value):
  monkeypatch.setattr(formats.parquet, 'PART_BYTES', 300)
  monkeypatch.setattr(formats.parquet, 'SMALL_GROUP', 1000)
  monkeypatch.setattr(formats.parquet, 'BATCH_ROWS', 3)
  monkeypatch.setattr(formats.parquet, name, value)
  path = tmp_path / 'x.parquet'
  schema = pa.schema({'text': pa.string()})
  with parquet.ParquetWriter(path, schema) as writer:
    for texts in (TEXTS[:17], [], TEXTS[17:18], TEXTS[18:20], TEXTS[20:]):
      writer.write_table(pa.table({'text': texts}, schema))
  for first in range(len(TEXTS)):
    documents = read_all(open_file(path), formats.FilePosition(first))
    assert [text for text, _ in documents] == TEXTS[first:]


def test_a_parquet_file_is_opened_once_for_each_part(tmp_path, monkeypatch):
  opened, open_os_file = [], pa.OSFile
  monkeypatch.setattr(pa, 'OSFile', lambda *args: opened.append(args) or open_os_file(*args))
  path = tmp_path / 'x.parquet'
  parquet.write_table(pa.table({'text': TEXTS}), path)
  assert len(read_all(open_file(path))) == len(TEXTS) and len(opened) == 1


@each('small, max_open', [(8 << 20, 0), (0, 2)])
def test_few_of_many_files_are_open(tmp_path, monkeypatch, small, max_open):
  texts = [f'{i} ' + 'some text ' * 50 for i in range(5000)]
  path = tmp_path / 'x.parquet'
  parquet.write_table(pa.table({'text': texts}), path)
  monkeypatch.setattr(formats.parquet, 'SMALL_GROUP', small)
  monkeypatch.setattr(formats.parquet, 'MAX_DECODERS', max_open)
  allocated = pa.total_allocated_bytes()
  readers = [open_file(path).read() for _ in range(8)]
  assert all(next(reader)[0] == texts[0].encode() for reader in readers)
  assert sum(file.resolve() == path for file in pathlib.Path('/proc/self/fd').iterdir()) == max_open
  assert (pa.total_allocated_bytes() - allocated < 1e6) == (not max_open)
  assert all(next(reader)[0] == texts[1].encode() for reader in readers)


@each('suffix', document_files.COMPRESS)
def test_frames_before_a_place_are_not_decompressed(tmp_path, suffix):
  path = document_files.write(tmp_path / f'x.jsonl{suffix}', TEXTS)
  _, place = read_all(open_file(path))[30]
  content = path.read_bytes()
  assert 0 < place.frame < len(content) and place.offset < document_files.FRAME + 200
  path.write_bytes(content[:8].ljust(place.frame, b'\0') + content[place.frame :])
  assert [
    text for text, _ in read_all(formats.DocumentFile(path, file_formats.LINES), place)
  ] == TEXTS[31:]


def test_decompressed_files_are_read_at_any_offset(tmp_path):
  content = bytes(range(256)) * 20
  path = tmp_path / 'x.zst'
  frames = document_files.compress('.zst', content)
  path.write_bytes(b'\x50\x2a\x4d\x18\x04\0\0\0note' + frames)  # a frame without text is skipped
  for offset in (0, 10, 300, 699, 700, 701, 4999, 5000):
    with compression.open_binary(path, offset=offset) as file:
      assert file.read(100) == content[offset : offset + 100]


def test_padding_after_a_frame_is_skipped(tmp_path):
  path = tmp_path / 'x.jsonl.gz'
  path.write_bytes(
    gzip.compress(b'{"text": "a"}\n') + bytes(100) + gzip.compress(b'{"text": "b"}\n')
  )
  assert [text for text, _ in read_all(open_file(path))] == ['a', 'b']


def test_a_long_window_of_zstandard(tmp_path):
  parameters = zstandard.ZstdCompressionParameters(window_log=28)  # of `zstd --long=28`
  writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
  path = tmp_path / 'x.jsonl.zst'
  path.write_bytes(writer.compress(b'{"text": "a"}\n') + writer.flush())
  assert [text for text, _ in read_all(open_file(path))] == ['a']


@each('name', ['x.arrow', 'x.stream.arrow'])
def test_large_batches_are_read_in_parts(tmp_path, name):
  table = pa.table({'text': [str(i) for i in range(100)]})
  new = pa.ipc.new_stream if 'stream' in name else pa.ipc.new_file
  with pa.OSFile(str(tmp_path / name), 'wb') as file, new(file, table.schema) as writer:
    writer.write_table(table)
  for row in (0, 70):
    batches = [batch for batch, _ in formats.arrow.read_batches(tmp_path / name, ('text',), row)]
    assert max(map(len, batches)) == min(formats.arrow.ROWS, 100 - row)
    texts = [text for batch in batches for text in batch.column('text').to_pylist()]
    assert texts == [str(i) for i in range(row, 100)]


@each('suffix', ['.jsonl', '.parquet', '.arrow'])
def test_fields_are_nested_and_joined_by_newlines(tmp_path, suffix):
  values = [
    {'title': 'one', 'meta': {'body': 'first', 'n': 1}},
    {'title': None, 'meta': {'body': 'second', 'n': 2}},
    {'title': 'three', 'meta': {'body': None, 'n': 3}},
  ]
  path = tmp_path / f'x{suffix}'
  if suffix == '.jsonl':
    path.write_text(''.join(json.dumps(value) + '\n' for value in values))
  elif suffix == '.parquet':
    parquet.write_table(pa.Table.from_pylist(values), path)
  else:
    table = pa.Table.from_pylist(values)
    with pa.OSFile(str(path), 'wb') as file, pa.ipc.new_file(file, table.schema) as writer:
      writer.write_table(table)
  texts = [text for text, _ in read_all(open_file(path, fields=('title', 'meta.body')))]
  assert texts == ['one\nfirst', 'second', 'three']
  assert [text for text, _ in read_all(open_file(path, fields=('meta.body',)))][:2] == [
    'first',
    'second',
  ]


@each('kind', [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_columns_of_every_type_of_text(tmp_path, kind):
  path = tmp_path / 'x.parquet'
  parquet.write_table(pa.table({'text': pa.array(['a', None, 'ü']).cast(kind)}), path)
  assert [text for text, _ in read_all(open_file(path))] == ['a', '', 'ü']


def test_documents_between_separators(tmp_path, monkeypatch):
  texts = ['one\n\ntwo', 'three', '', 'four']
  path = tmp_path / 'x.txt'
  path.write_text('\n<|end|>\n'.join(texts) + '\n')
  documents = read_all(open_file(path, separator='<|end|>'))
  assert [text for text, _ in documents] == texts
  assert read_all(open_file(path, separator='<|end|>'), documents[1][1]) == documents[2:]
  expected = [record for record, _ in open_file(path, separator='<|end|>').read()]
  for size in range(1, 12):  # a separator may be in several blocks
    monkeypatch.setattr(text_files, 'CHUNK_SIZE', size)
    assert [r for r, _ in open_file(path, separator='<|end|>').read()] == expected


def test_a_long_document_is_searched_a_few_times(monkeypatch):
  monkeypatch.setattr(text_files, 'CHUNK_SIZE', 10)
  file, sizes = io.BytesIO(b'x' * 50_000 + b'|' + b'y' * 9), []
  read = lambda size: sizes.append(size) or io.BytesIO.read(file, size)
  source = types.SimpleNamespace(read=read)
  documents = list(formats.lines._split_at(source, b'|'))
  assert documents == [b'x' * 50_000 + b'|', b'y' * 9] and len(sizes) < 20


# What is refused.


def wrong_column(tmp_path, **columns):
  path = tmp_path / 'x.parquet'
  parquet.write_table(pa.table(columns), path)
  return path


@pytest.mark.parametrize(
  'columns, message',
  [
    ({'body': ['a'], 'url': ['b']}, " has no column 'text', but body, url: " + REMEDY),
    ({'text': [['a']]}, ": column 'text' of text holds list<element: string>, not text: " + REMEDY),
    ({'text': [1]}, ": column 'text' of text holds int64, not text: " + REMEDY),
    (
      {'messages': [[{'role': 'user', 'content': 'a'}]]},
      " has no column 'text', but messages: set data.chat=True, which reads the conversations in "
      '"messages"',
    ),
    (
      {'text': [[{'role': 'user'}]]},
      ": column 'text' of text holds list<element: struct<role: string>>, not text: rename the "
      'field to "messages" and set data.chat=True',
    ),
    ({'text': [b'\xff']}, ', row 1 is not valid UTF-8 at byte 0 (0xff): convert it'),
  ],
)
def test_another_column_is_refused(tmp_path, columns, message):
  path = wrong_column(tmp_path, **columns)
  with bad_input(f'{path}{message}'):
    read_all(open_file(path))


def archive(tmp_path):
  with tarfile.open(tmp_path / 'inner', 'w') as file:
    file.addfile(tarfile.TarInfo('a'))
  return (tmp_path / 'inner').read_bytes()


def array():
  file = io.BytesIO()
  np.save(file, np.arange(3))
  return file.getvalue()


def test_what_is_no_text_is_refused_by_name(tmp_path):
  text = 'some text\n' * 20
  one_value = (
    'is one JSON value, not lines such as {"text": "..."}: of objects, jq -c \'.[]\' writes them'
  )
  convert, remedy = 'convert it to UTF-8', 'write its text as .txt, .jsonl or .parquet'
  cases = {
    'a.txt': (text.encode('utf-16'), f'is UTF-16: {convert}'),
    'b.txt': (text.encode('utf-16-le'), f'is UTF-16: {convert}'),
    'c.jsonl': (text.encode('utf-16-be'), f'is UTF-16: {convert}'),
    'd.txt': (codecs.BOM_UTF32_LE + text.encode('utf-32-le'), f'is UTF-32: {convert}'),
    'e.tar.gz': (gzip.compress(archive(tmp_path)), f'is a tar archive, not text: {remedy}'),
    'f': (archive(tmp_path), f'is a tar archive, not text: {remedy}'),
    'g.txt': (b'%PDF-1.7\n', f'is a PDF, not text: {remedy}'),
    'h.npy': (array(), f'is a NumPy array, not text: {remedy}'),
    'i.7z': (b'7z\xbc\xaf\x27\x1c', f'is an archive, not text: {remedy}'),
    'j.parquet': (b'PARE' + bytes(50), f'is an encrypted Parquet file, not text: {remedy}'),
    'k.png': (
      b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR',
      f'is binary, not text: {remedy}, or use data.vocabulary=bytes',
    ),
    'l.json': (b'[\n{"text": "a"}\n]', one_value),
    **dict.fromkeys(
      ('l.txt', 'l'),
      (codecs.BOM_UTF8 + b'[\n {"text": "a",\n "id": 1},\n {"text": "b"}]\n', one_value),
    ),
    'long.txt': (b'[{"text": "a"}, {"text": "' + b'b' * file_formats.HEAD, one_value),
    'l.gguf': (b'GGUF\3\0\0\0', f'is a GGUF model, not text: {remedy}'),
    'm.json': (b'[{"text": "a"}, {"text": "b"}]', one_value),
    'n.parquet': (b'text', 'is damaged: it is named .parquet, but is not Parquet'),
    'o.jsonl.zst': (
      b'{"text": "a"}\n',
      'is damaged: it is named .zst, but is not compressed by zstandard: copy it again, or '
      'rename it',
    ),
    'p.txt.gz': (
      zstandard.compress(b'a'),
      'is damaged: it is named .gz, but is zstandard compressed: copy it again, or rename it',
    ),
  }
  for name, (content, message) in cases.items():
    (tmp_path / name).write_bytes(content)
    with bad_input(f'{tmp_path / name} {message}'):
      file_formats.identify(tmp_path / name)


def test_what_a_file_is_does_not_depend_on_its_suffix_alone(tmp_path):
  lines = b'{"text": "a"}\n{"text": "b"}\n'
  cases = {
    'a.txt': (lines, file_formats.LINES),
    'b': (codecs.BOM_UTF8 + lines, file_formats.LINES),
    'c.data': (zstandard.compress(lines), file_formats.LINES),
    'd.txt': (b'{"a": 1}\nand so on\n', file_formats.TEXT),
    'e.txt': (b'{ begins so\n', file_formats.TEXT),
    'l.txt': (b'[{"a": 1}] begins so\n', file_formats.TEXT),
    'm.txt': (b'[1] begins so\n', file_formats.TEXT),
    'n.txt': (b'[1, 2]', file_formats.TEXT),
    'o.txt': (b'[{"a" and so on\n' * file_formats.HEAD, file_formats.TEXT),
    'p.txt': (b'[{"a": 1}]\n' * file_formats.HEAD, file_formats.TEXT),
    'q.txt': (b'[{}](link) and so on\n' * file_formats.HEAD, file_formats.TEXT),
    'r.txt': (b'ORCHIDS', file_formats.TEXT),
    's.txt': (b'GGUF is a format of files\n', file_formats.TEXT),
    'f.jsonl': (b'not JSON\n', file_formats.LINES),
    'g.txt': ('\u0641 text'.encode(), file_formats.TEXT),
    'h.txt': (b'', file_formats.TEXT),
    'i.bin': (
      document_files.write(tmp_path / 'x.parquet', ['a']).read_bytes(),
      file_formats.PARQUET,
    ),
    'j.bin': (document_files.write(tmp_path / 'x.arrow', ['a']).read_bytes(), file_formats.ARROW),
    'k.bin': (
      document_files.write(tmp_path / 'x.stream.arrow', ['a']).read_bytes(),
      file_formats.ARROW,
    ),
  }
  for name, (content, expected) in cases.items():
    (tmp_path / name).write_bytes(content)
    assert file_formats.identify(tmp_path / name) == expected, name
  (tmp_path / 'l').write_bytes(bytes(range(256)))
  assert file_formats.identify(tmp_path / 'l', any_bytes=True) == file_formats.TEXT


@each('name', document_files.NAMES)
def test_a_truncated_file_is_reported(tmp_path, name):
  path = document_files.write(tmp_path / name, TEXTS)
  if '.' in name.replace('.jsonl', '').replace('.txt', ''):  # not plain text
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(errors.BadInput) as caught:
      read_all(open_file(path))
    assert str(caught.value).startswith(f'{path} is damaged: ')


@each('suffix', document_files.COMPRESS)
@each('is_cut', [False, True])
def test_a_later_frame_that_is_damaged_or_cut_is_reported(tmp_path, suffix, is_cut):
  first, second = (
    document_files.COMPRESS[suffix](f'{{"text": "{text}"}}\n'.encode()) for text in 'ab'
  )
  second = second[:-3] if is_cut else second[:1] + b'?' + second[2:]
  path = tmp_path / f'x.jsonl{suffix}'
  path.write_bytes(first + second)
  with pytest.raises(errors.BadInput, match='is damaged: '):
    read_all(open_file(path))


# Prompts.


@each('name', ['x.jsonl', 'x.jsonl.zst', 'x.parquet'])
def test_prompts_are_a_field(tmp_path, name):
  texts = ['the state', 'two\nlines', '', ' of the Union']
  path = document_files.write(tmp_path / name, texts, field='prompt')
  assert prompts.read(path) == texts
  path = document_files.write(tmp_path / name, texts, field='question')
  with pytest.raises(errors.BadInput, match='question: name it "prompt"'):
    prompts.read(path)


def test_prompts_of_a_chat_are_messages(tmp_path):
  messages = [{'role': 'system', 'content': 'a'}, {'role': 'user', 'content': 'b'}]
  line = json.dumps({'messages': messages})
  path = tmp_path / 'x.jsonl'
  path.write_text(f'{line}\n\n{line}\n')
  assert prompts.read(path, is_chat=True) == [messages, messages]
  with bad_input(f'--prompts={path} has messages in place of prompts: add --chat to answer them'):
    prompts.read(path)
  path.write_text(json.dumps({'prompt': 'a', 'messages': messages}))
  assert prompts.read(path, is_chat=True) == [messages]
  assert prompts.read(path) == ['a']
  for value, problem in (
    ('null', '"messages" is null: leave the line out'),
    ('"a"', '"messages" is text, not a list of messages such as .*: name a text "prompt"'),
    ('[{"role": "user"}]', 'message 1 has no content: expected an object such as'),
  ):
    path.write_text(f'{line}\n{{"messages": {value}}}\n')
    with pytest.raises(errors.BadInput, match=f'x.jsonl, line 2(: |, ){problem}'):
      prompts.read(path, is_chat=True)


def test_prompts_are_lines(tmp_path, caplog):
  caplog.set_level('INFO')
  path = tmp_path / 'x.txt'
  for content, kind, expected in (
    ('a\n\nb\n', 'text', ['a', '', 'b']),
    ('{"prompt": "a\\nb"}\n', 'JSON lines', ['a\nb']),
    ('{"prompt": "a"}\n{"prompt": ""}\n', 'JSON lines', ['a', '']),
    ('{"x": 1}\n{"x": 2}\n', 'text', ['{"x": 1}', '{"x": 2}']),
  ):
    path.write_text(content)
    assert prompts.read(path) == expected
    assert caplog.messages[-1] == (
      f'--prompts={path}: 1 file ({kind}), {len(content)} bytes: {len(expected)} prompts'
    )
  with zipfile.ZipFile(tmp_path / 'x.zip', 'w') as file:
    file.writestr('prompts.jsonl', '{"prompt": "a"}\n')
  assert prompts.read(tmp_path / 'x.zip') == ['a']
  path.write_text('{"prompt": "a"}\n\n{"prompt": 1}\n')
  with pytest.raises(errors.BadInput, match='x.txt, line 3: "prompt" is a number, not text'):
    prompts.read(path)
  path.write_bytes('a\nb\n'.encode('utf-16'))
  with bad_input(f'{path} is UTF-16: convert it to UTF-8'):
    prompts.read(path)
  with bad_input(f'--prompts={tmp_path}/none: no such file; expected one prompt per line'):
    prompts.read(tmp_path / 'none')
