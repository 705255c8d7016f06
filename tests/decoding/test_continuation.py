"""Text that grows with its tokens and never takes a character back."""

import pytest

from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.decoding import continuation

TEXT = 'naïve \N{SNOWMAN} and 日本\nplain'


def learned(kind):
  if kind == 'bytes':
    return vocabularies.ByteVocabulary()
  if kind == 'characters':
    return vocabularies.learn_characters([TEXT.encode()], 'utf-8', separated=True)
  if kind == 'words':
    return vocabularies.learn_words([TEXT.encode()], None)
  return vocabularies.learn_sentencepiece([b'plain and naive text, and more of it\n' * 5], 300)


@pytest.mark.parametrize('kind', vocabularies.KINDS)
@pytest.mark.parametrize('prompt', ['', 'naïve \N{SNOWMAN}'])
def test_the_pieces_are_the_text(kind, prompt):
  vocabulary = learned(kind)
  ids = vocabulary.encode(TEXT.encode()).tolist()
  before = len(vocabulary.encode(prompt.encode()))
  text = continuation.Continuation(vocabulary, ids[:before], limit=len(ids) - before)
  pieces = [text.add(token) for token in ids[before:]]
  assert prompt + ''.join(pieces) == TEXT
  assert not any(continuation.INCOMPLETE in piece for piece in pieces)
  assert (text.text, text.tokens) == (TEXT[len(prompt) :], ids[before:])
  assert text.done and not text.ended


def test_a_document_that_ends():
  vocabulary = vocabularies.ByteVocabulary()
  text = continuation.Continuation(vocabulary, [], limit=10)
  assert [text.add(token) for token in (*b'ab', 0xE2, vocabulary.document_end)] == [
    'a',
    'b',
    '',
    continuation.INCOMPLETE,  # no more bytes will come
  ]
  assert text.ended and text.done and text.tokens == [*b'ab', 0xE2]


def test_a_symbol_that_also_stands_inside_a_text_does_not_end_it():
  assert learned('words').document_end is None
  single = vocabularies.learn_characters([b'one text'], 'utf-8', separated=False)
  assert single.document_end is None
