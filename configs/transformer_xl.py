"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860), and the NVIDIA recipe for WikiText-103.

  python -m ngrammer_jax.train --config=configs/transformer_xl.py:enwik8_base \\
    --config.data.path=/path/to/enwik8.gz --workdir=runs/enwik8_base

Variants of the scripts of the official PyTorch code, with exactly its number of parameters, the
results that the authors or NVIDIA published (bits per character of enwik8 and text8, otherwise
perplexity with <eos>), and the number of training tokens:

  enwik8_base      41,055,436  1.06           4.5G
  enwik8_large    277,231,820  0.99          19.7G, on 64 TPU cores for 2 to 5 days
  text8_base       40,964,635  none           4.5G
  text8_large     277,050,395  1.08          19.7G, on 64 TPU cores
  wt103_base      151,107,538  24.03          1.8G, about a day on 4 V100 (fairseq)
  wt103_large     285,170,506  18.3         196.6G, on 64 TPU cores; the paper says 257M
  lm1b_base       357,812,065  none           3.6G, for a vocabulary of 793,470 words
  lm1b_large      841,295,961  21.8          19.7G, on 512 TPU cores
  nvidia_base     191,950,298  23.24 +- .08   2.0G, 76 minutes on 8 A100
  nvidia_large    285,170,506  18.17 +- .04   4.9G, 430 minutes on 8 A100

Small variants for 2 CPU cores, with sizes and learning rates of our own: text8_small (1,448,475
parameters; the README has results with and without memory) and wikitext2_small (2,003,648), with an
adaptive softmax.

The published results of the large variants are from the official TensorFlow code, which differs
from these scripts: model.memory.first="zeros", optimizer.schedule="transformer_xl_tensorflow" with
final_fraction 0.01, one more key with same_length ("memory_and_self"), for wt103_large and
lm1b_large positional.shared_biases=False and initial.deviation=projection_deviation=0.005, and for
lm1b_large a learning rate of 1e-4. The script of text8_large has no warm-up; this variant has the
warm-up of enwik8_large. The cutoffs of NVIDIA are a few words lower, because its vocabulary has
another order. Only the small variants have been trained with this code.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from ngrammer_jax import config


class Experiment(NamedTuple):
  """The options of a script of the official code."""

  layers: int
  width: int
  heads: int
  feed_forward_width: int
  dropout: float
  attention_dropout: float
  batch_size: int
  segment_length: int  # and length of the memory
  steps: int
  warmup_steps: int
  evaluation_segment_length: int
  evaluation_memory_length: int
  evaluation_clamp_length: int | None
  evaluation_streams: int


# The values of `Experiment`.
VARIANTS = {
  'enwik8_base': (12, 512, 8, 2048, 0.1, 0.0, 22, 512, 400_000, 0, 80, 2100, 820, 10),
  'enwik8_large': (24, 1024, 8, 3072, 0.15, 0.15, 64, 768, 400_000, 4000, 128, 3800, 1000, 10),
  'text8_base': (12, 512, 8, 2048, 0.1, 0.0, 22, 512, 400_000, 0, 80, 2100, 820, 10),
  'text8_large': (24, 1024, 8, 3072, 0.15, 0.15, 64, 768, 400_000, 4000, 128, 3800, 1000, 10),
  'wt103_base': (16, 410, 10, 2100, 0.1, 0.0, 60, 150, 200_000, 0, 64, 640, 400, 10),
  'wt103_large': (18, 1024, 16, 4096, 0.2, 0.2, 128, 384, 4_000_000, 16_000, 128, 1600, 1000, 10),
  'lm1b_base': (18, 1024, 8, 4096, 0.0, 0.0, 224, 32, 500_000, 20_000, 32, 128, None, 64),
  'lm1b_large': (24, 1280, 16, 8192, 0.05, 0.05, 512, 32, 1_200_000, 30_000, 32, 128, None, 8),
  'nvidia_base': (16, 512, 8, 2048, 0.1, 0.0, 256, 192, 40_000, 1000, 64, 640, 400, 10),
  'nvidia_large': (18, 1024, 16, 4096, 0.2, 0.2, 128, 384, 100_000, 16_000, 128, 1600, 1000, 10),
  'text8_small': (3, 192, 6, 768, 0.0, 0.0, 16, 128, 480, 50, 128, 128, None, 32),
  'wikitext2_small': (2, 128, 4, 512, 0.0, 0.0, 16, 64, 480, 50, 64, 64, None, 16),
}
CUTOFFS = {
  'wt103': (20_000, 40_000, 200_000),
  'nvidia': (20_000, 40_000, 200_000),
  'lm1b': (60_000, 100_000, 640_000),
  'wikitext2': (2000, 10_000),
}


