"""Incremental detokenization never retracts a character, bits are per byte, seeds per prompt."""

import types

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.positions import PositionalConfig
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import detokenizer, encoding, sampling, text
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference.detokenizer import IncrementalDetokenizer
from tests import tokenizer_files
from tests.campaigns import texts
from tests.loops import each

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
  if kind == 'metaspace':
    return vocabularies.TokenizerVocabulary(tokenizer_files.metaspace(TEXT))
  return vocabularies.learn_sentencepiece([b'plain and naive text, and more of it\n' * 5], 300)


@pytest.mark.parametrize('kind', data_config.VOCABULARIES)
@pytest.mark.parametrize('prompt', ['', 'naïve \N{SNOWMAN}'])
def test_pieces_concatenate_to_the_text(kind, prompt):
  vocabulary = make_vocabulary(kind)
  ids = vocabulary.encode(TEXT.encode()).tolist()
  prompt_length = len(vocabulary.encode(prompt.encode()))
  stream = IncrementalDetokenizer(
    vocabulary, ids[:prompt_length], max_tokens=len(ids) - prompt_length
  )
  pieces = [stream.add(token) for token in ids[prompt_length:]]
  assert prompt + ''.join(pieces) == TEXT
  assert not any(detokenizer.REPLACEMENT in piece for piece in pieces)
  assert (stream.text, stream.tokens) == (TEXT[len(prompt) :], ids[prompt_length:])
  assert stream.is_done and not stream.has_ended


