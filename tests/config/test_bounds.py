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
SPAN = '--config.model.memory.length=64 --config.model.memory.same_length=memory_alone'
LSTM = '--config.model.ngram=None --config.model.recurrent.readout=attention'


def parse(arguments):
  return command_line.parse(argparse.ArgumentParser(), [QUICKSTART, *arguments.split()])[1]


@each(
  'arguments, message',
  [
    (f'{SPAN} --config.model.span.limit=1e12', 'model.span.limit=1000000000000 must be at most 2,'),
    (f'{LSTM} --config.model.recurrent.window=1e12', 'model.recurrent.window=1000000000000 must'),
    (f'{LSTM} --config.model.recurrent.hidden=3e12', 'model.recurrent.hidden=3000000000000 must'),
    ('--config.training.segment_length=1e12', 'training.segment_length=1000000000000 must be at'),
    ('--config.model.convolution=1e9', 'model.convolution=1000000000 must be from 1 to 256'),
    ('--config.model.ngram.orders=(1000,)', 'model.ngram.orders=1000 must be from 2 to 32'),
    ('--config.model.memory.length=1e10', 'model.memory.length=10000000000 must be at most 2,147,'),
    ('--config.model.ngram.vocabulary_size=1e9', 'model.ngram.vocabulary_size=1000000000 must be'),
    ('--config.data.vocabulary_size=1e10', 'data.vocabulary_size=10000000000 must be at most 2,1'),
    ('--config.training.steps=1e30', 'training.steps=1.000e+30 must be at most 2,147,483,647'),
    ('--config.optimizer.warmup_steps=1e99', 'optimizer.warmup_steps=1.000e+99 must be at most'),
    ('--config.training.steps=0x' + 'f' * 5000, 'training.steps=3.980e+6020 must be at most 2,147'),
    ('--config.training.steps=' + '9' * 5000, "training.steps='9999"),
    ('--config.optimizer.learning_rate=' + '9' * 400, 'optimizer.learning_rate=inf must be finite'),
    ('--config.optimizer.learning_rate=-' + '9' * 400, 'optimizer.learning_rate=-inf must be'),
    ('--config.optimizer.learning_rate=nan', "optimizer.learning_rate='nan' is not of type float"),
    ('--config.model.layers=1e6', 'model.layers=1000000 must be from 1 to 1000'),
    ('--config.model.heads=1e9', 'model.width=192 must be divisible by 2 x model.heads=1000'),
    (
      '--config.model.width=2147483647',
      'model.width=2147483647 must be divisible by 2 x model.heads=6 for ',
    ),
    ('--config.model.ngram.orders=' + '(' * 3000, "model.ngram.orders='((((("),
    ('--config.model.ngram_memories.0.heads=1e6', 'model.ngram_memories.0.heads=1000000 must be f'),
    (
      '--config.model.adaptive_softmax.embedding_width=0',
      'model.adaptive_softmax.embedding_width=0 must be at least 1, or None',
    ),
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
