"""Vocabularies: encoding, decoding, learning, saving."""

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies.tokenizer import DOCUMENT_SEPARATORS
from tests import tokenizer_files
from tests.checks import bad_input
from tests.loops import each

TEXT = ''.join(f'line {i} of some text, with {i % 7} words in it\n' for i in range(2000)).encode()


@pytest.fixture(scope='module')
def sentencepiece():
  return vocabularies.learn_sentencepiece([TEXT], 340)


@pytest.fixture(scope='module')
def tokenizer():
  return vocabularies.TokenizerVocabulary(tokenizer_files.byte_level())


DIFFICULT_TEXTS = {
  'empty': '',
  'tabs': '\tline\t\tof\t',
  'double spaces': 'line  of   text',
  'outer spaces': '  line of text   ',
  'only spaces': '    ',
  'newlines': '\n\nline\n\n\nof\n',
  'windows newlines': 'line\r\nof\r\n',
  'other white space': 'a\u00a0b\u2003c\u2028d\x85e\x0bf',
  'emoji': '😀👩\u200d👩\u200d👧 text',
  'other scripts': 'памятьـذاكرة記憶',
  'not normalised': 'ﬁne Ⅷ é e\u0301 ½',
  'byte order mark': '\ufefftext',
  'replacement': 'a\ufffdb',
  'nul': 'a\x00b\x00',
  'controls': '\x01\x1b[0m\x7f',
  'names of special pieces': '<s></s><unk><pad><0x41>',
}


@each('name', DIFFICULT_TEXTS)
def test_learned_sentencepiece_is_lossless(sentencepiece, name):
  text = DIFFICULT_TEXTS[name].encode()
  assert sentencepiece.decode(sentencepiece.encode(text)) == text


@each('name', DIFFICULT_TEXTS)
def test_byte_level_tokenizer_is_lossless(tokenizer, name):
  text = DIFFICULT_TEXTS[name].encode() + tokenizer_files.END.encode()  # spelled out
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.document_start not in tokenizer.encode(text)


def test_learned_sentencepiece_distinguishes_the_space_mark_from_a_space(sentencepiece):
  text = 'bars ▁▂▃ in text'.encode()
  assert sentencepiece.decode(sentencepiece.encode(text)) == text


@each('learned', [True, False])
def test_texts_have_the_same_ids_together_as_alone(sentencepiece, learned):
  vocabulary = vocabularies.SentencePieceVocabulary(sentencepiece.content, learned)
  texts = [text.encode() for text in DIFFICULT_TEXTS.values()]
  for some in (texts, [*texts, 'a\u2581b'.encode()]):
    for text, ids in zip(some, vocabulary.encode_all(some), strict=True):
      np.testing.assert_array_equal(ids, vocabulary.encode(text))


def test_of_special_tokens_the_longest_is_read(sentencepiece):
  """Whatever their order of ids."""
  from sentencepiece import sentencepiece_model_pb2 as schema

  model = schema.ModelProto.FromString(sentencepiece.content)
  for piece in ('<a>', '<a>b'):
    model.pieces.add(piece=piece, type=schema.ModelProto.SentencePiece.CONTROL)
  vocabulary = vocabularies.SentencePieceVocabulary(model.SerializeToString(), learned=True)
  assert vocabulary.encode(b'<a>b<a>', special=True).tolist() == [341, 340]


def test_pieces_are_longer_than_characters(sentencepiece):
  assert sentencepiece.size == 340
  assert len(sentencepiece.encode(TEXT)) < len(TEXT) / 2
  assert sentencepiece.encode(TEXT).max() < sentencepiece.size


def test_newline_is_a_separate_piece(sentencepiece):
  (newline,) = sentencepiece.encode(b'\n')
  ids = sentencepiece.encode(b'line\n\nof text\n').tolist()
  assert ids.count(newline) == 3