@each('kind', ['bytes', 'characters', 'words', 'sentencepiece', 'tokenizer', 'metaspace'])
def test_a_long_text_is_that_of_all_its_tokens(kind, monkeypatch):
  """The text of a token depends on a few tokens before it, also after many special ones."""
  monkeypatch.setattr(detokenizer, 'WINDOW', 4)
  vocabulary = make_vocabulary(kind)
  whole = vocabulary.encode((TEXT * 4).encode()).tolist()
  special = [vocabulary.document_start] * 9
  for split in (0, 1, 7, len(whole) // 2):
    prompt = whole[:split] + special
    tokens = [*special, *whole[split:]]
    if not vocabulary.special_tokens:  # the document start may be a word
      prompt, tokens = whole[:split], whole[split:]
    for shows_special in (False, True):
      growing = detokenizer._GrowingText(vocabulary, prompt, shows_special)
      for token in tokens:
        growing.add(token)
      decode = lambda ids: vocabulary.decode(ids, shows_special).decode('utf-8', 'replace')  # noqa: B023
      assert growing.text == decode(prompt + tokens)[len(decode(prompt)) :], (split, shows_special)


def test_characters_of_several_byte_tokens_in_a_row():
  """Their bytes decode together, so an incomplete one would take back those before it."""
  vocabulary = make_vocabulary('metaspace')
  ids = vocabulary.encode('日本x'.encode()).tolist()
  stream = IncrementalDetokenizer(vocabulary, [], max_tokens=len(ids))
  pieces = [stream.add(token) for token in ids]
  assert ''.join(pieces) == stream.text == '日本x'
  cut = IncrementalDetokenizer(vocabulary, [], max_tokens=len(ids) - 2)
  assert ''.join(map(cut.add, ids[:-2])) == cut.text == f'日{detokenizer.REPLACEMENT}'


@pytest.mark.full
def test_drawn_texts():
  """A small part of the trial in `tests/campaigns/texts.py`."""
  for seed in range(40):
    texts.check(seed)


def test_end_of_document():
  vocabulary = vocabularies.ByteVocabulary()
  stream = IncrementalDetokenizer(vocabulary, [], max_tokens=10)
  assert [stream.add(token) for token in (*b'ab', 0xE2, vocabulary.document_end)] == [
    'a',
    'b',
    '',
    detokenizer.REPLACEMENT,  # the character stays incomplete
  ]
  assert stream.has_ended and stream.is_done and stream.tokens == [*b'ab', 0xE2]


def test_no_document_end_if_the_symbol_occurs_inside_documents():
  assert make_vocabulary('words').document_end is None
  vocabulary = vocabularies.learn_characters([b'one text'], 'utf-8', separated=False)
  assert vocabulary.document_end is None


def text_before(stop, whole):
  """Returns the text before the stop string that is complete first."""
  for n in range(len(whole) + 1):
    matches = [whole[:n].index(each) for each in stop if each in whole[:n]]
    if matches:
      return whole[: min(matches)], n
  return whole, None


@each('stop', [('bc',), ('cab', 'aa'), ('abab', 'ba'), ('z',), ('a', 'ab'), ('é',)])
def test_text_ends_before_the_first_stop_string(stop):
  """What was emitted never has the beginning of a stop string that comes later."""
  for whole in ('abcabab', 'ababcaab', 'bbbbcabca', 'aéab', ''):
    stream = IncrementalDetokenizer(vocabularies.ByteVocabulary(), [], 100, stop)
    emitted, read = '', b''
    for byte in [*whole.encode(), 256]:
      emitted += stream.add(byte)
      read += bytes([byte]) if byte < 256 else b''
      assert emitted == stream.text
      if stream.is_done:
        break
    expected, stopped_at = text_before(stop, whole)
    assert emitted == expected, (whole, stop)
    assert stream.has_ended and (stopped_at is None) == (byte == 256)
    assert read.decode() == whole[:stopped_at]  # it stopped at once


def test_text_that_only_begins_a_stop_string_is_emitted_at_the_token_limit():
  stream = IncrementalDetokenizer(vocabularies.ByteVocabulary(), [], 3, ('abcd',))
  assert [stream.add(byte) for byte in b'abc'] == ['', '', 'abc']


def special_vocabulary():
  """A vocabulary with an end token and two other special tokens, <a> and <b>."""
  return vocabularies.TokenizerVocabulary(
    tokenizer_files.byte_level(special=(tokenizer_files.END, '<a>', '<b>'))
  )


@each(
  'stop',
  [
    ('x<a>',),
    ('<a>',),
    ('<b>y', 'é'),
    ('<a><b>',),
    ('x', '<b>'),
    ('x<|endoftext|>',),
    ('w<a>',),
    ('x<a>yz',),
    (' x<b>y', 'few<a>x!'),
  ],
)
def test_a_stop_string_that_spells_a_special_token_matches_that_token(stop):
  """Special tokens are no text, but a stop string finds them as they are spelled."""
  vocabulary = special_vocabulary()
  for whole in (
    'x<a>y',
    'aé x<b>yx<a>',
    'xx<a><b>y',
    '<b>x',
    'y<a>x<|endoftext|>x',
    '<b>yé',
    'a few<a>x',
    'ax<a>yzb',
    'a few<a>x!',
  ):
    ids = vocabulary.encode(whole.encode(), special=True).tolist()
    stream = IncrementalDetokenizer(vocabulary, vocabulary.encode(b'x<a>'), 100, stop)
    emitted = ''
    for i in [*ids, vocabulary.document_end]:
      emitted += stream.add(i)
      assert emitted == stream.text
      if stream.is_done:
        break
    until_end = whole.partition(tokenizer_files.END)[0] + tokenizer_files.END
    expected, _ = text_before(stop, until_end)
    for special in vocabulary.special_tokens:
      expected = expected.replace(special, '')
    assert emitted == expected, (whole, stop)
    assert stream.has_ended


def test_a_text_that_spells_a_special_token_is_read_as_the_caller_says(caplog):
  vocabulary = special_vocabulary()
  spelled = vocabulary.encode(b'<a>', special=True)
  assert spelled.tolist() == [1]
  for special in (False, True):
    ids = encoding.encode(vocabulary, 'x<a>y', 'text', special).ids
    assert (1 in ids) == special
    assert vocabulary.decode(ids, special) == b'x<a>y'
    encoding.check_special(vocabulary, ['x<a>y', [1]], special)
  (record,) = caplog.records  # once, for ordinary text
  assert record.message == (
    'the text spells special tokens, read as ordinary text: <a>; --special (special=True) reads '
    'them as special tokens'
  )
  with pytest.raises(errors.BadInput, match='the vocabulary of this model has none: leave it out'):
    encoding.check_special(vocabularies.ByteVocabulary(), ['a'], special=True)


def test_the_document_start_is_read_once():
  vocabulary = special_vocabulary()
  config = text.CompletionConfig(sampling.SamplingConfig(), tokens=1, seed=0, context=20)
  start = vocabulary.document_start
  for prompt, num_starts in (('x', 1), ('<|endoftext|>x', 1), ('', 1), ([start, 7], 1), ([7], 0)):
    ids = text.encode_prompt(vocabulary, prompt, 'prompt 1', config, special=True).ids
    assert (ids == start).sum() == num_starts, prompt
  assert (text.encode_prompt(vocabulary, [7, 8], 'prompt 1', config, special=False)).text == [7, 8]


def test_bits_are_per_byte():
  score = text.Score('é\N{SNOWMAN}', np.arange(2), np.log([2.0, 16.0]), lossless=True)
  assert score.bits_per_byte == pytest.approx(5 / 5)  # of 2 and 3 bytes


class Unstarted(vocabularies.ByteVocabulary):
  """The vocabulary of a model that reads no document start, and ends a text with either token."""

  adds_start, end_tokens = False, (65, 256)


def test_a_model_that_reads_no_document_start():
  vocabulary, seen = Unstarted(), []

  def score_documents(variables, documents, start, length):
    seen.append(start)
    return (np.ones(max(len(ids) - 1, 0)) for ids in documents)

  texts = [encoding.encode(vocabulary, t, '', special=False) for t in ('abc', 'a', '')]
  engine = types.SimpleNamespace(score_documents=score_documents)
  scores = text.score(engine, None, vocabulary, texts, 8)
  assert seen == [None] and [len(score.nats) for score in scores] == [2, 0, 0]
  assert [len(score.tokens) for score in scores] == [3, 1, 0]
  assert scores[0].bits_per_byte == pytest.approx(2 / np.log(2) / 3) and scores[0].lossless
  assert np.isnan(scores[1].perplexity) and np.isnan(scores[1].bits_per_byte)
  config = text.CompletionConfig(sampling.SamplingConfig(), tokens=1, seed=0, context=2)
  encode = lambda prompt: text.encode_prompt(vocabulary, prompt, 'prompt 1', config, special=False)
  prompts = [encode(prompt) for prompt in ('ab', '')]
  assert [prompt.ids.tolist() for prompt in prompts] == [[97, 98], [256]]
  message = 'prompt 1 is too long: 3 tokens, but 2 fill the context of 2; shorten it, or raise the '
  with pytest.raises(errors.BadInput, match=message):
    encode('abc')
  for end in (65, 256):
    answer = IncrementalDetokenizer(vocabulary, [97], max_tokens=9)
    answer.add(98)
    answer.add(end)
    assert (answer.text, answer.has_ended) == ('b', True)


def test_every_prompt_draws_with_its_own_seed():
  vocabulary, drawn = vocabularies.ByteVocabulary(), []

  def generate(variables, prompts, seeds, options, context, bidirectional, document_start, rows):
    assert rows >= len(prompts)
    drawn.extend(seeds)
    yield np.array(seeds)  # a token of each prompt

  config = text.CompletionConfig(sampling.SamplingConfig(), tokens=1, seed=70, context=8)
  prompt = text.encode_prompt(vocabulary, 'a', 'prompt', config, special=False)
  prompts = [prompt] * (inference.MAX_ROWS + 2)
  engine = types.SimpleNamespace(generate=generate)
  completions = list(text.complete(engine, None, vocabulary, prompts, config))
  assert drawn == [completion.seed for completion in completions]
  assert drawn == list(range(70, 70 + len(prompts)))


def test_learned_positions_end():
  model = model_config.ModelConfig(position='absolute', positional=PositionalConfig(max_length=9))
  make = lambda *limits: text.CompletionConfig(sampling.SamplingConfig(), 5, 0, *limits)
  make(9, (), 9).check_values(model, 1)
  with pytest.raises(errors.BadInput, match='context=10 exceeds the 9 positions of the model'):
    make(10, (), 9).check_values(model, 1)
  make(9, (), 9).check_length('prompt 1', 5)  # the last token is not read
  with pytest.raises(errors.BadInput, match='prompt 2 has 6 tokens, which with tokens=5 new ones'):
    make(9, (), 9).check_length('prompt 2', 5, starts=1)
  make(10**9).check_length('prompt 1', 10**9)
