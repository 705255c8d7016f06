"""Keys that are tuples of blocks: config files, command line, presets, storage and resuming."""

import argparse
import dataclasses
import json

import pytest

from ngrammer_jax import command_line, config, config_files, errors
from ngrammer_jax.config import conversion, fields, overriding, product_memory
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.ngram.presets import PRESETS
from tests.checks import bad_input
from tests.loops import each

SMALL = {'join': 'sum', 'width': 256}
FILE = """
from ngrammer_jax import config

def get_config():
  c = config.default()
  memory = config.block('model.ngram_memories', preset='over_encoding', width=32)
  memory.rows = 1000
  c.model.ngram_memories = (memory, {'join': 'sum', 'width': 256})
  return c
"""
PLAIN = """
from ngrammer_jax import config

def get_config():
  return config.default()
"""
MEMORY = '--config.model.ngram_memories'
ENCODING = dataclasses.replace(NGramMemoryConfig.from_preset('over_encoding'), width=32, rows=(9,))
SUM = NGramMemoryConfig(**SMALL)


def parse(folder, *arguments, text=PLAIN):
  (folder / 'file.py').write_text(text)
  argv = [f'--config={folder}/file.py', *arguments]
  return command_line.parse(argparse.ArgumentParser(), argv)[1]


def memories(values):
  return config.resolve({'model': {'ngram_memories': values}}).model.ngram_memories


def test_a_config_file_builds_the_tuple(tmp_path):
  first = dataclasses.replace(ENCODING, rows=(1000,))
  assert parse(tmp_path, text=FILE).model.ngram_memories == (first, SUM)


@each(
  'values, expected',
  [
    ((), ()),
    (None, ()),
    ({}, ()),
    ({0: SMALL}, (SUM,)),
    ([SMALL], (SUM,)),
    (SMALL, (SUM,)),
    ({'1': SMALL | {'heads': 2}, '0': SMALL}, (SUM, dataclasses.replace(SUM, heads=2))),
    ([{'preset': 'over_encoding', 'width': 32, 'rows': 9}], (ENCODING,)),
    (['over_encoding'], (NGramMemoryConfig.from_preset('over_encoding'),)),
  ],
)
def test_values_of_a_tuple(values, expected):
  assert memories(values) == expected


# For each preset, a key in it that a small model changes.
CHANGES = {name: {'rows': 1000} for name in PRESETS if 'rows' in PRESETS[name]}
CHANGES |= {name: {'learning_rate_factor': 2} for name in PRESETS if name not in CHANGES}
CHANGES['engram'] = {'layers': 1, 'rows': [1000], 'deviation': 2}
CHANGES['ngram_values'] = {'layers': (0, 2), 'rows': 1000}


@each('preset', [*PRESETS, *product_memory.PRESETS])
def test_python_files_and_the_command_line_give_the_same_memory(tmp_path, preset):
  if preset in PRESETS:
    block, entry, constructor = 'model.ngram_memories', '.0', NGramMemoryConfig
    changes = CHANGES[preset]
  else:
    block, entry, constructor = 'model.product_memory', '', product_memory.ProductMemoryConfig
    changes = {'layers': 1, 'sub_keys': 60}
  in_python = constructor(preset=preset, **changes)
  assert in_python == constructor.from_preset(preset, **changes)
  assert constructor.from_preset(preset) == constructor(preset=preset)
  published = dataclasses.asdict(constructor.from_preset(preset))
  differ = {
    name for name, value in dataclasses.asdict(in_python).items() if value != published[name]
  }
  assert differ == set(changes)
  text = f"""
from ngrammer_jax import config

def get_config():
  c = config.default()
  block = config.block({block!r}, preset={preset!r}, **{changes!r})
  c.model.{block.removeprefix('model.')} = {'(block,)' if entry else 'block'}
  return c
"""
  argv = [f'--config.{block}{entry}.{name}={value}' for name, value in changes.items()]
  in_file = read_block(tmp_path, [], text, block)
  on_command_line = read_block(
    tmp_path, [f'--config.{block}{entry}.preset={preset}', *argv], PLAIN, block
  )
  assert in_python == in_file == on_command_line


