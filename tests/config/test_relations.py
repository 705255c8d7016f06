"""Rules for a key and another one: each comparison, its conditions, its message."""

import dataclasses

import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import fields, formatting
from ngrammer_jax.config.relations import (
  at_least,
  at_most,
  divides,
  divisible_by,
  equals,
  less_than,
)
from tests.checks import bad_input
from tests.loops import each


@dataclasses.dataclass(frozen=True)
class Inner:
  """A block inside of another."""

  size: int = fields.field(1, 'at most that of the block around it', relations=(at_most('limit'),))
  length: int | None = fields.field(None, 'by a whole path', relations=(less_than('x.limit'),))


@dataclasses.dataclass(frozen=True)
class Block:
  """A block with every comparison."""

  width: int = fields.field(
    8,
    'a multiple',
    at_least=1,
    relations=(
      divisible_by(2, where={'kind': ('even',)}),
      divisible_by('heads', times=2, where={'kind': ('even',)}, reason='halves of heads'),
      divisible_by('heads'),
    ),
  )
  heads: int = fields.field(4, 'a number of heads', at_least=1)
  groups: int | None = fields.field(None, 'a divisor', relations=(divides('heads'),))
  copies: int | None = fields.field(
    None,
    'the same number, where the block is of one kind and has tags',
    relations=(equals('heads', where={'kind': ('equal',), 'tags': ('a',)}),),
  )
  limit: float = fields.field(9.0, 'a limit', relations=(at_least('width', minus=2),))
  entries: tuple[int, ...] = fields.field(
    (), 'several', relations=(less_than('heads', unless=(9,)),)
  )
  kind: str = fields.field('', 'what some rules depend on')
  share: int | None = fields.field(
    None, 'with a remedy', relations=(at_most('width', remedy='use None', reason='it is a part'),)
  )
  tags: tuple[str, ...] = fields.field((), 'what some rules depend on')
  ratio: float = fields.field(0.5, 'without a nearest value', relations=(less_than('limit'),))
  inner: Inner | None = fields.field(None, 'a block inside')


EQUAL = {'kind': 'equal', 'tags': ('b', 'a')}


@each(
  'fitting, other',
  [
    ({}, {'heads': 3}),
    ({'kind': 'even'}, {'kind': 'even', 'width': 4}),
    ({'groups': 2}, {'groups': 3}),
    ({'groups': 4}, {'groups': 8}),
    ({'copies': 3, 'kind': 'equal'}, {'copies': 3} | EQUAL),
    ({'copies': 3, 'tags': ('a',)}, {'copies': 3, 'kind': 'equal', 'tags': ('a',)}),
    ({'copies': 4} | EQUAL, {'copies': 5} | EQUAL),
    ({'limit': 6.0}, {'limit': 5.9}),
    ({'entries': (0, 3, 9)}, {'entries': (0, 3, 8)}),
    ({'inner': Inner(9, 8)}, {'inner': Inner(9, 9)}),
  ],
)
def test_values_that_fit_each_other_pass_and_the_next_ones_do_not(fitting, other):
  fields.check_values(Block(**fitting), 'x.')
  with pytest.raises(errors.BadInput):
    fields.check_values(Block(**other), 'x.')


@each(
  'values, message',
  [
    ({'width': 9}, 'x.width=9 must be divisible by x.heads=4: use 8, or another x.heads'),
    ({'width': 1}, 'x.width=1 must be divisible by x.heads=4: use 4, or another x.heads'),
    (
      {'width': 9, 'kind': 'even'},
      "x.width=9 must be divisible by 2 for x.kind='even': use 8",
    ),
    (
      {'width': 4, 'kind': 'even'},
      "x.width=4 must be divisible by 2 x x.heads=4 for x.kind='even': use 8, or another x.heads; "
      'halves of heads',
    ),
    ({'heads': 0}, 'x.heads=0 must be at least 1'),  # before what depends on it
    ({'groups': 3}, 'x.groups=3 must divide x.heads=4: use 2, or another x.heads'),
    ({'groups': 8}, 'x.groups=8 must divide x.heads=4: use 4, or another x.heads'),
    (
      {'copies': 3, 'kind': 'equal', 'tags': ('b', 'a')},
      "x.copies=3 must equal x.heads=4 for x.kind='equal' and x.tags=('b', 'a'): use 4, or another "
      'x.heads',
    ),
    (
      {'limit': 5.5},
      'x.limit=5.5 must be at least 6, which is x.width=8 minus 2: use 6, or a smaller x.width',
    ),
    (
      {'entries': (3, 4)},
      'x.entries=(3, 4): 4 must be less than x.heads=4: use 3, or a larger x.heads',
    ),
    (
      {'ratio': 9.0},
      'x.ratio=9.0 must be less than x.limit=9.0: use another value, or a larger x.limit',
    ),
    (
      {'heads': 1, 'entries': (3, 1)},
      'x.entries=(3, 1): 3 must be less than x.heads=1: use 0, or a larger x.heads',
    ),
    ({'share': 9}, 'x.share=9 must be at most x.width=8: use None; it is a part'),
    (
      {'inner': Inner(10)},
      'x.inner.size=10 must be at most x.limit=9.0: use 9.0, or a larger x.limit',
    ),
    (
      {'inner': Inner(1, 9)},
      'x.inner.length=9 must be less than x.limit=9.0: use 8.0, or a larger x.limit',
    ),
  ],
)
def test_values_that_do_not_fit_each_other_are_named(values, message):
  with bad_input(message):
    fields.check_values(Block(**values), 'x.')


def test_a_block_without_the_others_is_not_compared_with_them():
  inner = Inner(10, 10)
  fields.check_values(inner)
  with pytest.raises(errors.BadInput):
    fields.check_values(Block(inner=inner), 'x.')


def test_blocks_of_a_tuple_in_a_message():
  assert formatting.format_value((Inner(), Inner(2))) == '((defaults), (size=2))'
