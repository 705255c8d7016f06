"""Tokenizers with more ids than the model has rows."""

import json

import numpy as np
import pytest

from ngrammer_jax import errors, runs
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import published
from tests import gguf_files, published_folders, tokenizer_files
from tests.checks import bad_input
from tests.data import document_files

SPECIAL = ('<s>', '</s>')  # trained before the bytes, so they have the first ids
ROWS = 280


def tokenizer(**is_special):
  """Byte pairs with ROWS ids, and one added token more for each name."""
  from tokenizers import AddedToken

  def add(own):
    for name, special in is_special.items():
      own.add_tokens([AddedToken(f'<{name}>', special=special, normalized=False)])

  return tokenizer_files.byte_level(size=ROWS, special=SPECIAL, change=add)


def write(folder, content, **settings):
  folder.mkdir()
  (folder / 'tokenizer.json').write_bytes(content)
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return folder


def test_a_special_token_without_a_row(tmp_path, caplog):
  caplog.set_level('INFO')
  content = tokenizer(image=True)
  folder = write(tmp_path / 'model', content, bos_token='<s>', eos_token='<image>')
  vocabulary = published.read(folder, ROWS)
  assert caplog.messages == [
    'added tokens without a row in the model: 1, such as <image>; no text may have them'
  ]
  assert vocabulary.size == ROWS and vocabulary.tokens_without_row == ('<image>',)
  assert vocabulary.end_tokens == (0, 0)  # the end token has no row
  text = b'a few <image> lines'
  ids = vocabulary.encode(text)
  assert ids.max() < ROWS and vocabulary.decode(ids) == text
  assert len(vocabulary.token_texts()[0]) == ROWS
  message = (
    f'the token <image> has the id {ROWS}, but the model has {ROWS} rows: use a text without it'
  )
  with bad_input(message):
    vocabulary.encode(text, special=True)
  assert vocabulary.encode(b'<s>a</s>', special=True)[[0, -1]].tolist() == [0, 1]
  vocabulary.save(tmp_path)
  loaded = vocabularies.load(tmp_path)
  assert loaded.size == ROWS and loaded.definition == vocabulary.definition
  assert published.read(folder, None).size == ROWS + 1
  assert published.read(folder, ROWS + 1).end_tokens == (ROWS, 0)


def test_an_added_token_without_a_row(tmp_path):
  """It is found in ordinary text too."""
  vocabulary = vocabularies.TokenizerVocabulary(tokenizer(image=True, tool=False), ROWS)
  assert vocabulary.tokens_without_row == ('<image>', '<tool>')
  vocabulary.encode(b'<image>')
  with pytest.raises(
    errors.BadInput, match=r'the token <tool> has the id 281, but the model has 280'
  ):
    vocabulary.encode_all([b'a few', b'a <tool>'])


def test_ordinary_tokens_without_rows(tmp_path):
  with pytest.raises(
    errors.BadInput, match='the tokenizer has 281 ids, but the model 279: it is of'
  ):
    published.read(write(tmp_path / 'model', tokenizer(image=True)), ROWS - 1)


def test_a_begin_token_without_a_row(tmp_path):
  content = json.loads(tokenizer(image=True))
  content['post_processor'] = {
    'type': 'BertProcessing',
    'cls': ['<image>', ROWS],
    'sep': ['</s>', 1],
  }
  folder = write(tmp_path / 'model', json.dumps(content).encode())
  with bad_input(f'{folder}: texts begin with the id {ROWS}, but the model has {ROWS} rows'):
    published.read(folder, ROWS)
  assert vocabularies.TokenizerVocabulary(tokenizer(bos=True), ROWS).document_start == 0


def test_a_gguf_file_with_fewer_rows_than_tokens():
  metadata = gguf_files.tokenizer()
  tokens = metadata['tokenizer.ggml.tokens']
  metadata['tokenizer.ggml.tokens'] = [*tokens, '<image>']
  metadata['tokenizer.ggml.token_type'] = [*metadata['tokenizer.ggml.token_type'], 3]
  metadata['tokenizer.ggml.token_type'] = np.array(metadata['tokenizer.ggml.token_type'])
  vocabulary = published.from_gguf(metadata, len(tokens))
  assert vocabulary.tokens_without_row == ('<image>',)
  with pytest.raises(errors.BadInput, match='it is of another model'):
    published.from_gguf(metadata, len(tokens) - 1)


def test_a_run_is_exported_and_opened_again(tmp_path, one_device):
  vocabulary = vocabularies.TokenizerVocabulary(tokenizer(image=True), ROWS)
  published_folders.write(tmp_path / 'model', vocabulary_size=ROWS, vocabulary=vocabulary)
  run = runs.load_run(tmp_path / 'model')
  run.export(tmp_path / 'run')
  runs.load_run(tmp_path / 'run').export(tmp_path / 'again', format='huggingface')
  for folder in ('model', 'run', 'again'):
    opened = runs.load_run(tmp_path / folder)
    assert opened.vocabulary_size == opened.vocabulary.size == ROWS
    assert opened.vocabulary.tokens_without_row == ('<image>',)


def test_the_file_of_a_streamed_text_is_named(tmp_path):
  """The text before it is encoded in the same call."""
  for name, text in (('train_a', 'a few lines'), ('train_b', 'a <tool>'), ('valid', 'x')):
    document_files.write(tmp_path / f'{name}.jsonl', [text])
  vocabulary = vocabularies.TokenizerVocabulary(tokenizer(tool=False), ROWS)
  shards = document_files.open_corpus('shards', str(tmp_path)).train_shards
  rows = document_files.Packed(shards, vocabulary, 2, 4, tmp_path / 'w')
  with bad_input(
    f'{tmp_path}/train_b.jsonl: the token <tool> has the id {ROWS}, but the model has {ROWS} rows: '
    f'use a text without it'
  ):
    rows.segment(0)