def read_block(folder, argv, text, block):
  """Returns the memory of a config that is not checked: the model is too small for it."""
  (folder / 'file.py').write_text(text)
  values = config_files.load(f'{folder}/file.py')
  overriding.apply_all(values, command_line.split(argv)[0])
  model = conversion.build(config.Config, conversion.to_dict(values)).model
  memory = getattr(model, block.removeprefix('model.'))
  return memory[0] if isinstance(memory, tuple) else memory


def test_the_constructor_refuses_what_a_config_file_refuses():
  for values, message in (
    ({'rows': 'many'}, "rows='many' is not of type tuple[int, ...]"),
    ({'layers': 1.5}, 'layers=1.5 is not of type tuple[int, ...]'),
    ({'preset': 'engram', 'heads': None}, 'heads=None is not of type int'),
    ({'value_gate': {'channels': 2}}, "value_gate={'channels': 2} is not of type ValueGateConfig"),
  ):
    with pytest.raises(errors.BadInput) as caught:
      NGramMemoryConfig(**values)
    assert str(caught.value).startswith(message)
  with bad_input("model.product_memory has no preset 'x'; available: lample2019, memory_layers"):
    product_memory.ProductMemoryConfig(preset='x')
  with pytest.raises(TypeError, match="unexpected keyword argument 'row'"):
    NGramMemoryConfig(row=3)


def test_a_replaced_value_keeps_the_others():
  memory = NGramMemoryConfig(preset='engram', layers=1)
  assert dataclasses.replace(memory, preset=None).key == 'compressed'
  assert dataclasses.replace(memory, width=3).layers == (1,)
  assert dataclasses.replace(memory, width=3).rows == PRESETS['engram']['rows']


def test_a_preset_gives_every_value_that_is_not_named():
  block = config.block('model.ngram_memories', preset='longcat', heads=2)
  expected = dict(PRESETS['longcat'], preset='longcat', heads=2)
  assert {name: block[name] for name in expected} == expected
  assert block.seed == NGramMemoryConfig().seed


@each(
  'arguments, expected',
  [
    (['.0.join=sum', '.0.width=256'], (SUM,)),
    (['.0.preset=over_encoding', '.0.rows=9', '.0.width=32'], (ENCODING,)),
    (['.0.rows=9', '.0.width=32', '.0.preset=over_encoding'], (ENCODING,)),
    (['.0.rows=9', '.0.preset=longcat', '.0.width=32', '.0.preset=over_encoding'], (ENCODING,)),
    (['.0=over_encoding', '.0.rows=9', '.0.width=32'], (ENCODING,)),
    (['=over_encoding', '.0.rows=9', '.0.width=32'], (ENCODING,)),
    (['.0.preset=over_encoding', '=None'], ()),
    (['.0.preset=over_encoding', '=()', '.0.join=sum', '.0.width=256'], (SUM,)),
    (['.1.join=sum', '.1.width=256', '.0.rows=9,', '.0.preset=over_encoding'], None),
  ],
)
def test_blocks_are_made_on_the_command_line(tmp_path, arguments, expected):
  if expected is None:  # the blocks of a tuple may come in any order
    expected = (dataclasses.replace(ENCODING, width=256), SUM)
  assert parse(tmp_path, *(MEMORY + text for text in arguments)).model.ngram_memories == expected