def test_text_never_contains_the_document_start(sentencepiece):
  text = ''.join(DIFFICULT_TEXTS.values()).encode()
  assert sentencepiece.document_start not in sentencepiece.encode(text)
  assert sentencepiece.decode([sentencepiece.document_start]) == b''


def test_learning_depends_on_the_text_alone(sentencepiece, tmp_path):
  lines = TEXT.splitlines(keepends=True)
  thirds = [b''.join(lines[i : i + 700]) for i in range(0, len(lines), 700)]
  for folder, vocabulary in (
    (tmp_path / 'whole', sentencepiece),
    (tmp_path / 'again', vocabularies.learn_sentencepiece([TEXT], 340)),
    (tmp_path / 'thirds', vocabularies.learn_sentencepiece(thirds, 340)),
  ):
    folder.mkdir()
    vocabulary.save(folder)
  models = {
    (tmp_path / name / 'vocabulary.model').read_bytes() for name in ('whole', 'again', 'thirds')
  }
  assert len(models) == 1


def test_default_size_of_sentencepiece(monkeypatch):
  monkeypatch.setattr(vocabularies.sentencepiece, 'DEFAULT_SIZE', 350)
  assert vocabularies.learn_sentencepiece([TEXT], None).size == 350


def test_too_many_pieces_for_the_text_are_refused():
  with bad_input(
    'data.vocabulary_size=4096 does not fit this text: '
    'Vocabulary size too high (4096). Please set it to a value <= 265.'
  ):
    vocabularies.learn_sentencepiece([b'abc\nabc\n' * 10], None)


@each('size', [270, 1, 0, -1])
def test_too_few_pieces_are_refused(size):
  with pytest.raises(errors.BadInput, match=f'^data.vocabulary_size={size} does not fit this text'):
    vocabularies.learn_sentencepiece([TEXT], size)


def test_t5_model(corpora):
  model = (corpora / 'vocab' / 't5_32k.model').read_bytes()
  vocabulary = vocabularies.SentencePieceVocabulary(model)
  assert vocabulary.size == 32_000
  assert vocabulary.document_start == 1  # </s>: it has no <s>
  assert vocabulary.encode(b'Hello world').tolist() == [8774, 296]
  assert vocabulary.decode([8774, 296]) == b'Hello world'


def test_tokenizer_adds_neither_special_tokens_nor_padding_and_cuts_nothing(tokenizer):
  def change(tokenizer):
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = processors.TemplateProcessing(
      single='<s> $A </s>', special_tokens=[('<s>', 1), ('</s>', 2)]
    )

  from tokenizers import processors

  content = tokenizer_files.byte_level(special=('<pad>', '<s>', '</s>'), change=change)
  changed = vocabularies.TokenizerVocabulary(content)
  assert changed.document_start == changed.document_end == 1
  for text in (TEXT[:200], b'', b'a'):
    ids = changed.encode(text)
    assert changed.decode([1, *ids, 2]) == text and not {0, 1, 2} & set(ids.tolist())
  texts = [TEXT[i : i + 50] for i in range(3)]
  for vocabulary in (changed, tokenizer):
    together = vocabulary.encode_all(texts)
    for ids, text in zip(together, texts, strict=True):
      assert ids.dtype == np.int32
      np.testing.assert_array_equal(ids, vocabulary.encode(text))


@each(
  'special, start',
  [
    (('<pad>', '</s>', '<s>'), '<s>'),
    (('<pad>', '<|endoftext|>', '</s>'), '</s>'),
    (('<pad>', '<|endoftext|>'), '<|endoftext|>'),
    (('<|end_of_text|>', '<|begin_of_text|>'), '<|begin_of_text|>'),
  ],
)
def test_document_start_of_a_tokenizer_that_adds_no_special_token(special, start):
  vocabulary = vocabularies.TokenizerVocabulary(tokenizer_files.byte_level(special=special))
  assert vocabulary.document_start == vocabulary.document_end == special.index(start)
  assert vocabulary.unknown is None and vocabulary.decode([vocabulary.document_start]) == b''


