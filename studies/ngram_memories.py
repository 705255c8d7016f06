"""Memories of n-grams on enwik8, in 8,192 SentencePiece pieces, at equal total parameters.

  python -m ngrammer_jax.train --config=studies/ngram_memories.py:engram \
    --config.data.path=/path/to/enwik8.gz --workdir=runs/engram

The methods are those of configs/ngram_memories.py, in a Transformer of 3 blocks of width 128: 8
million tokens, the budget of a run, are too few for a larger one. All but `plain` have the
parameters of `ngrammer` within 0.1 %. METHOD_CONTROL changes one thing of a memory:

  few_rows       tables of one row, or of 24 for the N-Grammer: the memory without its contents
  frozen         random tables that are not trained
  unigrams       n-grams of one token, with the same number of rows
  displaced      the predecessors of the token 100 tokens earlier
  half_gate      a gate of one half
  plain_join     no convolution after the gate
  unigrams_plain_join  both
  kv_plus_one    tables of k V + 1 rows for V tokens instead of primes
  adam           tables trained by Adam, every row in every step, instead of Adagrad, with the
                 learning rate of the other weights
  quarter, four_times  tables with other numbers of rows; parameters are not equal
  segment_memory  also a segment memory of 256 tokens with relative positions, and fewer rows;
                  `wide` can have it too, with a narrower feed-forward
"""

from configs import ngram_memories as base
from ngrammer_jax import config, errors

METHODS = base.METHODS
# Base rows of a head and width of the feed-forward that match the N-Grammer's parameters.
ROWS = {'ngrammer': 32_768, 'over_encoding': 16_256, 'engram': 16_097, 'latent_engram': 32_467}
WIDE = 1254
NGRAMMER_MIN_ROWS = 24  # its hash needs a prime for each head between this number and its double
SCALES = {'quarter': 0.25, 'four_times': 4}
CONTROLS = {
  'few_rows': dict(rows=(1,), row_rule='exact'),
  'frozen': dict(optimizer='frozen'),
  'unigrams': dict(orders=(1,)),
  'displaced': dict(displacement=100),
  'half_gate': dict(gate='half'),
  'plain_join': dict(convolution=0),
  'unigrams_plain_join': dict(orders=(1,), convolution=0),
  'kv_plus_one': dict(row_rule='multiple_plus_one'),
  'adam': dict(optimizer='adam', learning_rate_factor=1.0),
}
COMBINED = 'segment_memory'
RELATIVE_POSITIONS = 3 * 128**2 + 2 * 128  # their parameters: a matrix a block and two biases
PARAMETERS_PER_UNIT = 3 * 3 * 128  # gate, value and output of a feed-forward unit in 3 blocks


def get_config(variant: str = 'engram'):
  """Returns the config of METHOD or METHOD_CONTROL."""
  method = max((name for name in METHODS if variant.startswith(name)), key=len, default=None)
  control = variant[len(method or '') :].removeprefix('_')
  controls = (*SCALES, *CONTROLS, COMBINED)
  allowed = {'plain': (), 'wide': (COMBINED,)}.get(method, controls)
  if method is None or control not in ('', *allowed):
    raise errors.BadInput(
      f'no variant {variant!r}: expected one of {", ".join(METHODS)}, wide_{COMBINED}, or '
      f'METHOD_CONTROL, METHOD one of {", ".join(ROWS)}, CONTROL one of {", ".join(controls)}'
    )
  c = base.get_config(f'quickstart_{method}')
  c.data.corpus = 'enwik8'
  c.data.vocabulary_size = 8192
  c.model.width, c.model.heads, c.model.feed_forward_width = 128, 4, 344
  if control == COMBINED:
    c.model.position, c.model.memory = 'relative', config.block('model.memory', length=256)
  if method == 'wide':
    c.model.feed_forward_width = WIDE
    if control == COMBINED:
      c.model.feed_forward_width -= round(RELATIVE_POSITIONS / PARAMETERS_PER_UNIT)
  elif method != 'plain':
    if method == 'ngrammer':
      _use_ngrammer(c)
    _change_memory(c, method, control)

  c.optimizer.warmup_steps = 100
  c.training.steps = 2000
  c.training.batch_size = 16
  c.training.segment_length = 256
  c.training.log_every = 50
  c.training.evaluate_every = 500
  c.training.checkpoint_every = 500
  c.training.keep_checkpoints = 1
  return c


def has_table_learning_rate(variant: str) -> bool:
  """Returns whether the tables of a variant are trained with `optimizer.table.learning_rate`."""
  return not variant.endswith(('_frozen', '_adam'))


def _use_ngrammer(c):
  """Writes the N-Grammer as a memory of n-grams, which has the same controls as all others."""
  c.model.ngram = None
  sizes = dict(orders=(2,), heads=4, width=8, clusters=128, row_rule='exact')
  rules = dict(key='embedding_clusters', hash='praxis', join='concat', initial='data')
  deviation = (2 / (ROWS['ngrammer'] + sizes['width'])) ** 0.5  # Xavier
  memory = config.block('model.ngram_memories', **sizes, **rules, deviation=deviation)
  c.model.ngram_memories = (memory,)


def _change_memory(c, method, control):
  """Sets the rows of the memory, and what a control changes."""
  (memory,) = c.model.ngram_memories
  if method == 'latent_engram':
    memory.heads = c.model.heads
  memory.rows = (int(ROWS[method] * SCALES.get(control, 1)),)
  if control.startswith('unigrams'):  # with all rows
    memory.heads *= len(memory.orders)
  if control == COMBINED:
    row_parameters = len(memory.orders) * memory.heads * memory.width
    memory.rows = (ROWS[method] - RELATIVE_POSITIONS // row_parameters,)
  for key, value in CONTROLS.get(control, {}).items():
    memory[key] = value
  if method == 'ngrammer' and control == 'few_rows':
    memory.rows = (NGRAMMER_MIN_ROWS,)