def get_config(variant: str = 'enwik8_base') -> ConfigDict:
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  corpus, size = variant.split('_')
  options = Experiment(*VARIANTS[variant])
  c = config.default()
  m = c.model
  t = c.training
  e = c.evaluation
  m.layers = options.layers
  m.width = options.width
  m.heads = options.heads
  m.feed_forward_width = options.feed_forward_width
  m.dropout = options.dropout
  m.attention_dropout = options.attention_dropout
  t.batch_size = options.batch_size
  t.segment_length = options.segment_length
  t.steps = options.steps
  c.optimizer.warmup_steps = options.warmup_steps
  e.segment_length = options.evaluation_segment_length
  e.streams = options.evaluation_streams

  m.inner_dropout = m.dropout
  m.activation = 'relu'
  m.gated = False
  m.feed_forward_bias = True
  m.position = 'relative'
  m.norm = 'post_skip'
  m.norm_epsilon = 1e-5
  m.final_norm = False
  is_official = size != 'small'
  if is_official:
    m.initial = config.block('model.initial', recipe='transformer_xl')
  same_length = {'nvidia': 'memory_and_self', 'lm1b': None}.get(corpus, 'memory')
  m.memory = config.block(
    'model.memory',
    length=t.segment_length,
    across_documents=is_official,  # the official code ignores document boundaries
  )
  e.memory = config.block(
    'evaluation.memory',
    length=options.evaluation_memory_length,
    clamp_length=options.evaluation_clamp_length,
    same_length=same_length if is_official else None,
  )

  c.data.corpus = corpus if corpus in ('enwik8', 'text8') else 'wikitext'
  c.data.vocabulary = 'characters'
  if corpus == 'enwik8':
    c.data.newlines = 'drop'
  if corpus in CUTOFFS:
    _use_words(c, corpus, size)

  c.optimizer.learning_rate = 2.5e-4
  c.optimizer.schedule = 'transformer_xl'
  c.optimizer.final_fraction = 0.0
  c.optimizer.adam = config.block('optimizer.adam', beta2=0.999)
  c.optimizer.epsilon = 1e-8
  c.optimizer.clip_norm = 0.25
  if corpus == 'nvidia':
    c.optimizer.algorithm = 'lamb'
    c.optimizer.learning_rate = 0.01
    c.optimizer.schedule = 'cosine'
    c.optimizer.final_fraction = 0.1 if size == 'base' else 0.01
  if size == 'small':
    c.optimizer.learning_rate = 2e-3
    c.optimizer.schedule = 'cosine'
    c.optimizer.final_fraction = 0.1
    e.max_tokens = 65_536
    t.evaluate_every = 240
    t.checkpoint_every = 240
  else:
    e.protocol = 'transformer_xl'
    t.log_every = 200
    t.evaluate_every = 4000
    t.checkpoint_every = 4000
  return c


def _use_words(c: ConfigDict, corpus: str, size: str) -> None:
  """Sets a vocabulary of words and an adaptive softmax."""
  c.data.vocabulary = 'words'
  adaptive = {'cutoffs': CUTOFFS[corpus]}
  if size == 'large' or corpus == 'lm1b':
    adaptive |= {'divisor': 4, 'tied_projections': (False, True, True, True)}
  if corpus == 'lm1b':
    c.data.corpus = 'text'
    adaptive['tied_projections'] = (False,)
  if corpus == 'wikitext2':
    adaptive['divisor'] = 2
  c.model.adaptive_softmax = config.block('model.adaptive_softmax', **adaptive)
