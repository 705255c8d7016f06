"""Adaptive span and all-attention (Sukhbaatar et al. 2019, arXiv 1905.07799 and 1907.01470).

  python -m ngrammer_jax.train --config=configs/adaptive_span.py:enwik8_small \\
    --config.data.path=/path/to/enwik8.gz --workdir=runs/enwik8_span

Variants of the scripts of the official code, with exactly its number of parameters, the published
test results (bits per character, or perplexity with <eos>), and the number of training tokens:

  enwik8_small        6,480,621  about 1.3 (dev)   2.5G
  enwik8             38,538,541  1.02             19.7G, 2 to 3 days on 8 V100
  enwik8_large      208,910,221  0.98              5.6G, under 2.4 days on 8 V100
  text8              38,357,116  1.11             29.5G
  text8_large       208,638,172  1.07              8.8G
  enwik8_pers_small  38,501,725  1.01             15.7G
  enwik8_pers       114,017,773  0.98              6.9G, about a day on 64 V100
  wiki103_pers      132,493,746  19.7 (20.6 without <eos> in the paper)  13.9G

text8_pers_small (38M parameters, 1.11) and text8_pers (114M, 1.08) are in the paper, without a
script. The small variants for 2 CPU cores have about equal numbers of parameters; their sizes and
learning rates are not from the papers: small_xl, small_span, small_pers, small_pers_span, and
small_all, which also has n-grams. ffattn, split, heads and single are the ablations of small_pers;
pers_none has no persistent vectors.

text8 of the official code has 28 characters, because it includes <eos>. Only the small variants
have been trained with this code.
"""

from ngrammer_jax import config

# Layers, width, heads, inner width or vectors, span, segment, dropout, penalty; steps, final steps
# at a tenth of the learning rate, warm-up steps.
OFFICIAL = {
  'enwik8_small': (8, 256, 4, 1024, 1024, 256, 0.0, 2e-6, 150_000, 0, 8000),
  'enwik8': (12, 512, 8, 2048, 8192, 512, 0.3, 5e-7, 600_000, 0, 32_000),
  'enwik8_large': (24, 768, 8, 4096, 8192, 512, 0.4, 5e-7, 170_000, 20_000, 32_000),
  'text8': (12, 512, 8, 2048, 8192, 512, 0.3, 5e-7, 900_000, 0, 32_000),
  'text8_large': (24, 768, 8, 4096, 8192, 512, 0.4, 5e-7, 270_000, 20_000, 32_000),
  'enwik8_pers_small': (18, 512, 8, 1024, 8192, 512, 0.3, 1e-7, 480_000, 30_000, 32_000),
  'enwik8_pers': (36, 512, 8, 2048, 8192, 512, 0.4, 1e-7, 210_000, 10_000, 32_000),
  'text8_pers_small': (18, 512, 8, 1024, 8192, 512, 0.3, 1e-7, 480_000, 30_000, 32_000),
  'text8_pers': (36, 512, 8, 2048, 8192, 512, 0.4, 1e-7, 210_000, 10_000, 32_000),
  'wiki103_pers': (36, 512, 8, 2048, 2048, 256, 0.3, 5e-7, 850_000, 50_000, 8000),
}
SMALL = ('small_xl', 'small_span', 'small_pers', 'small_pers_span', 'small_all')
ABLATIONS = {
  'split': 'attention_split',
  'heads': 'head_split',
  'single': 'single_head',
  'ffattn': None,
  'pers_none': None,
}
VARIANTS = (*OFFICIAL, *SMALL, *ABLATIONS)


