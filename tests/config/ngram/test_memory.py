"""N-gram memories: places, presets with the published rows, and impossible memories."""

import dataclasses

import pytest

from ngrammer_jax import config, errors
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
    *(
      (GATE | {'hash': name, 'row_rule': 'exact', 'heads': 1}, {})
      for name in HASHES
      if name != 'id'
    ),
    *(
      (CLUSTERS | {'hash': name, 'row_rule': 'exact', 'heads': 1}, {})
      for name in HASHES
      if name != 'id'
    ),
    (GATE | {'hash': 'id', 'orders': (1,)}, {}),
    (GATE | {'join': 'product', 'point': 'after_block', 'layers': (0, 2)}, {}),
    (GATE | {'join': 'add', 'point': 'after_block', 'layers': (0, 2), 'heads': 4}, {}),
    (GATE | {'join': 'sum', 'point': 'feed_forward', 'width': None}, {}),
    (
      GATE
      | {'join': 'multiply', 'point': 'after_feed_forward', 'projection': False, 'width': None},
      {},
    ),
    (
      GATE
      | {
        'join': 'replace',
        'point': 'feed_forward',
        'row_rule': 'vocabulary',
        'untrained_row': 3,
        'width': None,
      },
      {},
    ),
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
  model = config.resolve({'model': {'ngram': {}, 'ngram_memories': [SUM, GATE, CLUSTERS]}}).model
  places = [memory.places(model.layers) for memory in model.ngram_memories]
  assert places == [(Place('input'),), *2 * [(Place('before_attention', 1),)]]
  recurrent = {'recurrent': {'hidden': 256}, 'feed_forward_width': 688}
  config.resolve({'model': recurrent | {'ngram_memories': [SUM]}})
  with pytest.raises(errors.BadInput, match='model.ngram_memories.0.layers'):
    config.resolve({'model': recurrent | {'ngram_memories': [GATE]}})


def test_a_memory_of_bytes_passes_with_a_vocabulary_of_bytes():
  model = {'ngram_memories': [GATE, SUM | {'key': 'bytes'}]}
  config.resolve({'model': model, 'data': {'corpus': 'text', 'vocabulary': 'bytes'}})
  with pytest.raises(errors.BadInput, match="key='bytes' is not for data.vocabulary='words'"):
    config.resolve({'model': model, 'data': {'corpus': 'text', 'vocabulary': 'words'}})


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
  speedrun = {'bigram_hash', 'ngram_hash'}
  others = {'engram', 'engram_v41', 'ple', 'over_encoding', 'longcat', 'blt'}
  values = {'value_embeddings', 'nanochat_values', 'ngram_values'}
  assert set(PRESETS) == {*speedrun, *others, *values, 'gemma3n_ple', 'stem', 'deep_embed'}
  for name in PRESETS:
    memory = NGramMemoryConfig.from_preset(name)
    memory = dataclasses.replace(memory, eos_id=2 if memory.boundary == 'eos_id' else None)
    width = 768 if name in speedrun else 1024
    model = model_config.ModelConfig(layers=35, width=width, ngram_memories=(memory,))
    model.check()
    if name != 'longcat':  # it warns
      model.check_vocabulary(131_072)
