"""Vocabularies of Hugging Face folders and of the metadata of GGUF files."""

import io
import json
import zlib

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.tokens import token_cache
from ngrammer_jax.data.vocabularies import published
from tests import checks, gguf_files, tiny_tokenizers, tokenizer_files
from tests.checks import bad_input
from tests.loops import each

TEXTS = ['', 'a few lines', '  of  some\n\ntext,  ', 'naïve 記憶 😀\t\x07', "it's 12345 <s>", '\n']
TRAINING = tokenizer_files.TEXT + "it's of the 2nd line, naïve 12\n" * 9


def write(folder, **contents):
  """A folder with files of JSON; of a name, _json is its ending."""
  folder.mkdir()
  for name, content in contents.items():
    (folder / name.replace('_json', '.json')).write_text(json.dumps(content))
  return folder


def read(folder):
  return published.read(folder, None)


def words(vocabulary, text):
  """The words of a text, before pairs are merged."""
  from tokenizers import Tokenizer

  tokenizer = Tokenizer.from_buffer(vocabulary.content)
  cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
  return [text[start:stop] for _, (start, stop) in cut]


@each(
  'cut, expected',
  [
    ('gpt-2', ['it', "'s", ' ', ' 12345', '\n\n', ' x', '!', '\n']),
    ('default', ['it', "'s", ' ', ' 12345', '\n\n', ' x', '!', '\n']),
    ('smollm', ['it', "'s", '  ', '1', '2', '3', '4', '5', '\n\n', ' x', '!', '\n']),
    ('llama-bpe', ['it', "'s", ' ', ' ', '123', '45', '\n\n', ' x', '!\n']),
    ('qwen2', ['it', "'s", ' ', ' ', '1', '2', '3', '4', '5', '\n\n', ' x', '!\n']),
  ],
)
def test_how_texts_are_cut_into_words(cut, expected):
  vocabulary = published.from_gguf(gguf_files.tokenizer(cut), None)
  assert words(vocabulary, "it's  12345\n\n x!\n") == expected
  for text in TEXTS:
    assert vocabulary.decode(vocabulary.encode(text.encode())) == text.encode()