def get_config(variant: str = 'enwik8_small'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  c = config.default()
  m = c.model
  m.activation = 'relu'
  m.gated = False
  m.feed_forward_bias = True
  m.norm = 'post_skip'
  m.norm_epsilon = 1e-5
  m.final_norm = False
  m.tie_embeddings = False
  m.scale_embeddings = False
  return _official(c, variant) if variant in OFFICIAL else _small(c, variant)


def _official(c, variant):
  m, t, o, corpus = c.model, c.training, c.optimizer, variant.split('_')[0]
  m.layers, m.width, m.heads, inner, span, t.segment_length, dropout, penalty = OFFICIAL[variant][
    :8
  ]
  t.steps, drop_steps, o.warmup_steps = OFFICIAL[variant][8:]
  m.attention_dropout = m.inner_dropout = dropout
  m.position = 'table'
  m.positional = config.block('model.positional', max_length=span)
  m.memory = config.block(
    'model.memory', length=span, first='zeros', same_length='memory_alone', across_documents=True
  )
  m.span = config.block('model.span', limit=span, penalty=penalty)
  if 'pers' in variant:
    m.feed_forward_width = 0
    m.persistent = config.block('model.persistent', vectors=inner)
  else:
    m.feed_forward_width = inner
  m.initial = config.block('model.initial', recipe='adaptive_span')
  t.batch_size = 64
  t.log_every = 200
  t.evaluate_every = t.checkpoint_every = 2000
  o.algorithm = 'adagrad'
  o.learning_rate = 0.07
  o.schedule = 'constant'
  o.epsilon = 1e-10
  o.clip_norm = 0.03
  if drop_steps:
    o.drop = config.block('optimizer.drop', steps=drop_steps)
  c.data.corpus = corpus
  c.data.vocabulary = 'characters'
  c.evaluation.protocol = 'adaptive_span'
  c.evaluation.streams = 8
  if corpus == 'wiki103':
    c.data.corpus, c.data.vocabulary = 'wikitext', 'words'
    m.tie_embeddings = m.scale_embeddings = True
    m.adaptive_softmax = config.block(
      'model.adaptive_softmax', cutoffs=(20_000, 40_000, 200_000), divisor=4, dropout=0.1
    )
    o.algorithm = 'adam'
    o.learning_rate, o.epsilon, o.clip_norm = 2.5e-4, 1e-8, 1.0
    o.adam = config.block('optimizer.adam', beta2=0.999)
  return c


def _small(c, variant):
  m, t = c.model, c.training
  m.layers, m.width, m.heads, m.feed_forward_width = 3, 192, 6, 768
  m.tie_embeddings = m.scale_embeddings = True
  m.position = 'relative'
  m.memory = config.block('model.memory', length=256, same_length='memory_and_self')
  if variant not in ('small_xl', 'small_span'):
    m.feed_forward_width = 0
    kind = ABLATIONS.get(variant) or 'all_attention'
    vectors = 0 if variant in ('ffattn', 'pers_none') else 768
    m.persistent = config.block('model.persistent', vectors=vectors, kind=kind)
  if variant == 'ffattn':
    m.feed_forward_width, m.activation, m.feed_forward_bias = 768, 'softmax', False
  if variant in ('small_span', 'small_pers_span', 'small_all'):
    m.span = config.block('model.span', limit=256, ramp=32, penalty=2e-5)
  if variant == 'small_all':
    m.persistent.vectors = 600  # fewer, so that parameters with the table are equal
    m.ngram = config.block('model.ngram', clusters=64, vocabulary_size=4096)
  t.batch_size, t.segment_length, t.steps = 16, 128, 240
  t.evaluate_every = t.checkpoint_every = 240
  # The optimizer of the official code. With Adam at 2e-3 or 5e-4, persistent vectors learn much
  # less in so few steps (3.06 and 3.18 bits per character, not 2.78), because their values are
  # scaled by the square root of their number.
  o = c.optimizer
  o.algorithm, o.learning_rate, o.clip_norm, o.epsilon = 'adagrad', 0.07, 0.03, 1e-10
  o.schedule, o.warmup_steps = 'constant', 50
  c.evaluation.max_tokens = 65_536
  c.evaluation.streams = 32
  c.data.corpus, c.data.vocabulary = 'text8', 'characters'
  return c
