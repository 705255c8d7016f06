"""Compressed token ids: the official table, the official normaliser, and every vocabulary."""

import numpy as np
import pytest

from ngrammer_jax.data import token_classes, vocabularies
from tests import tokenizer_files


@pytest.mark.parametrize('name', ['o2_h1', 'o23_h8', 'o23_h2_zero', 'short'])
def test_classes_equal_those_of_the_engram_demo(reference, name):
  arrays = reference(f'engram_{name}')
  texts, raw_tokens = arrays['vocabulary'].tolist(), arrays['raw_tokens'].tolist()
  classes_V = token_classes.token_classes(texts, raw_tokens)
  np.testing.assert_array_equal(classes_V, arrays['lookup_table'])
  assert classes_V.dtype == np.int32 and classes_V.max() == 39


@pytest.mark.parametrize(
  'text, normalised',
  [
    (' The', 'the'),
    ('THÉ', 'the'),
    ('\u0915\u093f\u0903', '\u0915'),  # also the spacing marks of Indic scripts are dropped
    ('\t\n', ' '),
    ('\xa0', ' '),
    ('\x1c', '\x1c'),  # no white space of Unicode
    ('  a \r\n b ', 'a b'),
    ('½', '1⁄2'),
    ('ß', 'ß'),
    ('İ', 'i'),
    ('ΣΣ', 'σσ'),  # letters one by one: no final sigma
    ('\u0301', ''),
    ('\ue000', ' '),
  ],
)
def test_normalisation(text, normalised):
  assert token_classes.normalizer().normalize_str(text) == normalised


def classes_of(vocabulary):
  return token_classes.token_classes(*vocabulary.token_texts())


def test_bytes_of_incomplete_characters_are_separate_classes():
  for vocabulary in (
    vocabularies.ByteVocabulary(),
    vocabularies.learn_characters([bytes(range(256))], 'latin-1', separated=True),
  ):
    classes_V = classes_of(vocabulary)
    assert classes_V[ord('A')] == classes_V[ord('a')] != classes_V[ord('b')]
    assert len({classes_V[byte] for byte in b' \t\r\n'}) == 1
    rest = [*range(128, 256), vocabulary.document_start]
    assert all((classes_V == classes_V[i]).sum() == 1 for i in rest)
    # 26 pairs of letters, and four kinds of white space; vertical tab and form feed stay different.
    assert classes_V.max() + 1 == 257 - 26 - 3


def test_characters_and_words_share_classes_by_their_text():
  text = ' Ee½ßéêẞ\ufffd'
  vocabulary = vocabularies.learn_characters([text.encode()], 'utf-8', separated=False)
  assert vocabulary.decode(range(9)).decode() == text
  assert classes_of(vocabulary).tolist() == [0, 1, 1, 2, 3, 1, 1, 3, 4]

  words = ['the', 'The', 'THÉ', '<eos>', '<unk>', 'a', '\u0301', '\u0300', '\ufffd', 'b\ufffd']
  classes_V = classes_of(vocabularies.WordVocabulary(words))
  assert classes_V.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_sentencepiece_classes():
  text = 'The the THE café cafe\nA a Über uber\n' * 20
  vocabulary = vocabularies.learn_sentencepiece([text.encode()], 310)
  texts, pieces = vocabulary.token_texts()
  classes_V = token_classes.token_classes(texts, pieces)
  ids = {piece: i for i, piece in enumerate(pieces)}
  class_of = lambda piece: classes_V[ids[piece]]
  assert class_of('▁the') == class_of('The') == class_of('▁THE')
  assert (
    class_of('▁a') == class_of('A') == class_of('a') == class_of('<0x61>') == class_of('<0x41>')
  )
  assert class_of('▁') == class_of('\n') == class_of('<0x20>') == class_of('<0x0A>')
  for alone in ('<unk>', '<s>', *(f'<0x{byte:02X}>' for byte in range(0x80, 0x100))):
    assert (classes_V == class_of(alone)).sum() == 1
  # The class of a piece is that of the text that it decodes to inside a text.
  for i, piece in enumerate(pieces):
    inside = vocabulary.decode([ids['a'], i, ids['a']]).decode(errors='replace')[1:-1]
    if piece not in ('<unk>', '<s>'):
      assert texts[i] == inside


def test_tokenizer_classes():
  content = tokenizer_files.byte_level('The the THE café CAFÉ\n' * 20, size=330)
  vocabulary = vocabularies.TokenizerVocabulary(content)
  texts, tokens = vocabulary.token_texts()
  classes_V = token_classes.token_classes(texts, tokens)
  ids = {token: i for i, token in enumerate(tokens)}
  assert classes_V[ids['Ġthe']] == classes_V[ids['The']] == classes_V[ids['ĠTHE']]
  assert classes_V[ids['Ġ']] == classes_V[ids['Ċ']] and texts[ids['Ġthe']] == ' the'
  assert texts[vocabulary.document_start] == tokenizer_files.END
  pieces = [i for i, text in enumerate(texts) if text == '\ufffd']
  assert len(pieces) == 128 and len(set(classes_V[pieces].tolist())) == 128
