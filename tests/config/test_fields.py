"""Fields of a config: every one has a comment, bounds are checked, and none of it needs JAX."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from ngrammer_jax import config, errors
from ngrammer_jax.config import activations, fields
from ngrammer_jax.layers import activations as layers
from tests.checks import bad_input
from tests.loops import each

QUICKSTART = f'--config={pathlib.Path(__file__).parents[2]}/configs/quickstart.py'
WITHOUT_JAX = """
import sys
sys.modules.update(jax=None, jaxlib=None, flax=None)
from ngrammer_jax import analyze, config, errors, evaluate, finetune, generate, train
config.resolve(config.default())
try:
  train.main(sys.argv[1:])
except errors.BadInput as error:
  print(error)
"""


@each(
  'arguments, output',
  [
    (['--help'], 'usage: python -m ngrammer_jax.train'),
    ([QUICKSTART, '--workdir=x', '--config.seed=-1'], 'seed=-1 must be from'),
    ([QUICKSTART, '--print_config'], 'model.layers='),
  ],
)
def test_help_and_errors_in_a_config_need_no_jax(arguments, output):
  command = [sys.executable, '-c', WITHOUT_JAX, *arguments]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(output)


def test_every_key_has_a_comment_of_one_line():
  for key in fields.walk(config.Config):
    assert key.comment and '\n' not in key.comment, key.path
    assert not key.comment.endswith('.') and len(key.comment) < 100, key.path


def test_every_default_is_allowed_and_of_its_type():
  for key in fields.walk(config.Config):
    if not dataclasses.is_dataclass(key.default):
      value = key.convert(key.default)
      key.check_value(value)
      assert (type(value), value) == (type(key.default), key.default), key.path


def test_keys_that_may_differ_on_resume():
  free = [key.path for key in fields.walk(config.Config) if key.free_on_resume]
  assert free == [
    *('model.vocabulary_chunk', 'model.scan_layers', 'model.remat', 'model.kernel'),
    *('model.ngram.exchange', 'model.ngram_memories.0.deviation'),
    'model.ngram_memories.0.exchange',
    'model.ngram_memories.0.table_memory',
    *('model.memory.sinks', 'model.span.reserve', 'model.span.check_every'),
    *('data.path', 'data.vocabulary_path', 'data.matched_vocabulary_size', 'data.cache_dir'),
    *('data.superglue_dir', 'data.mixture.0.path'),
    *('training.loss', 'training.segments_per_call', 'training.log_every'),
    *('training.evaluate_every', 'training.checkpoint_every', 'training.keep_checkpoints'),
    *('training.log_to', 'training.compiler_options'),
    *('evaluation', 'mesh', 'finetune.tfds_dir', 'finetune.download'),
  ]
  other = config.resolve({'evaluation': {'streams': 3}, 'mesh': {'data': 2}, 'seed': 1})
  differences = [key.path for key, *_ in config.differences(config.Config(), other)]
  assert differences == ['seed']  # all keys of a section that may differ may


def test_choices_are_those_that_a_layer_knows():
  assert set(activations.NAMES) == set(layers.ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class Inner:
  """A block inside of another."""

  rows: int = fields.field(2, 'of one kind of the block around it', only_for={'kind': ('b', 'c')})


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of every kind of rule."""

  count: int = fields.field(1, 'a bound', at_least=1)
  rate: float = fields.field(0.5, 'two bounds', at_least=0, below=1)
  share: float = fields.field(0.5, 'a range', at_least=0, at_most=1)
  width: float | None = fields.field(None, 'an optional one', above=0, reason='it is a width')
  size: int = fields.field(-1, 'one more value', at_least=1, also=(-1,))
  kind: str = fields.field('a', 'choices', choices=('a', 'b'))
  kinds: tuple[str, ...] = fields.field(('a',), 'choices of each', choices=('a', 'b'))
  slots: int = fields.field(4, 'of one kind', only_for={'kind': ('b',)})
  mode: str = fields.field(
    'x',
    'values that need others',
    needs={'y': {'width': (fields.ANY,), 'inner.rows': (2, None)}, 'x': {'size': (-1, 2)}},
    reason='they are wide',
  )
  names: tuple[str, ...] = fields.field(('n',), 'at least one', may_be_empty=False)
  inner: Inner | None = fields.field(None, 'a block inside')
  outer: Inner | None = fields.field(
    None,
    'a block with a remedy',
    only_for={'kind': ('b',)},
    remedy="use x.count={value.rows} and x.kind='b'",
  )


