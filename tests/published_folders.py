"""Small folders of Hugging Face with random parameters, so that a test can damage them."""

import json
import pathlib
import types

from flax import linen as nn
import jax
import numpy as np

from ngrammer_jax.config import conversion
from ngrammer_jax.data import vocabularies
from ngrammer_jax.interop import row_files
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.runs import huggingface_export
from tests import tokenizer_files

V = 288  # rows of the embedding; the tokenizer has 280 ids
LLAMA = {
  'layers': 2,
  'width': 16,
  'heads': 4,
  'key_value_heads': 2,
  'feed_forward_width': 24,
  'norm_kind': 'rms',
  'activation': 'silu',
  'softmax_bias': False,
  'scale_embeddings': False,
}


def write(folder, dtype='float32', vocabulary_size=V, vocabulary=None, scale=1.0, **options):
  """Writes a Llama, or what the options of a model make of it, and returns its parameters.

  Without a vocabulary it has a tokenizer that adds no tokens, and no settings of it.
  """
  values = {'model': LLAMA | options, 'training': {'segment_length': 8}}
  config = conversion.resolve(values)
  model = language_model.build(config.model, vocabulary_size)
  shapes = nn.unbox(model_variables.abstract(model)['params'])
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: (scale * rng.normal(size=leaf.shape)).astype(dtype), shapes)
  run = types.SimpleNamespace(
    config=config,
    vocabulary=vocabulary or vocabularies.TokenizerVocabulary(tokenizer_files.byte_level()),
    vocabulary_size=vocabulary_size,
    origin={'positions': 64},
    published=None,
    restored=types.SimpleNamespace(params=params),
  )
  folder.mkdir(exist_ok=True)
  huggingface_export.save(run, folder)
  if vocabulary is None:
    for name in ('tokenizer_config.json', 'generation_config.json'):
      (folder / name).unlink()
    (folder / 'tokenizer.json').write_bytes(run.vocabulary.content)
  return params


def write_settings(folder: pathlib.Path) -> None:
  """Writes what other files of a folder say about its tokens."""
  settings = {
    'bos_token': None,
    'eos_token': {'content': tokenizer_files.END, 'special': True},
    'tokenizer_class': 'GPT2Tokenizer',
    'add_bos_token': False,
    'chat_template': '{{ 1 }}',
    'added_tokens_decoder': {'0': {'content': tokenizer_files.END, 'special': True}},
  }
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  special = {'eos_token': tokenizer_files.END, 'pad_token': tokenizer_files.END}
  (folder / 'special_tokens_map.json').write_text(json.dumps(special))


def divide_tokenizer(folder: pathlib.Path) -> None:
  """Replaces the tokenizer.json of a folder by vocab.json and merges.txt."""
  path = folder / 'tokenizer.json'
  model = json.loads(path.read_text())['model']
  path.unlink()
  (folder / 'vocab.json').write_text(json.dumps(model['vocab']))
  merges = '\n'.join(' '.join(pair) for pair in model['merges'])
  (folder / 'merges.txt').write_text(f'#version: 0.2\n{merges}\n')


def split(folder: pathlib.Path, count: int = 2) -> None:
  """Divides the weights of a folder among several files with an index."""
  path = folder / 'model.safetensors'
  arrays, metadata = row_files.stored_arrays(path)
  places = {}
  for number in range(count):
    file = f'model-{number + 1:05}-of-{count:05}.safetensors'
    part = {name: arrays[name] for name in list(arrays)[number::count]}
    described = {name: (array.shape, array.dtype) for name, array in part.items()}
    with row_files.new_file(folder / file, described, metadata) as write_rows:
      for name, array in part.items():
        write_rows(name, 0, array.read(0, array.shape[0]))
    places |= dict.fromkeys(part, file)
  path.unlink()
  index = {'metadata': {}, 'weight_map': places}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
