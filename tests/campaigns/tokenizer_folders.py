"""Draws folders with a tokenizer: files, post-processors, classes and settings of all kinds.

folder = tokenizer_folders.draw(random.Random(0), path)
"""

import json
import pathlib
import random
from typing import Any

from tests import published_folders, tokenizer_files
from tests.data import test_published

# Classes that can read each kind of tokenizer; None: tokenizer_config.json names none.
ANY = (None, 'PreTrainedTokenizerFast', 'UnknownTokenizer')
CLASSES = {
  'byte level': (
    *ANY,
    'TokenizersBackend',
    'BloomTokenizer',
    'GPT2Tokenizer',
    'GPT2TokenizerFast',
    'GPTNeoXTokenizerFast',
    'LlamaTokenizerFast',
    'Qwen2Tokenizer',
  ),
  'pieces': (*ANY, 'LlamaTokenizer', 'LlamaTokenizerFast', 'GemmaTokenizer'),
  'words': ANY,
  'word pieces': ANY,
  'Unigram': ANY,
}
MODEL_TYPES = (
  'llama',
  'mistral',
  'qwen2',
  'qwen3',
  'gemma',
  'gemma2',
  'gemma3_text',
  'smollm3',
  'olmo2',
  'phi3',
  'gpt2',
  'gpt_neox',
)
BYTE_LEVEL = {
  'type': 'ByteLevel',
  'add_prefix_space': True,
  'trim_offsets': False,
  'use_regex': True,
}

Token = tuple[str, int]  # its text and its id


def template(*tokens: Token, end: tuple[Token, ...] = ()) -> dict[str, Any]:
  """Returns a post-processor that puts tokens before a text and after it."""
  before, after = ([{'SpecialToken': {'id': t, 'type_id': 0}} for t, _ in x] for x in (tokens, end))
  single = [*before, {'Sequence': {'id': 'A', 'type_id': 0}}, *after]
  return {
    'type': 'TemplateProcessing',
    'single': single,
    'pair': [*single, {'Sequence': {'id': 'B', 'type_id': 0}}],
    'special_tokens': {t: {'id': t, 'ids': [i], 'tokens': [t]} for t, i in (*tokens, *end)},
  }


def sequence(*processors: dict[str, Any]) -> dict[str, Any]:
  return {'type': 'Sequence', 'processors': list(processors)}


def contents() -> dict[str, bytes]:
  """Returns a tokenizer.json of each kind."""
  return {
    'byte level': tokenizer_files.byte_level(special=('<s>', '</s>', '<|x|>')),
    'pieces': tokenizer_files.metaspace(),
    'words': tokenizer_files.word_level(),
    'word pieces': tokenizer_files.word_pieces(),
    'Unigram': tokenizer_files.unigram(),
  }


def draw_processor(rng: random.Random, tokens: list[Token]) -> dict[str, Any] | None:
  """Returns a post-processor that adds some of the tokens."""
  first, second = rng.choices(tokens, k=2)
  roberta = {'type': 'RobertaProcessing', 'sep': list(second), 'cls': list(first)}
  return rng.choice(
    [
      None,
      BYTE_LEVEL,
      template(),
      template(first),
      template(first),
      template(*dict.fromkeys((first, second))),
      template(first, end=(second,)),
      template(end=(second,)),
      sequence(),
      sequence(BYTE_LEVEL, template(first)),
      sequence(template(first), BYTE_LEVEL),
      {'type': 'BertProcessing', 'sep': list(second), 'cls': list(first)},
      roberta | {'trim_offsets': True, 'add_prefix_space': False},
    ]
  )


def draw_settings(rng: random.Random, tokens: list[Token], names: list[str]) -> dict[str, Any]:
  """Returns settings that name some special tokens, as text or with their options."""
  settings: dict[str, Any] = {}
  for name in names:
    text, _ = rng.choice(tokens)
    options = dict.fromkeys(('lstrip', 'rstrip', 'normalized', 'single_word'), False)
    with_options = {'__type': 'AddedToken', 'content': text, 'special': True} | options
    if rng.random() < 0.6:
      settings[name] = rng.choice([text, with_options])
  return settings


def draw(rng: random.Random, folder: pathlib.Path, contents: dict[str, bytes]) -> dict[str, Any]:
  """Writes a new folder, and returns what it is, for messages."""
  folder.mkdir()
  kind = rng.choice(list(CLASSES))
  content = json.loads(contents[kind])
  tokens = [(token['content'], token['id']) for token in content['added_tokens']]
  content['post_processor'] = draw_processor(rng, tokens)
  is_whole = rng.random() < 0.75
  if kind == 'pieces' and not is_whole:
    (folder / 'tokenizer.model').write_bytes(test_published.train(rng.random() < 0.5))
  else:
    (folder / 'tokenizer.json').write_text(json.dumps(content))
  if kind == 'byte level' and not is_whole:
    published_folders.divide_tokenizer(folder)
  names = ['bos_token', 'eos_token', 'unk_token', 'pad_token']
  settings = draw_settings(rng, tokens, names)
  class_name = rng.choice(CLASSES[kind])
  if class_name is not None:
    settings['tokenizer_class'] = class_name
  if rng.random() < 0.6:
    settings['add_bos_token'] = rng.choice([True, False])
  config = {'model_type': rng.choice(MODEL_TYPES), 'pad_token_id': 0}
  for name in ('bos_token_id', 'eos_token_id'):
    if rng.random() < 0.4:
      config[name] = rng.choice(tokens)[1]
  files = {'config.json': config}
  if rng.random() < 0.9:
    files['tokenizer_config.json'] = settings
  if rng.random() < 0.3:
    files['special_tokens_map.json'] = draw_settings(rng, tokens, names[:2])
  for name, values in files.items():
    (folder / name).write_text(json.dumps(values))
  return files | {'kind': kind, 'post_processor': content['post_processor'], 'whole': is_whole}
