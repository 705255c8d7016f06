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

llama_8b is Llama 3 8B (arXiv 2407.21783) and has its vocabulary size; embeddings are not scaled.
llama_8b_ngrammer adds the best layer of ngrammer_c4.py, with 402,663,424 parameters (in all
8,432,924,672) and 33,554,432 values of centroids. Corpus, steps and learning rate of both are ours.
Neither has been trained with this code; docs/compile.md has their memory on TPU slices.
"""

from ngrammer_jax import config

# Layers, width, heads, key heads, width of the feed-forward.
SIZES = {
  'quickstart': (3, 192, 6, 2, 512),
  'text8': (3, 192, 6, 2, 512),
  'enwik8': (12, 512, 8, 2, 1408),
  'c4': (16, 1024, 16, 4, 2816),
  '8b': (32, 4096, 32, 8, 14_336),
}
VARIANTS = (
  *(f'{style}_{size}' for style in ('llama', 'qwen3') for size in SIZES if size != '8b'),
  *('llama_8b', 'llama_8b_ngrammer'),
)


def get_config(variant: str = 'llama_quickstart'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  style, size, *ngrammer = variant.split('_')
  c = config.default()
  m, t = c.model, c.training

  m.layers, m.width, m.heads, m.key_value_heads, m.feed_forward_width = SIZES[size]
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

  if size == 'quickstart':
    c.data.corpus = 'sotu'
    c.data.vocabulary = 'sentencepiece'
    c.data.vocabulary_size = 4096
    t.steps, t.batch_size, t.segment_length = 300, 16, 128
    t.evaluate_every, t.checkpoint_every = 150, 100
    c.optimizer.learning_rate, c.optimizer.warmup_steps = 4e-3, 50
  elif size == 'c4':
    m.remat = 'minimal'
    m.vocabulary_chunk = 8192
    c.data.corpus = 'c4/en'
    c.data.vocabulary = 'sentencepiece'
    c.data.vocabulary_size = 32_000
    c.data.shuffle = 0
    t.steps, t.batch_size, t.segment_length = 1_000_000, 256, 1024
    t.log_every, t.evaluate_every, t.checkpoint_every = 100, 10_000, 2_000
    c.optimizer.learning_rate, c.optimizer.warmup_steps = 1e-3, 4_000
    c.optimizer.schedule = 'rsqrt'
    c.evaluation.streams, c.evaluation.max_tokens = 256, 2**22
  elif size == '8b':
    m.scale_embeddings = False
    m.positional = config.block('model.positional', max_timescale=5e5)
    m.remat = 'full'
    m.vocabulary_chunk = 8192
    c.mesh.data, c.mesh.fsdp = 1, -1
    c.data.corpus = 'c4/en'
    c.data.vocabulary = 'sentencepiece'
    c.data.vocabulary_size = 128_256
    c.data.shuffle = 0
    t.steps, t.batch_size, t.segment_length = 500_000, 64, 4096
    t.log_every, t.evaluate_every, t.checkpoint_every = 100, 10_000, 1_000
    c.optimizer.learning_rate, c.optimizer.warmup_steps = 3e-4, 8_000
    c.optimizer.schedule = 'rsqrt'
    c.evaluation.streams, c.evaluation.max_tokens = 64, 2**22
  elif size == 'text8':
    c.data.corpus = 'text8'
    c.data.vocabulary = 'characters'
    t.steps, t.batch_size, t.segment_length = 240, 16, 256
    t.log_every, t.evaluate_every, t.checkpoint_every = 10, 40, 120
    c.optimizer.learning_rate, c.optimizer.warmup_steps = 4e-3, 50
    c.evaluation.streams, c.evaluation.max_tokens = 32, 65_536
  else:
    c.data.corpus = 'enwik8'
    c.data.vocabulary = 'bytes'
    t.steps, t.batch_size, t.segment_length = 400_000, 24, 512
    t.log_every, t.evaluate_every, t.checkpoint_every = 100, 10_000, 2_000
    c.optimizer.learning_rate, c.optimizer.warmup_steps = 1e-3, 2_000
    c.evaluation.streams = 24
  if size == '8b':
    m.scan_layers = True  # compiles sooner
  if ngrammer:
    m.ngram = config.block('model.ngram', clusters=8192, vocabulary_size=1536 * 256, dim=32)
  return c
