"""Drawn models compute what they computed when the goldens were made."""

import collections

import pytest

from tests.checks import rest_is_full
from tests.goldens import models

CASES = models.cases()
# Those that are quick hold most options, but for other numbers.
QUICK = [name for name, case in CASES.items() if case['quick']]
NAMES = [
  *rest_is_full(QUICK, ('transformer_25',)),
  *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK),
]


@pytest.mark.parametrize('name', NAMES)
def test_a_drawn_model_equals_its_golden(x64, tmp_path, name):
  """Hidden states, memory, codebook, loss and the gradient of every parameter."""
  wrong = models.differing(models.compute(CASES[name], tmp_path), models.golden(name))
  assert not wrong, f'{name} {models.options(CASES[name])} differs in {wrong}'


def test_every_drawn_option_occurs_three_times():
  counts = collections.Counter(o for case in CASES.values() for o in set(models.options(case)))
  assert len(CASES) >= 48
  assert not {option: count for option, count in counts.items() if count < 3}
