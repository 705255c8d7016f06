"""Incremental detokenization never retracts a character."""

import pytest

from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.inference import text
from tests import tokenizer_files

TEXT = 'naïve \N{SNOWMAN} and 日本\nplain'


def make_vocabulary(kind):
  if kind == 'bytes':
    return vocabularies.ByteVocabulary()
  if kind == 'characters':
    return vocabularies.learn_characters([TEXT.encode()], 'utf-8', separated=True)
  if kind == 'words':
    return vocabularies.learn_words([TEXT.encode()], None)
  if kind == 'tokenizer':
    return vocabularies.TokenizerVocabulary(tokenizer_files.byte_level())
  return vocabularies.learn_sentencepiece([b'plain and naive text, and more of it\n' * 5], 300)


@pytest.mark.parametrize('kind', data_config.VOCABULARIES)
@pytest.mark.parametrize('prompt', ['', 'naïve \N{SNOWMAN}'])
def test_pieces_concatenate_to_the_text(kind, prompt):
  vocabulary = make_vocabulary(kind)
  ids = vocabulary.encode(TEXT.encode()).tolist()
  prompt_length = len(vocabulary.encode(prompt.encode()))
  stream = text.IncrementalDetokenizer(
    vocabulary, ids[:prompt_length], max_tokens=len(ids) - prompt_length
  )
  pieces = [stream.add(token) for token in ids[prompt_length:]]
  assert prompt + ''.join(pieces) == TEXT
  assert not any(text.REPLACEMENT in piece for piece in pieces)
  assert (stream.text, stream.tokens) == (TEXT[len(prompt) :], ids[prompt_length:])
  assert stream.is_done and not stream.document_ended


def test_end_of_document():
  vocabulary = vocabularies.ByteVocabulary()
  stream = text.IncrementalDetokenizer(vocabulary, [], max_tokens=10)
  assert [stream.add(token) for token in (*b'ab', 0xE2, vocabulary.document_end)] == [
    'a',
    'b',
    '',
    text.REPLACEMENT,  # the character stays incomplete
  ]
  assert stream.document_ended and stream.is_done and stream.tokens == [*b'ab', 0xE2]


def test_no_document_end_if_the_symbol_occurs_inside_documents():
  assert make_vocabulary('words').document_end is None
  vocabulary = vocabularies.learn_characters([b'one text'], 'utf-8', separated=False)
  assert vocabulary.document_end is None