def test_a_tokenizer_without_document_start_is_refused():
  def make_unknown(tokenizer):
    tokenizer.model.unk_token = '<s>'

  separators = ', '.join(DOCUMENT_SEPARATORS)
  for special, listed in ((['<pad>', '<mask>'], '<pad>, <mask>'), ([], 'none'), (['<s>'], 'none')):
    content = tokenizer_files.byte_level(special=special, change=make_unknown)
    with bad_input(
      f'the tokenizer has no special token that separates documents: it adds none to a text, and '
      f'none of {separators} is among its special tokens ({listed}); add one of them to its '
      f'added_tokens'
    ):
      vocabularies.TokenizerVocabulary(content)


def test_unigram_tokenizer_never_reads_a_special_token_in_a_text():
  vocabulary = vocabularies.TokenizerVocabulary(tokenizer_files.unigram())
  assert (vocabulary.size, vocabulary.unknown, vocabulary.document_start) == (12, 2, 1)
  assert vocabulary.encode(b'ab z').tolist() == [11, 3, 2]
  assert not {0, 1} & set(vocabulary.encode(b'a </s></s>b<pad>').tolist())
  assert vocabulary.encode(b'</s>a<pad>', special=True).tolist() == [1, 3, 4, 0]


def test_equal_definitions_have_equal_ids(sentencepiece, tokenizer, tmp_path):
  for vocabulary, other in (
    (sentencepiece, vocabularies.learn_sentencepiece([TEXT], 341)),
    (tokenizer, vocabularies.TokenizerVocabulary(tokenizer_files.byte_level(size=279))),
  ):
    vocabulary.save(tmp_path)
    assert vocabularies.load(tmp_path).definition == vocabulary.definition != other.definition
  assert sentencepiece.definition != tokenizer.definition


def test_words_are_in_order_of_frequency_then_of_appearance():
  vocabulary = vocabularies.learn_words([b'b c a b <unk>\n', b'a d b\n'], None)
  assert vocabulary.size == 6
  assert vocabulary.decode(range(6)) == b'b a\nc <unk> d'
  assert vocabulary.document_start == 2  # <eos>


def test_word_vocabulary_always_has_line_end_and_unknown():
  vocabulary = vocabularies.learn_words([b'b a b'], None)
  assert vocabulary.decode(range(4)) == b'b a <unk>\n'
  assert vocabulary.encode(b'a new\tb \n').tolist() == [1, 2, 0, 3]
  assert vocabulary.document_start == 3


@each('size, expected', [(3, b'b'), (4, b'b a'), (5, b'b a c'), (50, b'b a c d')])
def test_word_vocabulary_size_includes_line_end_and_unknown(size, expected):
  vocabulary = vocabularies.learn_words([b'b b b a a c d'], size)
  assert vocabulary.size == min(size, 6)
  word_ids = [i for i in range(vocabulary.size) if vocabulary.decode([i]) not in (b'<unk>', b'\n')]
  assert vocabulary.decode(word_ids) == expected


def test_special_words_keep_their_rank_when_the_size_is_limited():
  vocabulary = vocabularies.learn_words([b'<unk> <unk> <unk> b b b b a a c\n'], 3)
  assert vocabulary.decode(range(3)) == b'b <unk>\n'


@each('text', [b'a b\na\n', b'a\n\nb\n', b'\na\n'])
def test_words_separated_by_single_spaces_are_lossless(text):
  vocabulary = vocabularies.learn_words([text], None)
  assert vocabulary.decode(vocabulary.encode(text)) == text


