"""Memories of n-grams on enwik8, in 8,192 SentencePiece pieces, at equal total parameters.

  python -m ngrammer_jax.train --config=studies/ngram_memories.py:engram \
    --config.data.path=/path/to/enwik8.gz --workdir=runs/engram

The methods come from configs/ngram_memories.py, in a Transformer of 3 blocks of width 128: 8
million tokens, the budget of a run, are too few for a larger one. `untied` is the Transformer with
an output layer of its own, `llama` the same in the style of Llama, with 2 key heads (see
configs/transformer.py). All but `plain` have the parameters of `ngrammer` within 0.1 %. Five more
configs have them too: `copies` and `token_shift`, with a wider feed-forward, and the memories in
the values of attention, `value_embeddings`, `nanochat_values` and `ngram_values`. None of these
five has been trained, and their learning rates are not tuned.
METHOD_CONTROL changes a memory:

  few_rows       tables of one row, or of 24 for the N-Grammer: the memory without its contents
  frozen         random tables without training
  frozen_unit    the same with a standard deviation of 1, as in the demo of Engram
  unigrams       n-grams of one token, with as many rows in all
  with_unigrams  n-grams of one, two and three tokens, with as many parameters in all
  displaced      the predecessors of the token 100 tokens earlier
  half_gate      a gate of one half
  plain_join     no convolution after the gate
  unigrams_plain_join  unigrams and plain_join
  token_ids      n-grams of token ids instead of the ids of normalised texts
  kv_plus_one    tables of k V + 1 rows for V tokens instead of primes; two heads of an order then
                 have the same hash
  adam           tables trained by Adam, every row in every step, instead of Adagrad, with the
                 learning rate of the other weights
  adam_times_5   the same with five times this learning rate, as published
  wider_rows     half as many rows, twice as wide: no more rows than bigrams of the clusters
  quarter, four_times  tables with other numbers of rows; parameters are not equal
  segment_memory  also a segment memory of 256 tokens with relative positions, and fewer rows;
                  `wide` can have it too, with a narrower feed-forward
  learned_spans  segment_memory, and every head learns its span, of at most the 256 tokens before a
                 token, without itself
  span_64        a segment memory of 64 tokens: every token sees the 64 before it, not itself
  llama          Engram in the Transformer of `llama`, with a tied output layer
"""

from typing import Any

from configs import ngram_memories as base
from ngrammer_jax import config

TRANSFORMERS = ('plain', 'wide', 'untied')
LLAMA = 'llama'
# Base rows of a head and width of the feed-forward that match the N-Grammer's parameters.
ROWS = {'ngrammer': 32_768, 'over_encoding': 16_256, 'engram': 16_097, 'latent_engram': 32_467}
WIDE = 1254
# Memories without results yet. The first two have few parameters: the width of the feed-forward
# matches. A row for each token has as many values as the tables of the N-Grammer.
WIDENED = {'copies': 1251, 'token_shift': 1252}
TOKEN_ROWS = ('value_embeddings', 'nanochat_values')
ROWS_IN_VALUES = {'ngram_values': 65_042}
UNTRAINED = (*WIDENED, *TOKEN_ROWS, *ROWS_IN_VALUES)
METHODS = (*TRANSFORMERS, *ROWS)
ENGRAM_LLAMA = f'engram_{LLAMA}'
PRESENT_DAY = (LLAMA, ENGRAM_LLAMA)
# Tuned on seed 0, see docs/results.md.
LEARNING_RATE = 8e-3
TABLE_LEARNING_RATES = {'ngrammer': 0.03, 'over_encoding': 0.3, 'engram': 1.0, 'latent_engram': 0.3}
NGRAMMER_MIN_ROWS = 24  # its hash needs a prime for each head between this number and its double
SCALES = {'quarter': 0.25, 'four_times': 4}
CONTROLS = {
  'few_rows': dict(rows=(1,), row_rule='exact'),
  'frozen': dict(optimizer='frozen'),
  'unigrams': dict(orders=(1,)),
  'displaced': dict(displacement=100),
  'kv_plus_one': dict(row_rule='multiple_plus_one'),
  'adam': dict(optimizer='adam', learning_rate_factor=1.0),
  'adam_times_5': dict(optimizer='adam', learning_rate_factor=5.0),
}
GATED = ('engram', 'latent_engram')
CONTROLS_OF_GATED = {
  'frozen_unit': dict(optimizer='frozen', deviation=1.0),
  'half_gate': dict(gate='half'),
  'plain_join': dict(convolution=0),
  'unigrams_plain_join': dict(orders=(1,), convolution=0),
}
CONTROLS_OF_ENGRAM = {'token_ids': dict(key='tokens'), 'with_unigrams': dict(orders=(1, 2, 3))}
WIDER_ROWS = 'wider_rows'
LATENT = ('ngrammer', 'latent_engram')
MEMORY_LENGTHS = {'segment_memory': 256, 'learned_spans': 256, 'span_64': 64}
RELATIVE_POSITIONS = 3 * 128**2 + 2 * 128  # their parameters: a matrix a block and two biases
PARAMETERS_PER_UNIT = 3 * 3 * 128  # gate, value and output of a feed-forward unit in 3 blocks