@each(
  'changes, problem',
  [
    ({'pre': 'tekken'}, "tokenizer.ggml.pre is 'tekken': its pre-tokenizer is not supported"),
    ({'pre': None}, 'tokenizer.ggml.pre is None'),
    ({'model': 'bert'}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
  ],
)
def test_tokenizers_that_are_not_known(changes, problem):
  with pytest.raises(errors.BadInput, match=problem):
    published.from_gguf(gguf_files.tokenizer(**changes), None)


def test_tokens_of_a_gguf_file():
  metadata = gguf_files.tokenizer(eot_token_id=5)
  metadata['tokenizer.chat_template'] = '{{ messages }}'
  vocabulary = published.from_gguf(metadata, 300)
  assert vocabulary.size == 300 and vocabulary.document_start == 0
  assert vocabulary.end_tokens == (1, 5, 0) and not vocabulary.adds_start
  assert vocabulary.chat_template == '{{ messages }}' and vocabulary.special_tokens == (
    '<s>',
    '</s>',
  )
  assert vocabulary.encode(b'<s>a</s>', special=True)[[0, -1]].tolist() == [0, 1]
  assert not {0, 1} & set(vocabulary.encode(b'<s>a</s>').tolist())
  assert published.from_gguf(gguf_files.tokenizer('llama-bpe'), None).adds_start
  assert published.from_gguf(gguf_files.tokenizer(add_bos_token=True), None).adds_start
  none = published.from_gguf(gguf_files.tokenizer(bos_token_id=None), None)
  assert (none.document_start, none.document_end, none.adds_start) == (1, 1, False)


def test_what_the_files_of_a_folder_say(tmp_path):
  content = json.loads(tokenizer_files.byte_level(special=('<s>', '</s>', '<|im_end|>')))
  template = {
    'type': 'TemplateProcessing',
    'single': [
      {'SpecialToken': {'id': '<s>', 'type_id': 0}},
      {'Sequence': {'id': 'A', 'type_id': 0}},
    ],
    'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 0}}],
    'special_tokens': {'<s>': {'id': '<s>', 'ids': [0], 'tokens': ['<s>']}},
  }
  with_start = content | {'post_processor': template}
  names = {'bos_token': '<s>', 'eos_token': {'content': '</s>', 'lstrip': False}}
  other, newer = {'bos_token': '<|im_end|>'}, names | {'added_tokens_decoder': {}}
  ids = {'bos_token_id': 2, 'eos_token_id': [1, 2]}
  cases = [
    (with_start, {}, (0, (0,), True)),
    (with_start, {'tokenizer_config_json': {'add_bos_token': False}}, (0, (0,), True)),
    (with_start, {'tokenizer_config_json': {'add_bos_token': None}}, (0, (0,), True)),
    (content, {'tokenizer_config_json': names}, (0, (1, 0), False)),
    (content, {'special_tokens_map_json': names}, (0, (1, 0), False)),
    (content, {'tokenizer_config_json': names | {'add_bos_token': True}}, (0, (1, 0), False)),
    (
      content,
      {'tokenizer_config_json': names, 'special_tokens_map_json': other},
      (2, (1, 2), False),
    ),
    (
      content,
      {'tokenizer_config_json': newer, 'special_tokens_map_json': other},
      (0, (1, 0), False),
    ),
    (content, {'config_json': ids}, (2, (1, 2, 2), False)),
    (
      content,
      {'tokenizer_config_json': names, 'generation_config_json': ids},
      (0, (1, 2, 0), False),
    ),
    (content, {'config_json': {'bos_token_id': None, 'eos_token_id': 1}}, (1, (1, 1), False)),
    (content, {'config_json': {'bos_token_id': 9_999, 'eos_token_id': -1}}, (0, (0, 0), False)),
    (content, {'config_json': {'bos_token_id': 10**30, 'eos_token_id': -1}}, (0, (0, 0), False)),
  ]
  for i, (tokenizer, others, (start, ends, adds_start)) in enumerate(cases):
    vocabulary = read(write(tmp_path / str(i), tokenizer_json=tokenizer, **others))
    assert vocabulary.document_start == start, i
    assert set(vocabulary.end_tokens) == set(ends) and vocabulary.end_tokens[0] == ends[0], i
    assert vocabulary.adds_start is adds_start, i


def test_chat_templates_of_a_folder(tmp_path):
  content = json.loads(tokenizer_files.byte_level())
  for i, (template, expected) in enumerate(
    (
      (None, None),
      ('one', 'one'),
      ([{'name': 'tool_use', 'template': 'a'}, {'name': 'default', 'template': 'b'}], 'b'),
    )
  ):
    settings = {'chat_template': template}
    folder = write(tmp_path / str(i), tokenizer_json=content, tokenizer_config_json=settings)
    assert read(folder).chat_template == expected
  (folder / 'chat_template.jinja').write_text('own file')
  assert read(folder).chat_template == 'own file'


def test_chat_templates_that_are_no_text(tmp_path):
  content = json.loads(tokenizer_files.byte_level())
  damaged = (
    (5, 'the chat template is 5, expected a text'),
    ({'default': 'a'}, "the chat template is {'default': 'a'}, expected a text"),
    ([{'name': 'default', 'template': 5}], 'the chat template is 5, expected a text'),
    ([{'name': 'default'}], "no 'template'"),
    (['a'], "string indices must be integers, not 'str'"),
  )
  for i, (template, reason) in enumerate(damaged):
    settings = {'chat_template': template}
    folder = write(tmp_path / str(i), tokenizer_json=content, tokenizer_config_json=settings)
    with bad_input(f'the tokenizer in {folder} is damaged: {reason}; download it again'):
      published.read(folder, None)


def test_pairs_and_merges_in_two_files(tmp_path):
  content = tokenizer_files.byte_level(special=('<|endoftext|>',))
  model = json.loads(content)['model']
  whole = vocabularies.TokenizerVocabulary(content)

  def folder(name, **settings):
    parts = write(tmp_path / name, vocab_json=model['vocab'], tokenizer_config_json=settings)
    lines = ['#version: 0.2', *map(' '.join, model['merges'])]
    (parts / 'merges.txt').write_text('\n'.join(lines) + '\n\n')  # blank lines are skipped
    return parts

  names = {'bos_token': '<|endoftext|>', 'eos_token': '<|endoftext|>'}
  vocabulary = read(folder('gpt2', tokenizer_class='GPT2Tokenizer', **names))
  for text in TEXTS:
    assert vocabulary.encode(text.encode()).tolist() == whole.encode(text.encode()).tolist()
  assert not vocabulary.adds_start and vocabulary.end_tokens[0] == vocabulary.document_start == 0
  added = {'280': {'content': '<|im_end|>', 'special': True}}
  qwen = read(
    folder('qwen', tokenizer_class='Qwen2TokenizerFast', added_tokens_decoder=added, **names)
  )
  assert words(qwen, 'a12') == ['a', '1', '2'] and qwen.size == 281
  assert qwen.encode(b'<|im_end|>', special=True).tolist() == [280]
  with pytest.raises(errors.BadInput, match="the class of the tokenizer is 'BloomTokenizer'"):
    read(folder('bloom', tokenizer_class='BloomTokenizer', **names))
  with pytest.raises(errors.BadInput, match='the class of the tokenizer is None'):
    read(folder('none', **names))
  (tmp_path / 'bloom' / 'vocab.json').write_text(json.dumps(model['vocab'] | {'far': 2**31}))
  (tmp_path / 'bloom' / 'tokenizer_config.json').write_text('{"tokenizer_class": "GPT2Tokenizer"}')
  with pytest.raises(errors.BadInput, match='a token has the id 2,147,483,648'):
    read(tmp_path / 'bloom')
  (tmp_path / 'gpt2' / 'merges.txt').write_text('')
  with pytest.raises(errors.BadInput, match='is damaged'):
    read(tmp_path / 'gpt2')


def test_a_damaged_folder_is_one_sentence(tmp_path):
  for i, content in enumerate(({'model': 1}, {}, [])):
    with pytest.raises(errors.BadInput, match=r'the tokenizer in .* is damaged: '):
      read(write(tmp_path / str(i), tokenizer_json=content))
  (tmp_path / '0' / 'tokenizer.json').unlink()
  (tmp_path / '0' / 'tokenizer.model').write_bytes(b'\xff\xff\xff')
  with pytest.raises(errors.BadInput, match='is damaged: tokenizer.model is no SentencePiece'):
    read(tmp_path / '0')
  assert not published.has_tokenizer(tmp_path)
  metadata = gguf_files.tokenizer(merges=['a \u2603'])
  with pytest.raises(errors.BadInput, match='tokenizer in file is damaged: .*out of vocabulary'):
    with published.translate_damage('file'):
      published.from_gguf(metadata, None)


def train(prefix, **options):
  """A SentencePiece model as those of Llama (a space before each text) or Gemma (none)."""
  import sentencepiece

  model = io.BytesIO()
  defaults = {
    **{'model_type': 'bpe', 'vocab_size': 340, 'byte_fallback': True, 'minloglevel': 2},
    **{'normalization_rule_name': 'identity', 'remove_extra_whitespaces': False},
    **{'add_dummy_prefix': prefix, 'user_defined_symbols': ['<user>']},
    'allow_whitespace_only_pieces': True,
  }
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TRAINING.split('\n')), model_writer=model, **defaults | options
  )
  return model.getvalue()


