"""Sections of a file: their boundaries, repeated reading, and that no text is lost."""

import gzip

import numpy as np
import pytest

from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.data.files import text_files
from tests.checks import bad_input
from tests.data import document_files

SPLITS = corpora.SPLITS

# With subheadings, table legends, and lines that only look like headings.
ARTICLES = [
  ' \n = Ants = \n \n Ants live in nests . \n = = Nests = = \n \n They dig . \n \n',
  ' = E = mc2 = \n \n Key : W \n = Wins ; L = \n Losses \n \n = = = Deep = = = \n \n \n',
  ' = <unk> = \n \n = Not one , for text follows = \n Text . \n \n = Nor this \n \n',
]
TITLE = '_BOOK_TITLE_ : Some_Body___The_{}.txt.out\n'
BOOKS = ['One day it rained .\nThe end .\n', 'A second book .\n']


def write_articles(folder, suffix=''):
  for split in ('train', 'valid', 'test'):
    data = ''.join(ARTICLES).encode()
    data = gzip.compress(data) if suffix else data
    (folder / f'wiki.{split}.tokens{suffix}').write_bytes(data)
  return str(folder)


def write_books(folder):
  folder.mkdir(exist_ok=True)
  for split in ('train', 'valid', 'test'):
    text = ''.join(TITLE.format(number) + book for number, book in enumerate(BOOKS))
    (folder / f'cbt_{split}.txt').write_text(text)
  return folder


def read_documents(corpus, split='train'):
  return [b''.join(document.read_chunks()).decode() for document in corpus.splits[split]]


@pytest.mark.parametrize('suffix', ['', '.gz'])
@pytest.mark.parametrize('chunk_size', [1 << 20, 50])
def test_an_article_begins_at_a_heading_between_blank_lines(
  tmp_path, monkeypatch, suffix, chunk_size
):
  monkeypatch.setattr(text_files, 'CHUNK_SIZE', chunk_size)
  corpus = document_files.open_corpus('wikitext_articles', write_articles(tmp_path, suffix))
  assert all(read_documents(corpus, split) == ARTICLES for split in SPLITS)
  names = [document.name.split(', ', 1)[1] for document in corpus.splits['test']]
  assert names == ['Ants', 'E = mc2', '<unk>']
  # In any order, and two readers at a time.
  first, second, third = corpus.splits['train']
  assert b''.join(third.read_chunks()).decode() == ARTICLES[2]
  pairs = [b''.join(parts) for parts in zip(first.read_chunks(), first.read_chunks(), strict=True)]
  assert b''.join(second.read_chunks()).decode() == ARTICLES[1] and all(pairs)


def test_books_do_not_contain_their_titles(tmp_path):
  for root in (write_books(tmp_path / 'data'), tmp_path):
    corpus = document_files.open_corpus('cbt', str(root))
    assert all(read_documents(corpus, split) == BOOKS for split in SPLITS)
    assert [d.name.split(', ')[1] for d in corpus.splits['train']] == [
      'Some_Body___The_0',
      'Some_Body___The_1',
    ]


def prepare(folder, corpus, vocabulary):
  config = data_config.DataConfig(corpus=corpus, path=str(folder), vocabulary=vocabulary)
  return document_files.prepare(config)


@pytest.mark.parametrize('kind', ['words', 'characters', 'bytes'])
def test_books_are_separated_unless_the_line_end_is_the_separator(tmp_path, cache, kind):
  corpus = prepare(write_books(tmp_path), 'cbt', kind)
  vocabulary, split = corpus.vocabulary, corpus.splits['test']
  separator = [] if kind == 'words' else [vocabulary.document_start]
  first, second = (vocabulary.encode(book.encode()).tolist() for book in BOOKS)
  assert split.tokens.tolist() == first + separator + second
  assert split.starts.tolist() == [0, len(first + separator)]
  # The input before the first token of a document is the document start.
  inputs, _, starts = split.window(0, len(split.tokens))
  assert set(inputs[starts]) == {vocabulary.document_start}
  assert split.text_bytes == sum(map(len, BOOKS))


def test_articles_change_no_token_of_wikitext(tmp_path, cache):
  folder = write_articles(tmp_path)
  whole, articles = (prepare(folder, name, 'words') for name in ('wikitext', 'wikitext_articles'))
  for split in SPLITS:
    np.testing.assert_array_equal(whole.splits[split].tokens, articles.splits[split].tokens)
    assert len(whole.splits[split].starts) == 1 and len(articles.splits[split].starts) == 3


@pytest.mark.full
def test_wikitext_2_has_its_published_articles_and_tokens(corpora, cache):
  corpus = prepare(corpora / 'wikitext2', 'wikitext_articles', 'words')
  assert corpus.vocabulary.size == 33_278
  counts = {name: (len(s.tokens), len(s.starts)) for name, s in corpus.splits.items()}
  assert counts == {'train': (2_088_628, 600), 'validation': (217_646, 60), 'test': (245_569, 60)}


def test_a_file_without_headings_or_titles_is_refused(tmp_path):
  for split in ('train', 'valid', 'test'):
    (tmp_path / f'cbt_{split}.txt').write_text('Text .\n' + TITLE.format(1))
  with bad_input(
    f'{tmp_path}/cbt_train.txt, line 1: expected a title, as in "_BOOK_TITLE_ : '
    'Author___Title.txt.out", found "Text .": this is not a raw text file of the '
    "Children's Book Test"
  ):
    read_documents(document_files.open_corpus('cbt', str(tmp_path)))
  with bad_input(
    f'{tmp_path}/cbt_train.txt has no article headings (lines " = Title = " between '
    'blank lines); data.corpus=wikitext does not need them'
  ):
    read_documents(document_files.open_corpus('wikitext_articles', str(tmp_path)))


def test_empty_books_are_refused(tmp_path, cache):
  for split in ('train', 'valid', 'test'):
    (tmp_path / f'cbt_{split}.txt').write_text(TITLE.format(1) * 2)
  with bad_input(
    f'the train split of cbt is empty: {tmp_path}/cbt_train.txt holds too little text'
  ):
    prepare(tmp_path, 'cbt', 'words')
