"""The n-gram memories of the reference arrays, with parameters of official implementations."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers.ngram.memory import NGramMemory

FLOAT64 = jnp.dtype('float64')
DEMO_NUMBERS = ('multipliers', 'table_sizes')
QWEN_NUMBERS = (*DEMO_NUMBERS, 'offsets')


def preset(name, **changes):
  return dataclasses.replace(NGramMemoryConfig.from_preset(name), **changes)


def longcat_layer(f):
  c = json.loads(str(f['config']))
  options = preset(
    'longcat',
    orders=tuple(range(2, c['orders'] + 1)),
    heads=c['k'],
    rows=(int(c['ratio'] * c['vocab']),),
    width=c['dim'] // (c['k'] * (c['orders'] - 1)),
    eos_id=c['eos'],
    untrained_row=c['pad'],
  )
  return NGramMemory(options, c['vocab'], c['dim'], dtype=FLOAT64)


def qwen_layer(f):
  c = json.loads(str(f['config']))
  index, orders = c['ple_layer_index'], c['ngram_size']
  options = preset(
    'ple',
    layers=tuple(range(index + 1)),
    orders=tuple(range(2, orders + 1)),
    heads=c['heads_per_ngram'],
    rows=(c['ngram_vocab_size_base'],),
    row_multiple=c['divisible_by'],
    width=c['ple_embed_dim'] // (c['heads_per_ngram'] * (orders - 1)),
    seed=c['seed'],
    eos_id=c['eos'],
    norm_epsilon=c['eps'],
    convolution=c['kernel'],
    convolution_epsilon=c['eps'],
  )
  return NGramMemory(options, c['vocab'], c['width'], index, c['hc_count'], FLOAT64)


def demo_layer(f, block, **changes):
  c = json.loads(str(f['config']))
  options = preset(
    'engram',
    layers=tuple(c['layer_ids']),
    orders=tuple(c['orders']),
    heads=c['heads'],
    rows=tuple(c['engram_vocab_size']),
    width=c['head_dim'],
    seed=c['seed'],
    fill_id=c['pad_id'],
    norm_epsilon=c['qk_norm_eps'],
    convolution=c['kernel_size'],
    convolution_epsilon=c['conv_norm_eps'],
  )
  options = dataclasses.replace(options, **changes)
  return NGramMemory(options, len(f['lookup_table']), c['width'], block, c['hc_mult'], FLOAT64)


def weights(f, prefix, numbers=()):
  """The arrays of a memory, by their official names."""
  return {k: f[k] for k in f if k.startswith(prefix) or k in numbers}


def save(path, arrays, metadata=None):
  """Writes a file with the library, with arrays beside those of the memory."""
  other = {'unrelated': np.zeros(3)}
  arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
  safetensors.save_file(arrays | other, path, metadata)
  return path
