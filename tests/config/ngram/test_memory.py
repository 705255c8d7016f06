"""N-gram memories: places, presets with the published rows, and impossible memories."""

import dataclasses

from ngrammer_jax import config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import HASHES, TABLE_MEMORIES, NGramMemoryConfig
from ngrammer_jax.config.ngram.presets import PRESETS
from ngrammer_jax.config.place import Place
from tests.checks import bad_input
from tests.loops import each

PATH = 'model.ngram_memories.0'
GATE = {'layers': (1,)}
SUM = {'join': 'sum', 'width': 256}
CLUSTERS = GATE | {'key': 'clusters'}


def check(values, **fields):
  memory = NGramMemoryConfig(**values)
  model_config.ModelConfig(ngram_memories=(memory,), **fields).check()
  return memory


def test_places():
  assert NGramMemoryConfig(**SUM).places(4) == (Place('input'),)
  places = NGramMemoryConfig(layers=(0, 2)).places(4)
  assert places == (Place('before_attention', 0), Place('before_attention', 2))


@each(
  'preset, rows, first, last',
  [
    ('engram', (10_344_164, 10_348_242), 646_403, None),
    ('engram_v41', (384_006_168, 384_016_682), 16_000_057, None),
    ('ple', (320_001_536,), 20_000_003, 20_000_171),
    ('over_encoding', (102_400_024,), 12_800_000, 12_800_006),
    ('longcat', (122_683_536,), 10_223_617, 10_223_639),
    ('blt', (3_000_000,), 500_000, 500_000),
  ],
)
def test_presets_have_the_published_rows(preset, rows, first, last):
  memory = NGramMemoryConfig.from_preset(preset)
  assert memory.preset == preset
  assert memory.table_rows(1) == rows
  sizes = memory.hashes(1)[0].sizes
  assert sizes[0][0] == first
  assert last is None or sizes[-1][-1] == last


def test_rows_of_a_table_are_the_sum_of_those_of_its_heads():
  ple = NGramMemoryConfig.from_preset('ple')
  assert dataclasses.replace(ple, row_multiple=1).table_rows(1) == (320_001_446,)
  memory = NGramMemoryConfig(layers=(1, 3), heads=2, rows=(5, 11), row_multiple=8)
  first, second = memory.hashes(1)
  assert (first.sizes, second.sizes) == (((5, 7), (11, 13)), ((17, 19), (23, 29)))  # none is shared
  assert ((first.layer, first.index), (second.layer, second.index)) == ((1, 0), (3, 1))
  assert memory.table_rows(1) == (40, 88)


@each(
  'key, num_ids', [('tokens', 100), ('compressed', 100), ('bytes', 260), ('embedding_clusters', 16)]
)
def test_number_of_ids(key, num_ids):
  assert NGramMemoryConfig(key=key, clusters=16).num_ids(100) == num_ids


@each(
  'memory, fields',
  [
    *((SUM | {'key': key}, {}) for key in ('tokens', 'compressed', 'bytes', 'clusters')),
    *((GATE | {'hash': name, 'row_rule': 'exact'}, {}) for name in HASHES),
    *((CLUSTERS | {'hash': name, 'row_rule': 'exact'}, {}) for name in HASHES),
    *((GATE | {'table_memory': where}, {}) for where in TABLE_MEMORIES),
    (GATE | {'orders': (1,)}, {}),  # the controls
    (GATE | {'orders': (3, 2)}, {}),
    (GATE | {'rows': (1,), 'row_rule': 'exact'}, {}),
    (GATE | {'gate': 'half', 'displacement': 100, 'optimizer': 'frozen'}, {}),
    (GATE | {'row_rule': 'multiple_plus_one'}, {}),
    ({'join': 'concat', 'heads': 4, 'width': 8, 'orders': (1, 2, 5)}, {}),
    ({'join': 'add', 'heads': 4, 'width': 64, 'key': 'embedding_clusters', 'initial': 'data'}, {}),
    (SUM | {'boundary': 'eos_id', 'eos_id': 3, 'fill_id': None}, {}),
    (SUM | {'key': 'clusters'}, {'adaptive_softmax': config.AdaptiveSoftmaxConfig((8,))}),
    (SUM, {'ngram': config.NGramConfig()}),
    (GATE | {'layers': (3, 0)}, {'memory': config.MemoryConfig()}),
  ],
)
def test_possible_memories_pass(memory, fields):
  tables = check(memory, **fields).table_rows(300)
  assert len(tables) == len(memory.get('layers', (0,))) and min(tables) > 0


