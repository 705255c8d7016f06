"""A model with longrope says that it reads a text in segments."""

import logging

import pytest

from ngrammer_jax import config
from ngrammer_jax.runs import split_texts

LONG_FACTORS = [2.0] * 32


def longrope(segment_length, long_factors=LONG_FACTORS, kind='longrope'):
  scaling = {'kind': kind, 'factor': 2.0}
  if kind == 'longrope':
    factors = {'short_factors': [1.0] * 32, 'long_factors': long_factors}
    scaling |= {'original_length': 48} | factors
  return config.resolve(
    {
      'model': {'positional': {'scaling': scaling}},
      'training': {'segment_length': 32},
      'evaluation': {'segment_length': segment_length},
    }
  )


SHORT = (
  'text 2: 1,000 tokens are read in segments of 40 with the short factors of longrope; the long '
  'ones are for evaluation.segment_length above 48'
)
LONG = (
  'text 2: 1,000 tokens are read in segments of 64 with the long factors of longrope; a higher '
  'evaluation.segment_length reads more at once'
)


@pytest.mark.parametrize(
  'run, tokens, messages',
  [
    (longrope(40), 1000, [SHORT]),
    (longrope(64), 1000, [LONG]),
    (longrope(40), 40, []),
    (longrope(1000), 1000, []),
    (longrope(40, [1.0] * 32), 1000, []),  # they do not depend on the length
    (longrope(40, kind='linear'), 1000, []),
  ],
)
def test_the_longest_text_is_logged(run, tokens, messages, caplog):
  caplog.set_level(logging.INFO)
  split_texts.log(run, {'text 1': 3, 'text 2': tokens, 'text 3': 4})
  assert caplog.messages == messages


def test_no_text_is_no_error(caplog):
  caplog.set_level(logging.INFO)
  split_texts.log(longrope(40), {})
  assert not caplog.messages
