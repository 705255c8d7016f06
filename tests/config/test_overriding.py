"""Overrides of an opened run are read as on the command line."""

import pathlib

import numpy as np
import pytest

from ngrammer_jax import command_line, config
from ngrammer_jax.config import overriding
from tests.checks import bad_input

LONGROPE = {
  'kind': 'longrope',
  'factor': 2.0,
  'original_length': 48,
  'short_factors': [1.0] * 32,
  'long_factors': [2.0] * 32,
}
MODEL = {'positional': {'scaling': LONGROPE}, 'memory': {'length': 4}}
DATA = {'corpus': 'text', 'path': '/text'}
RUN = config.resolve({'model': MODEL, 'data': DATA, 'training': {'segment_length': 16}})


@pytest.mark.parametrize(
  'key, value',
  [
    ('model.positional.scaling.is_long', True),
    ('model.dtype', 'float64'),
    ('model.scan_layers', 2),
    ('model.memory.length', 8),
    ('evaluation.segment_length', 24),
    ('evaluation.memory.length', 8),
    ('evaluation.memory', None),
    ('mesh.fsdp', 2),
    ('data.path', '/elsewhere'),
    ('data.path', pathlib.Path('/elsewhere')),
    ('data.text_field', ('title', 'body')),
    ('training.batch_size', 3),
  ],
)
def test_values_and_texts_mean_what_they_mean_on_the_command_line(key, value):
  expected = command_line.override(RUN, [(key, str(value))], '*')
  assert overriding.of_opened_run(RUN, {key: value}) == expected
  if key != 'data.text_field':
    assert overriding.of_opened_run(RUN, {key: str(value)}) == expected
  assert (expected == RUN) == (value is None)


@pytest.mark.parametrize(
  'overrides, message',
  [
    (
      {'evaluation.segment_lenght': 8},
      'unknown config key evaluation.segment_lenght: did you mean evaluation.segment_length?',
    ),
    (
      {'evaluation.segment_length': 1.5},
      'evaluation.segment_length=1.5 is not of type int or None',
    ),
    ({'evaluation.segment_length': 0}, 'evaluation.segment_length=0 must be at least 1, or None'),
    (
      {'evaluation': {'segment_length': 8}},
      'evaluation is a section: set a key in it, evaluation.KEY',
    ),
    (
      {'evaluation.memory': np.ones(2)},
      'evaluation.memory is a section: set a key in it, evaluation.memory.KEY',
    ),
    ({'model': None}, 'model=None: the section is required'),
    (
      {'seed': 1, 'model.width': 32},
      'overrides: the parameters depend on model.width=256, not 32: leave it out',
    ),
    (
      {'model.memory': None},
      'overrides: the parameters depend on model.memory=(length=4), not None: leave it out',
    ),
    (
      {'data.vocabulary': 'bytes'},
      'overrides: data.vocabulary cannot differ: a run keeps its vocabulary',
    ),
    (
      [('seed', 1)],
      'overrides must be a dict from names of keys to values, such as '
      "{'evaluation.segment_length': 256}",
    ),
    (
      {1: 2},
      'overrides must be a dict from names of keys to values, such as '
      "{'evaluation.segment_length': 256}",
    ),
  ],
)
def test_what_cannot_be_overridden(overrides, message):
  with bad_input(message):
    overriding.of_opened_run(RUN, overrides)


def test_no_overrides_are_the_config_itself():
  for overrides in (None, {}):
    assert overriding.of_opened_run(RUN, overrides) is RUN