def test_memories_stand_beside_each_other_and_in_recurrent_models():
  config.resolve({'model': {'ngram': {}, 'ngram_memories': [SUM, GATE, CLUSTERS]}})
  recurrent = {'recurrent': {'hidden': 256}, 'feed_forward_width': 688}
  config.resolve({'model': recurrent | {'ngram_memories': [SUM]}})
  with bad_input(
    f'{PATH}.layers=(1,) is not for model.recurrent=(hidden=256), but for None: use ()'
  ):
    config.resolve({'model': recurrent | {'ngram_memories': [GATE]}})


@each(
  'memory, message',
  [
    (
      {'layers': (1, 4)},
      '.layers=(1, 4): 4 must be less than model.layers=4: use 3, or a larger model.layers',
    ),
    (
      {'layers': (1, 1)},
      '.layers=(1, 1) has a block twice: use it once',
    ),
    ({'layers': (-1,)}, '.layers=-1 must be at least 0'),
    (
      {},
      f".join='gate' is not for {PATH}.layers=(), but for a value; a gate is in blocks, such as "
      'layers=(1,); a sum or a mean is at the input, layers=()',
    ),
    (
      SUM | GATE,
      f".join='sum' is not for {PATH}.layers=(1,), but for (): use 'gate'; a gate is in blocks, "
      'such as layers=(1,); a sum or a mean is at the input, layers=()',
    ),
    (
      {'join': 'mean'},
      f".width=64 must equal model.width=256 for {PATH}.join='mean' and {PATH}.projection=False: "
      'use 256, or another model.width; with projection=True rows may have any width',
    ),
    (
      {'join': 'concat', 'heads': 4, 'width': 33},
      ': 2 orders of n-gram dim 33 exceed the head width 64',
    ),
    (CLUSTERS | {'heads': 3}, '.heads=3 must divide model.width=256'),
    (
      CLUSTERS | {'initial': 'data'},
      f".initial='data' is not for {PATH}.key='clusters', but for embedding_clusters: use None",
    ),
    (
      GATE | {'boundary': 'eos_id'},
      f".boundary='eos_id' is not for {PATH}.eos_id=None, but for a value: use 'starts'",
    ),
    (
      GATE | {'fill_id': None},
      f".fill_id=None is not for {PATH}.boundary='starts', but for eos_id: use 0",
    ),
    (GATE | {'orders': (2, 2)}, ': orders (2, 2) must be distinct numbers of at least 1'),
    (GATE | {'orders': (0, 1)}, '.orders=(0, 1): 0 must be from 1 to 32'),
    (GATE | {'orders': (2, 20_000)}, '.orders=(2, 20000): 20000 must be from 1 to 32'),
    (GATE | {'rows': (0,)}, '.rows=0 must be at least 1'),
    (GATE | {'convolution': 1000}, '.convolution=1000 must be from 0 to 128'),
    (GATE | {'displacement': 2**17}, '.displacement=131072 must be from 0 to 65536'),
    (
      GATE | {'rows': (2**27 - 8,), 'row_rule': 'exact', 'row_multiple': 2**20},
      '.row_multiple=1048576: a table of 2,147,483,648 rows, but it must have less than 2^31: use '
      'a smaller multiple',
    ),
    (
      GATE | {'rows': (16, 8), 'row_rule': 'exact', 'untrained_row': 8},
      '.untrained_row=8 is not below the 8 rows of the smallest head: use None, or more rows',
    ),
    (
      GATE | {'hash': 'blt', 'heads': 12},
      ': hash "blt" has constants for 11 heads of each order, not for 12: use fewer heads',
    ),
    (
      CLUSTERS | {'table_memory': 'host'},
      f".table_memory='host' is not for {PATH}.key='clusters', but for tokens, compressed, bytes: "
      "use 'device'; rows are looked up before the step, and only those are updated",
    ),
    (
      GATE | {'table_memory': 'host', 'optimizer': 'lazy_adam'},
      f".table_memory='host' is not for {PATH}.optimizer='lazy_adam', but for adagrad, frozen: use "
      "'device'; rows are looked up before the step, and only those are updated",
    ),
    (GATE | {'learning_rate_factor': 0.0}, '.learning_rate_factor=0.0 must be above 0, or None'),
    (
      GATE | {'clusters': 8},
      f".clusters=8 is not for {PATH}.key='tokens', but for clusters, embedding_clusters: use 256",
    ),
    (
      GATE | {'amplification': 'norm'},
      f".amplification='norm' is not for {PATH}.join='gate', but for sum, mean: use 'none'",
    ),
    (SUM | {'bias': True}, f".bias=True is not for {PATH}.join='sum', but for gate: use False"),
    (
      SUM | {'hash': 'polynomial', 'seed': 1},
      f".seed=1 is not for {PATH}.hash='polynomial', but for engram, ple: use 0",
    ),
    (
      GATE | {'eos_id': 3},
      f".eos_id=3 is not for {PATH}.boundary='starts', but for eos_id: use None",
    ),
    (
      GATE | {'fill_id': 2, 'distinct_start': True},
      f'.fill_id=2 is not for {PATH}.distinct_start=True, but for False: use 0',
    ),
    (
      GATE | {'deviation': 0.1, 'table_initial': 'xavier'},
      f".deviation=0.1 is not for {PATH}.table_initial='xavier', but for normal: use 0.02",
    ),
    (
      SUM | {'join': 'concat', 'width': 1, 'point': 'after_block'},
      f".point='after_block' is not for {PATH}.layers=(), but for a value: use 'before_attention'",
    ),
    (
      {'join': 'add', 'layers': (0, 1), 'point': 'after_block', 'heads': 4, 'width': 64},
      f'.layers=(0, 1): a memory with {PATH}.point="after_block" is in one block; use one '
      'memory for each block',
    ),
    (
      {'join': 'add', 'layers': (1,), 'point': 'after_attention', 'pairing': 'attended', 'heads': 4}
      | {'width': 64, 'orders': (2,)},
      f".pairing='attended' is not for {PATH}.key='tokens', but for clusters: use 'previous'",
    ),
    (
      GATE | {'table_initial': 'xavier', 'rows': (9, 11)},
      f'.table_initial="xavier" needs the same number of rows for all orders, not {PATH}.rows=(9, '
      '11): use one number, or "normal"',
    ),
  ],
)
def test_impossible_memories_say_what_to_change(memory, message):
  with bad_input(f'{PATH}{message}'):
    check(memory)


