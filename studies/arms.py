"""The arms of studies/program.md: memories beside value embeddings, at equal parameters.

  python -m ngrammer_jax.train --config=studies/arms.py:value_embeddings \
    --config.data.path=/path/to/enwik8.gz --workdir=runs/value_embeddings

All have a Transformer of 3 blocks of width 128 on enwik8 in 8,192 SentencePiece pieces, Muon for
its matrices and Adagrad for all tables. With 2.70M parameters, room for one table of 8,192 x 128:

  untied             an output layer of its own; no table
  deeper             8 blocks; no table
  value_embeddings   a row of each token in the values of the first and the last block
  value_embeddings_adam  the same with Adam for the table: a control
  second_embedding   a row of each token, added to the input of the second block
  bigram_hash        a row of each bigram, added to the input of every block
  engram             bigrams and trigrams, gated, in the second block
  engram_123         unigrams, bigrams and trigrams
  ngrammer           bigrams of clusters of the token embeddings
  product_keys       values looked up by hidden states, in place of the second feed-forward
  ARM_copies         untied, value_embeddings or an Engram with a memory of copies

With 3.75M parameters, room for two tables:

  two_value_embeddings           the first and the last block have a table of their own
  value_embeddings_engram        value embeddings and Engram
  value_embeddings_ngram_values  value embeddings, and rows of bigrams and trigrams in the values
  engram_twice                   Engram with twice the rows

`backbone` has neither a table nor an output layer of its own: 1.65M parameters.

Stages S and M have the larger backbones of SIZES and room for three tables of a row of each token,
13.1M and 33.9M parameters within 0.1 %. Arms are named `s_ARM` and `m_ARM`:

  untied             an output layer of its own, and a wider feed-forward: more FLOPs
  value_embeddings   three blocks have a table of their own
  engram             bigrams and trigrams in the second and the middle block, a table for each
  engram_123         unigrams, bigrams and trigrams there
  value_embeddings_engram  three blocks with the rows of one table, and Engram
  bigram_hash        a row of each bigram, added to the input of every block
"""

import itertools
from typing import Any, NamedTuple

from configs import ngram_memories as base
from ngrammer_jax import config

TABLE_ROWS = 8192  # those of a table with a row of each token
WIDTH = 128
DEEPER_BLOCKS, DEEPER_FEED_FORWARD = 8, 364
SUB_KEYS = 92
ENGRAM_ROWS = {'engram': 16_097, 'engram_123': 10_646, 'engram_twice': 32_481}
ENGRAM_BESIDE_VALUES = 16_097
NGRAM_VALUE_ROWS = 65_340

_VALUES = dict(preset='value_embeddings')
_ENGRAM = base.SMALL_MEMORIES['engram']
MEMORIES: dict[str, tuple[dict[str, Any], ...]] = {
  'backbone': (),
  'untied': (),
  'deeper': (),
  'value_embeddings': (_VALUES,),
  'second_embedding': (
    dict(
      hash='id',
      orders=(1,),
      heads=1,
      row_rule='vocabulary',
      width=WIDTH,
      join='sum',
      layers=(1,),
      deviation=0.0,
    ),
  ),
  'bigram_hash': (dict(preset='bigram_hash', width=WIDTH, rows=(TABLE_ROWS,), boundary='starts'),),
  'engram': (_ENGRAM,),
  'engram_123': (_ENGRAM | dict(orders=(1, 2, 3)),),
  'ngrammer': (),
  'product_keys': (),
  'two_value_embeddings': (_VALUES | dict(table=None),),
  'value_embeddings_engram': (_VALUES, _ENGRAM),
  'value_embeddings_ngram_values': (
    _VALUES,
    dict(preset='ngram_values', layers=(0, 2), width=8, boundary='starts'),
  ),
  'engram_twice': (_ENGRAM,),
}
COPIES = '_copies'
_WITH_COPIES = [f'{arm}{COPIES}' for arm in ('untied', 'value_embeddings', 'engram', 'engram_123')]
# Adam for the table, with a rate of its own.
ADAM = 'value_embeddings_adam'
ONE_TABLE = (
  'untied',
  'deeper',
  'value_embeddings',
  ADAM,
  'second_embedding',
  'bigram_hash',
  'engram',
  'engram_123',
  'ngrammer',
  'product_keys',
  *_WITH_COPIES,
)
TWO_TABLES = (
  'two_value_embeddings',
  'value_embeddings_engram',
  'value_embeddings_ngram_values',
  'engram_twice',
)
BACKBONE = 'backbone'


class Size(NamedTuple):
  """A backbone of stage S or M, and the numbers that give its arms equal parameters.

  Attributes:
    layers: blocks.
    width: width of the model.
    heads: attention heads.
    feed_forward: width of the gated feed-forward.
    value_stride: value embeddings are in every N-th block, counted from the last one.
    row_width: width of the rows of Engram: an eighth of the width of the model.
    untied_feed_forward: width of the feed-forward of `untied`.
    engram_rows: base rows of a head of each arm with Engram.
  """

  layers: int
  width: int
  heads: int
  feed_forward: int
  value_stride: int
  row_width: int
  untied_feed_forward: int
  engram_rows: dict[str, int]