def test_a_key_inside_a_block_of_a_preset_keeps_the_others(tmp_path):
  """On the command line, in a config file, and in values."""
  gate = NGramMemoryConfig.from_preset('nanochat_values').value_gate
  changed = dataclasses.replace(gate, channels=5)
  preset = 'nanochat_values'
  assert gate.factor == 3.0
  arguments = [f'{MEMORY}.0.value_gate.channels=5', f'{MEMORY}.0.preset={preset}']
  assert parse(tmp_path, *arguments).model.ngram_memories[0].value_gate == changed
  block = config.block('model.ngram_memories', preset=preset, value_gate={'channels': 5})
  assert block.value_gate.to_dict() == dataclasses.asdict(changed)
  values = {'preset': preset, 'value_gate': {'channels': 5}}
  assert memories(values)[0].value_gate == changed
  assert memories({'preset': preset, 'value_gate': None})[0].value_gate is None


@each(
  'arguments, change',
  [
    (['.0.rows=(7,8)'], lambda first, second: (dataclasses.replace(first, rows=(7, 8)), second)),
    (['.1.heads=3'], lambda first, second: (first, dataclasses.replace(second, heads=3))),
    (['.2.join=sum', '.2.width=256'], lambda first, second: (first, second, SUM)),
    (['=None'], lambda first, second: ()),
    (['=()'], lambda first, second: ()),
    # The preset replaces the whole block of the file.
    (
      ['.0.projection=True', '.1.preset=over_encoding', '.1.rows=9', '.1.width=32'],
      lambda first, second: (first, ENCODING),
    ),
    (['.0.preset=None', '.0.join=sum', '.0.width=256'], lambda first, second: (SUM, second)),
  ],
)
def test_blocks_of_a_file_are_changed(tmp_path, arguments, change):
  before = parse(tmp_path, text=FILE).model.ngram_memories
  changed = parse(tmp_path, *(MEMORY + text for text in arguments), text=FILE)
  assert changed.model.ngram_memories == change(*before)


def test_a_saved_tuple_is_loaded_the_same_and_may_be_missing(tmp_path):
  path = tmp_path / 'config.json'
  saved = config.resolve({'model': {'ngram_memories': (SMALL, dict(SMALL, rows=(7, 8)))}})
  config.save(saved, path)
  assert config.load(path) == saved
  values = json.loads(path.read_text())
  del values['model']['ngram_memories']  # as an earlier version stored it
  path.write_text(json.dumps(values))
  assert config.load(path) == config.Config()


def test_differences_are_named_by_their_path():
  def differences(*tuples):
    before, after = (config.resolve({'model': {'ngram_memories': blocks}}) for blocks in tuples)
    return [(key.path, old, new) for key, old, new in config.differences(before, after)]

  path, other = 'model.ngram_memories', SMALL | {'heads': 2}
  assert differences([SMALL, SMALL], [SMALL, SMALL]) == []
  assert differences([SMALL, SMALL], [SMALL, other]) == [(f'{path}.1.heads', 8, 2)]
  assert differences([SMALL], [SMALL, SMALL]) == [(f'{path}.1', None, SUM)]
  assert differences([SMALL], []) == [(f'{path}.0', SUM, None)]


def test_every_value_of_every_block_is_described():
  lines = conversion.describe(config.resolve({'model': {'ngram_memories': [SMALL, SMALL]}}))
  for index in '01':
    expected = [f'model.ngram_memories.{index}.{f.name}' for f in dataclasses.fields(SUM)]
    found = [line.split('=')[0] for line in lines.splitlines() if f'memories.{index}.' in line]
    assert found == expected
  assert 'model.ngram_memories.1.width=256      # values of a row' in lines
  assert 'model.ngram_memories=()' in conversion.describe(config.Config())


def test_keys_of_a_tuple():
  key = conversion.find_key('model.ngram_memories')
  assert key.is_tuple_of_blocks and key.block is NGramMemoryConfig
  entry = conversion.find_key('model.ngram_memories.12')
  assert (entry.path, entry.block) == ('model.ngram_memories.12', NGramMemoryConfig)
  assert not entry.is_tuple_of_blocks and not entry.is_optional
  assert conversion.find_key('model.ngram_memories.12.rows').path == 'model.ngram_memories.12.rows'
  assert not fields.keys(NGramMemoryConfig)['rows'].is_tuple_of_blocks