@each(
  'within, outside',
  [
    ({}, {'kind': 'c'}),
    ({'count': 1}, {'count': 0}),
    ({'rate': 0.0}, {'rate': -1e-9}),
    ({'share': 1.0}, {'share': 1.0 + 1e-9}),
    ({'width': 1e-9}, {'width': 0.0}),
    ({'size': 2}, {'size': 0}),
    ({'kinds': ()}, {'kinds': ('',)}),
    ({'slots': 3, 'kind': 'b'}, {'slots': 3, 'kind': 'a'}),
    ({'inner': Inner()}, {'inner': Inner(3)}),
    ({'inner': Inner(3), 'kind': 'b'}, {'inner': Inner(3), 'kind': 'a'}),
    ({'mode': 'y', 'width': 1.0}, {'mode': 'y', 'width': None}),
  ],
)
def test_values_within_the_rules_pass_and_the_next_ones_do_not(within, outside):
  fields.check_values(Block(**within))
  with pytest.raises(errors.BadInput):
    fields.check_values(Block(**outside))


@each(
  'values, message',
  [
    ({'count': 0}, 'x.count=0 must be at least 1'),
    ({'rate': 1.0}, 'x.rate=1.0 must be at least 0 and below 1'),
    ({'rate': -0.1}, 'x.rate=-0.1 must be at least 0 and below 1'),
    ({'share': 1.1}, 'x.share=1.1 must be from 0 to 1'),
    ({'share': float('nan')}, 'x.share=nan must be finite'),
    ({'width': 0.0}, 'x.width=0.0 must be above 0, or None: it is a width'),
    ({'width': float('inf')}, 'x.width=inf must be finite'),
    ({'size': 0}, 'x.size=0 must be at least 1, or -1'),
    ({'kind': 'c'}, "x.kind='c' is not one of: a, b"),
    ({'kinds': ('c',)}, "x.kinds=('c',): 'c' is not one of: a, b"),
    ({'kinds': ('a', 'c')}, "x.kinds=('a', 'c'): 'c' is not one of: a, b"),
    ({'slots': 3}, "x.slots=3 is not for x.kind='a', but for b: use 4"),
    ({'inner': Inner(3)}, "x.inner.rows=3 is not for x.kind='a', but for b, c: use 2"),
    (
      {'mode': 'y'},
      "x.mode='y' needs x.width, which is None: set x.width, or use 'x'; they are wide",
    ),
    (
      {'mode': 'y', 'width': 1.0, 'inner': Inner(3), 'kind': 'b'},
      "x.mode='y' is not for x.inner.rows=3, but for 2, None: use 'x'; they are wide",
    ),
    ({'size': 3}, "x.mode='x' is not for x.size=3, but for -1, 2: use x.size=-1; they are wide"),
    (
      {'outer': Inner()},
      "x.outer=(defaults) is not for x.kind='a', but for b: use x.count=2 and x.kind='b'",
    ),
    ({'names': ()}, "x.names=() must not be empty: use ('n',)"),
    ({'names': ('n', '')}, "x.names=('n', '') must not be empty: use ('n',)"),
  ],
)
def test_values_outside_of_the_rules_are_named(values, message):
  with bad_input(message):
    fields.check_values(Block(**values), 'x.')


def test_a_block_in_a_message_has_what_differs_from_its_defaults():
  assert fields.format_value(Block(count=3, inner=Inner())) == '(count=3, inner=(defaults))'


def test_an_unknown_rule_is_an_error():
  with pytest.raises(TypeError):
    fields.field(1, 'a bound', at_lest=1)
