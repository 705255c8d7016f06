"""Segment memory, positions, spans and persistent vectors on the characters of text8.

  python -m ngrammer_jax.train --config=studies/context.py:memory \
    --config.data.path=/path/to/text8.zip --workdir=runs/memory

A Transformer of 3 blocks of width 128, on segments of 128 characters:

  none             no memory, relative positions
  memory           a memory of the 128 characters before the segment, relative positions
  memory_rope, memory_no_positions  the same memory with other positions
  span_64, span_256, span_1024      a fixed attention span
  adaptive         learned spans of at most 1,024 (Sukhbaatar et al. 2019)
  all_attention    persistent vectors instead of the feed-forward, with equal parameters; span 256
"""

from ngrammer_jax import config

SEGMENT = 128
MEMORIES = {'memory': 'relative', 'memory_rope': 'rope', 'memory_no_positions': 'none'}
SPANS = {'span_64': 64, 'span_256': 256, 'span_1024': 1024, 'adaptive': 1024, 'all_attention': 256}
VARIANTS = ('none', *MEMORIES, *SPANS)
VECTORS = 517  # with these, all_attention has the parameters of span_256
# Tuned on seed 0, see docs/results.md; those with spans have the rate of `memory`.
LEARNING_RATES = dict.fromkeys(VARIANTS, 4e-3) | {'none': 2e-3, 'memory_no_positions': 2e-3}


def get_config(variant: str = 'memory'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  c = config.default()
  c.data.corpus = 'text8'
  c.data.vocabulary = 'characters'

  m = c.model
  m.layers, m.width, m.heads, m.feed_forward_width = 3, 128, 4, 344
  m.position = MEMORIES.get(variant, 'relative')
  if variant in MEMORIES:
    m.memory = config.block('model.memory', length=SEGMENT)
  elif variant in SPANS:
    m.memory = config.block('model.memory', length=SPANS[variant], same_length='memory_alone')
  if variant == 'adaptive':
    m.span = config.block('model.span', limit=1024, ramp=32, penalty=2e-5)
  if variant == 'all_attention':
    m.feed_forward_width = 0
    m.persistent = config.block('model.persistent', vectors=VECTORS)

  c.optimizer.learning_rate = LEARNING_RATES[variant]
  c.optimizer.warmup_steps = 100
  c.training.steps = 4000
  c.training.batch_size = 16
  c.training.segment_length = SEGMENT
  c.training.log_every = 50
  c.training.evaluate_every = 1000
  c.training.checkpoint_every = 1000
  c.training.keep_checkpoints = 1
  c.evaluation.max_tokens = 2**16
  return c