SIZES = {
  's': Size(
    layers=6,
    width=256,
    heads=4,
    feed_forward=688,
    value_stride=2,
    row_width=32,
    untied_feed_forward=1598,
    engram_rows={'engram': 24_010, 'engram_123': 15_799, 'value_embeddings_engram': 15_812},
  ),
  'm': Size(
    layers=8,
    width=448,
    heads=7,
    feed_forward=1192,
    value_stride=3,
    row_width=56,
    untied_feed_forward=1875,
    engram_rows={'engram': 23_625, 'engram_123': 15_415, 'value_embeddings_engram': 15_428},
  ),
}
BIGRAM_ROWS = 3 * TABLE_ROWS  # of stages S and M
LARGER_ARMS = (
  'untied',
  'value_embeddings',
  'engram',
  'value_embeddings_engram',
  'engram_123',
  'bigram_hash',
)
LARGER = tuple(f'{stage}_{arm}' for stage, arm in itertools.product(SIZES, LARGER_ARMS))
VARIANTS = (BACKBONE, *ONE_TABLE, *TWO_TABLES, *LARGER)


def get_config(variant: str = 'value_embeddings'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  if variant in LARGER:
    stage, _, arm = variant.partition('_')
    return _larger_config(SIZES[stage], arm)
  arm = variant.removesuffix(COPIES).removesuffix('_adam')
  c = base.get_config('quickstart_plain')
  c.data.corpus = 'enwik8'
  c.data.vocabulary_size = TABLE_ROWS
  c.data.matched_vocabulary_size = TABLE_ROWS

  m = c.model
  m.width, m.heads, m.feed_forward_width = WIDTH, 4, 344
  m.tie_embeddings = arm != 'untied'
  if arm == 'deeper':
    m.layers, m.feed_forward_width = DEEPER_BLOCKS, DEEPER_FEED_FORWARD
  if arm == 'ngrammer':
    m.ngram = config.block('model.ngram', clusters=128, vocabulary_size=32_768, dim=8)
  if arm == 'product_keys':
    m.product_memory = config.block(
      'model.product_memory',
      preset='memory_layers',
      layers=(1,),
      sub_keys=SUB_KEYS,
      key_width=64,
      top=16,
      optimizer='adagrad',
      learning_rate_factor=None,
    )
  m.ngram_memories = tuple(_memory(arm, values) for values in MEMORIES[arm])
  if variant == ADAM:
    (memory,) = m.ngram_memories
    memory.optimizer, memory.learning_rate_factor = 'adam', 5.0
  if variant.endswith(COPIES):
    m.copy_memory = config.block('model.copy_memory')

  o = c.optimizer
  o.algorithm = 'muon'
  o.muon = config.block('optimizer.muon', learning_rate=0.02)
  o.learning_rate = 8e-3  # of embeddings, head and norms
  o.table = config.block('optimizer.table', learning_rate=0.3)
  o.schedule, o.decay_shape = 'wsd', '1-sqrt'
  c.training.batch_size = 16
  c.training.segment_length = 256
  c.training.steps = 2000
  o.warmup_steps, o.decay_steps = 50, 400
  c.training.log_every = 50
  c.training.evaluate_every = c.training.checkpoint_every = 500
  c.training.keep_checkpoints = 1
  return c


def has_table(variant: str) -> bool:
  """Returns whether a variant has a table of rows or values."""
  arm = variant.removesuffix(COPIES)
  if variant in LARGER:
    _, _, arm = variant.partition('_')
  return arm not in (BACKBONE, 'untied', 'deeper')


def _larger_config(size: Size, arm: str):
  """Returns the config of an arm of stage S or M."""
  c = get_config(BACKBONE)
  m = c.model
  m.layers = size.layers
  m.width = size.width
  m.heads = size.heads
  m.feed_forward_width = size.feed_forward
  if arm == 'untied':
    m.tie_embeddings = False
    m.feed_forward_width = size.untied_feed_forward
  memories = []
  if arm == 'value_embeddings':
    memories.append(_VALUES | dict(table=None, block_stride=size.value_stride))
  if arm == 'value_embeddings_engram':
    memories.append(_VALUES | dict(block_stride=size.value_stride))
  if arm == 'bigram_hash':
    rows = (BIGRAM_ROWS,)
    memories.append(dict(preset=arm, width=size.width, rows=rows, boundary='starts'))
  if arm in size.engram_rows:
    engram = _ENGRAM | dict(layers=(1, size.layers // 2), width=size.row_width)
    engram['rows'] = (size.engram_rows[arm],)
    if arm == 'engram_123':
      engram['orders'] = (1, 2, 3)
    memories.append(engram)
  adagrad = dict(optimizer='adagrad', learning_rate_factor=None)
  m.ngram_memories = tuple(
    config.block('model.ngram_memories', **(values | adagrad)) for values in memories
  )
  return c


def _memory(arm: str, values: dict[str, Any]):
  """Returns a memory whose table Adagrad trains, with the rows of its arm."""
  changes = dict(optimizer='adagrad', learning_rate_factor=None)
  preset = values.get('preset')
  if preset == 'engram':
    changes['rows'] = (ENGRAM_ROWS.get(arm, ENGRAM_BESIDE_VALUES),)
  elif preset == 'ngram_values':
    changes['rows'] = (NGRAM_VALUE_ROWS,)
  return config.block('model.ngram_memories', **(values | changes))