@each(
  'text, separated, size, start',
  [
    (b'b \n\ta', False, 5, 1),  # the newline
    (b'b a', False, 3, 0),  # else the space
    (b'\tb a', False, 4, 1),
    (b'ba', False, 2, 0),  # else the first character
    (b'b \na', True, 5, 4),
    (b'ba', True, 3, 2),
  ],
)
def test_document_start_of_characters(text, separated, size, start):
  vocabulary = vocabularies.learn_characters([text], 'utf-8', separated)
  assert (vocabulary.size, vocabulary.document_start) == (size, start)
  ids = vocabulary.encode(text)
  assert (start in ids) is not separated
  assert vocabulary.decode([start, *ids]).endswith(text)


def test_latin_characters_are_bytes():
  every_byte = bytes(range(256))
  vocabulary = vocabularies.learn_characters([every_byte], 'latin-1', False)
  assert vocabulary.size == 256
  assert vocabulary.encode(every_byte).tolist() == list(range(256))
  assert vocabulary.decode(range(256)) == every_byte
  assert vocabulary.document_start == ord('\n')


def test_bytes_are_their_own_ids():
  vocabulary = vocabularies.ByteVocabulary()
  every_byte = bytes(range(256))
  assert (vocabulary.size, vocabulary.document_start) == (257, 256)
  assert vocabulary.encode(every_byte).tolist() == list(range(256))
  assert vocabulary.decode([256, *range(256), 256]) == every_byte


AWKWARD = 'é\r\n\x00\u2028"\\ 😀\ta\n'.encode()


@pytest.mark.parametrize('kind', [*data_config.VOCABULARIES, 'separated', 'latin-1'])
def test_a_saved_vocabulary_is_loaded_unchanged(kind, sentencepiece, tokenizer, tmp_path):
  vocabulary = {
    'bytes': vocabularies.ByteVocabulary(),
    'characters': vocabularies.learn_characters([AWKWARD], 'utf-8', False),
    'separated': vocabularies.learn_characters([AWKWARD], 'utf-8', True),
    'latin-1': vocabularies.learn_characters([AWKWARD], 'latin-1', False),
    'words': vocabularies.learn_words([AWKWARD], None),
    'sentencepiece': sentencepiece,
    'tokenizer': tokenizer,
  }[kind]
  vocabulary.save(tmp_path)
  loaded = vocabularies.load(tmp_path)
  assert type(loaded) is type(vocabulary)
  assert (loaded.size, loaded.document_start) == (vocabulary.size, vocabulary.document_start)
  ids = vocabulary.encode(AWKWARD)
  assert loaded.encode(AWKWARD).tolist() == ids.tolist()
  assert loaded.decode(ids) == vocabulary.decode(ids)


def test_a_missing_field_is_named(tmp_path):
  (tmp_path / 'vocabulary.json').write_text('{"kind": "characters", "encoding": "utf-8"}')
  with bad_input(
    f'{tmp_path}/vocabulary.json is damaged: CharacterVocabulary.__init__() missing 2 required '
    "positional arguments: 'characters' and 'separated'; the training command writes it again if "
    'steps are left'
  ):
    vocabularies.load(tmp_path)


@each('text, encoding', [('hello\n', 'utf-8'), ('naïve ☃ 日本', 'utf-8'), ('ÿa', 'latin-1')])
def test_characters_equal_a_loop(text, encoding):
  """Sorted by code point; a document start, which has the next id, is no text."""
  vocabulary = vocabularies.learn_characters([text.encode(encoding)], encoding, separated=True)
  characters = sorted(set(text))
  expected = [characters.index(c) for c in text]
  assert vocabulary.encode(text.encode(encoding)).tolist() == expected
  assert vocabulary.encode(b'').tolist() == [] and vocabulary.decode([]) == b''
  start = vocabulary.document_start
  assert start == vocabulary.num_characters == len(characters)
  assert vocabulary.decode([start, *expected, start]) == text.encode(encoding)
  for unknown in ('\t', '\xfe', '\U0001f600')[: 2 if encoding == 'latin-1' else 3]:
    with bad_input(f'{unknown!r} is not among the {len(characters)} known characters'):
      vocabulary.encode((text + unknown).encode(encoding))