def test_the_embedding_of_an_adaptive_softmax_has_no_clusters():
  with bad_input(
    f"{PATH}.key='embedding_clusters' is not for model.adaptive_softmax=(cutoffs=(8,)), but for "
    "None: use 'tokens'"
  ):
    adaptive = config.AdaptiveSoftmaxConfig((8,))
    check(SUM | {'key': 'embedding_clusters'}, adaptive_softmax=adaptive)


def test_bytes_need_a_vocabulary_of_bytes():
  model = {'ngram_memories': [GATE, SUM | {'key': 'bytes'}]}
  config.resolve({'model': model, 'data': {'corpus': 'text', 'vocabulary': 'bytes'}})
  with bad_input(
    "model.ngram_memories.1.key='bytes' is not for data.vocabulary='sentencepiece', but for bytes: "
    "use 'tokens'"
  ):
    config.resolve({'model': model})


@each(
  'memory, message',
  [
    (
      {'fill_id': 100},
      f".fill_id=100 is not below the number of ids 100 of {PATH}.key='tokens': use an id of the "
      'vocabulary of this run',
    ),
    (
      {'boundary': 'eos_id', 'eos_id': 257},
      f".eos_id=257 is not below the number of ids 100 of {PATH}.key='tokens': use an id of the "
      'vocabulary of this run',
    ),
    (
      {'key': 'clusters', 'clusters': 16, 'fill_id': 16},
      f".fill_id=16 is not below the number of ids 16 of {PATH}.key='clusters': use an id of the "
      'vocabulary of this run',
    ),
  ],
)
def test_ids_outside_of_the_vocabulary(memory, message):
  model = model_config.ModelConfig(ngram_memories=(NGramMemoryConfig(**GATE | memory),))
  model.check()
  with bad_input(f'{PATH}{message}'):
    model.check_vocabulary(100)


def test_presets_are_valid_memories():
  assert set(PRESETS) == {'engram', 'engram_v41', 'ple', 'over_encoding', 'longcat', 'blt'}
  for name in PRESETS:
    memory = NGramMemoryConfig.from_preset(name)
    memory = dataclasses.replace(memory, eos_id=2 if memory.boundary == 'eos_id' else None)
    model = model_config.ModelConfig(layers=16, width=1024, ngram_memories=(memory,))
    model.check()
    if name != 'longcat':  # it warns
      model.check_vocabulary(131_072)