@each('prefix', [True, False])
def test_sentencepiece_models_give_the_same_tokens(tmp_path, prefix):
  """As the library that made them; also from the pieces of a GGUF file."""
  import sentencepiece

  content = train(prefix)
  own = sentencepiece.SentencePieceProcessor(model_proto=content)
  folder = write(
    tmp_path / str(prefix),
    tokenizer_config_json={'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': True},
  )
  (folder / 'tokenizer.model').write_bytes(content)
  pieces = [own.id_to_piece(i) for i in range(len(own))]
  kinds = [
    2 if own.is_unknown(i) else 3 if own.is_control(i) else 6 if own.is_byte(i) else 1
    for i in range(len(own))
  ]
  kinds[pieces.index('<user>')] = 4
  metadata = gguf_files.tokenizer(
    model='llama',
    tokens=pieces,
    token_type=np.array(kinds),
    bos_token_id=1,
    eos_token_id=2,
    scores=np.array([own.get_score(i) for i in range(len(own))]),
    add_space_prefix=prefix,
    merges=None,
  )
  bare = {k: x for k, x in metadata.items() if not k.endswith('os_token_id')}
  for vocabulary in (read(folder), *(published.from_gguf(m, None) for m in (metadata, bare))):
    assert vocabulary.adds_start and vocabulary.document_start == 1
    assert vocabulary.end_tokens == (2, 1) and vocabulary.size == 340
    # After a space prefix, the official library also puts one behind every added token.
    added = [] if prefix else ['a <user> few']
    for text in [*TEXTS[1:], *added, *TRAINING.split('\n')[:3]]:
      expected = own.encode(text)
      if '<s>' not in text:
        assert vocabulary.encode(text.encode()).tolist() == expected, text
      assert vocabulary.decode(vocabulary.encode(text.encode())) == text.encode()
  (folder / 'tokenizer_config.json').unlink()
  assert not read(folder).adds_start and read(folder).document_start == 1