def controls(method: str) -> dict[str, dict[str, Any]]:
  """Returns the controls of a memory, and the values of the memory that each one changes."""
  return {
    **CONTROLS,
    **(CONTROLS_OF_GATED if method in GATED else {}),
    **(CONTROLS_OF_ENGRAM if method == 'engram' else {}),
    **({WIDER_ROWS: {}} if method in LATENT else {}),
  }


VARIANTS = {
  **{method: (method, '') for method in (*METHODS, LLAMA, *UNTRAINED)},
  ENGRAM_LLAMA: ('engram', LLAMA),
  **{f'wide_{control}': ('wide', control) for control in MEMORY_LENGTHS},
  **{
    f'{method}_{control}': (method, control)
    for method in ROWS
    for control in (*controls(method), *SCALES, *MEMORY_LENGTHS)
  },
}


def get_config(variant: str = 'engram'):
  """Returns the config of METHOD or METHOD_CONTROL."""
  config.check_variant(variant, VARIANTS)
  method, control = VARIANTS[variant]
  is_untied = method in ('untied', LLAMA)
  c = base.get_config('quickstart_plain' if is_untied else f'quickstart_{method}')
  c.data.corpus = 'enwik8'
  c.data.vocabulary_size = c.data.matched_vocabulary_size = 8192
  c.model.width, c.model.heads, c.model.feed_forward_width = 128, 4, 344
  c.model.tie_embeddings = not is_untied
  if LLAMA in (method, control):
    c.model.key_value_heads, c.model.feed_forward_width = 2, 394
    c.model.activation, c.model.softmax_bias = 'silu', False
    c.model.norm_kind, c.model.norm_epsilon = 'rms', 1e-5
  if control in MEMORY_LENGTHS:
    c.model.position = 'relative'
    c.model.memory = config.block('model.memory', length=MEMORY_LENGTHS[control])
  if control in ('learned_spans', 'span_64'):
    c.model.memory.same_length = 'memory_alone'
  if control == 'learned_spans':
    c.model.span = config.block('model.span', limit=MEMORY_LENGTHS[control], ramp=32, penalty=2e-5)
  if method == 'wide':
    c.model.feed_forward_width = WIDE
    if control in MEMORY_LENGTHS:
      c.model.feed_forward_width -= round(RELATIVE_POSITIONS / PARAMETERS_PER_UNIT)
  elif method in WIDENED:
    c.model.feed_forward_width = WIDENED[method]
  elif method in ROWS_IN_VALUES:
    (memory,) = c.model.ngram_memories
    memory.rows = (ROWS_IN_VALUES[method],)
  elif method in ROWS:
    if method == 'ngrammer':
      _use_ngrammer(c)
    _change_memory(c, method, control)
    c.optimizer.table.learning_rate = TABLE_LEARNING_RATES[method]

  c.optimizer.learning_rate = LEARNING_RATE
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
  """Returns whether a variant has tables that `optimizer.table.learning_rate` trains."""
  method, control = VARIANTS[variant]
  return method in ROWS and 'optimizer' not in controls(method).get(control, {})


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
  rows = int(ROWS[method] * SCALES.get(control, 1))
  if control in MEMORY_LENGTHS:
    rows -= RELATIVE_POSITIONS // (len(memory.orders) * memory.heads * memory.width)
  elif control == WIDER_ROWS:
    rows = rows // 2
    memory.width = 2 * memory.width
    if method == 'latent_engram':  # for the projections to keys and values, which are wider too
      rows -= c.model.width
  changes = controls(method).get(control, {})
  orders = changes.get('orders', memory.orders)
  if orders == (1,):
    memory.heads *= len(memory.orders)
  elif len(orders) > len(memory.orders):  # the projections to keys and values are wider too
    rows = (rows * len(memory.orders) - 2 * c.model.width) // len(orders)
  for key, value in ({'rows': (rows,)} | changes).items():
    memory[key] = value
  if control == 'few_rows' and method == 'ngrammer':
    memory.rows = (NGRAMMER_MIN_ROWS,)
