"""Absurd values are refused by the config, in one sentence, before anything is built."""

import argparse
import math
import pathlib
import re

import pytest

from ngrammer_jax import command_line, config, errors
from ngrammer_jax.config import fields
from tests.loops import each

QUICKSTART = f'--config={pathlib.Path(__file__).parents[2]}/configs/quickstart.py'


def parse(arguments):
  return command_line.parse(argparse.ArgumentParser(), [QUICKSTART, *arguments.split()])[1]


@each(
  'arguments, message',
  [
    ('--config.training.steps=0x' + 'f' * 5000, 'training.steps=3.980e+6020 must be at most 2,147'),
    ('--config.training.steps=' + '9' * 5000, "training.steps='9999"),
    ('--config.optimizer.learning_rate=' + '9' * 400, 'optimizer.learning_rate=inf must be finite'),
    ('--config.optimizer.learning_rate=-' + '9' * 400, 'optimizer.learning_rate=-inf must be'),
    ('--config.model.ngram.orders=' + '(' * 3000, "model.ngram.orders='((((("),
  ],
)
def test_absurd_values_are_refused(arguments, message):
  with pytest.raises(errors.BadInput, match=rf'\A{re.escape(message)}') as caught:
    parse(arguments)
  assert '\n' not in str(caught.value) and len(str(caught.value)) < 300


def test_every_number_has_bounds():
  """Of each key that is a number, or a tuple of numbers."""
  numbers = {int: (2**31, 10**30, -(2**40)), float: (math.inf, -math.inf, math.nan)}
  count = 0
  for key in fields.walk(config.Config):
    for value in (v for kind, values in numbers.items() if kind in key.types for v in values):
      if value == 2**31 and key.path == 'seed':
        continue  # it has 32 bits
      with pytest.raises(errors.BadInput, match=rf'\A{re.escape(key.path)}='):
        key.check_value(value)
      count += 1
  assert count > 200


def test_a_large_seed_and_the_largest_int_are_allowed():
  resolved = parse(f'--config.seed={2**32 - 1} --config.training.checkpoint_every={2**31 - 1}')
  assert resolved.seed == 2**32 - 1 and resolved.training.checkpoint_every == 2**31 - 1