@each(
  'changes, expected',
  [
    ({}, ['\u2581', 'in', '<|im_end|>', 'on']),
    ({'tokenizer_class': None}, ['\u2581', 'in', '<|im_end|>', 'on']),  # that of model_type
    ({'legacy': True}, ['\u2581', 'in', '<|im_end|>', '\u2581', 'on']),
    ({'add_prefix_space': False}, ['\u2581', 'in', '<|im_end|>', 'on']),
    (
      {'tokenizer_class': 'PreTrainedTokenizerFast'},
      ['\u2581', '\u2581', 'in', '<|im_end|>', '\u2581', 'on'],
    ),
  ],
)
def test_spaces_before_the_texts_of_a_sentencepiece_model(tmp_path, changes, expected):
  """As transformers 5.24 puts them, of which LlamaTokenizer puts fewer than SentencePiece."""
  tiny_tokenizers.write(tmp_path, 'sentencepiece', has_begin=False)
  path = tmp_path / 'tokenizer_config.json'
  settings = json.loads(path.read_text())
  del settings['legacy']
  path.write_text(json.dumps(settings | changes))
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'llama'}))
  vocabulary = read(tmp_path)
  tokens = list(map(vocabulary.token, vocabulary.encode(b' in<|im_end|>on', special=True)))
  assert tokens == expected
  has_prefix = changes.get('add_prefix_space', True)
  assert vocabulary.token(vocabulary.encode(b'a')[0]) == ('\u2581a' if has_prefix else 'a')


@each(
  'options, problem',
  [
    ({'model_type': 'unigram', 'vocab_size': 285}, 'is not of byte pairs'),
    ({'remove_extra_whitespaces': True}, 'removes white space'),
  ],
)
def test_sentencepiece_models_that_are_not_supported(tmp_path, options, problem):
  (tmp_path / 'tokenizer.model').write_bytes(train(True, **options))
  with pytest.raises(errors.BadInput, match=problem):
    read(tmp_path)


def test_stored_and_loaded(tmp_path):
  vocabulary = published.from_gguf(gguf_files.tokenizer(), None)
  vocabulary.save(tmp_path)
  loaded = vocabularies.load(tmp_path)
  for name in ('document_start', 'document_end', 'end_tokens', 'adds_start', 'definition'):
    assert getattr(loaded, name) == getattr(vocabulary, name)
  fields = json.loads((tmp_path / 'vocabulary.json').read_text())
  assert fields['adds_start'] is False and fields['end_tokens'] == [1]
  (tmp_path / 'vocabulary.json').write_text('{"kind": "tokenizer"}')  # of an old run
  old = vocabularies.load(tmp_path)
  assert old.adds_start and old.end_tokens == (0, 0) and old.chat_template is None


def test_the_first_token_of_a_file_is_not_predicted(tmp_path):
  path = tmp_path / 'text.txt'
  path.write_text('a few lines')
  for adds_start in (False, True):
    metadata = gguf_files.tokenizer(add_bos_token=adds_start)
    vocabulary = published.from_gguf(metadata, None)
    split, ids = token_cache.encode_file(path, vocabulary), vocabulary.encode(b'a few lines')
    whole = np.insert(split.tokens, 0, split.document_start).tolist()
    assert whole == [0] * adds_start + ids.tolist() and split.text_bytes == 11


def test_bytes_without_a_token_are_noticed():
  metadata = gguf_files.tokenizer()
  names = 'tokenizer.ggml.tokens', 'tokenizer.ggml.token_type'
  tokens, kinds = (metadata[name] for name in names)
  missing = tokens.index('Ą')  # the byte 0x04
  metadata[names[0]] = [*tokens[:missing], '<|gone|>', *tokens[missing + 1 :]]
  vocabulary = published.from_gguf(metadata, None)
  assert vocabulary.decode(vocabulary.encode(b'a\x04b')) == b'ab'
  assert len(kinds) == len(tokens)


def test_reference_tokens():
  """Of the real SmolLM2, where its file is."""
  from ngrammer_jax.runs import pretrained

  expected = checks.smollm2_expected()
  try:
    path = pretrained.find('smollm2_135m_instruct')
  except errors.BadInput as error:
    pytest.skip(str(error))
  vocabulary = published.read(path, 49_152)
  assert not vocabulary.adds_start and vocabulary.end_tokens[0] == 2
  for name in ('english', 'python', 'enwik8'):
    if f'text/{name}' not in expected:
      continue
    ids = vocabulary.encode(str(expected[f'text/{name}']).encode())
    assert zlib.crc32(ids.astype(np.int64)) == expected[f'ids_crc32/{name}']
  for name in ('capital', 'chat', 'code'):
    ids = vocabulary.encode(str(expected[f'prompt/{name}']).encode(), special=True)
    assert ids.tolist() == expected[f'prompt_ids/{name}'].tolist()
