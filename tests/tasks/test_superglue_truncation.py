"""The log of truncated inputs."""

import logging

import numpy as np

from ngrammer_jax.tasks.superglue import truncation
from tests.loops import each

NONE = 'rte, train: none of 100 inputs is truncated, the longest has 50 of at most 50 tokens'
FEW = (
  'rte, train: 5 of 100 inputs (5.0%) are truncated to 50 tokens and lose 3 tokens (median), at '
  'most 1,050'
)
MANY = (
  'rte, train: 6 of 100 inputs (6.0%) are truncated to 50 tokens and lose 4 tokens (median), at '
  'most 1,050; at most 5% are truncated with training.segment_length=67'
)


@each(
  'long, level, message',
  [
    ([], 'INFO', NONE),
    ([1100, 51, 53, 52, 54], 'INFO', FEW),
    ([1100, 51, 53, 52, 55, 59], 'WARNING', MANY),
  ],
)
def test_a_warning_above_five_percent_names_the_length_that_suffices(caplog, long, level, message):
  caplog.set_level(logging.INFO)
  caplog.clear()
  lengths = np.array(long + [50] * (100 - len(long)))
  truncation.log_lengths('rte', 'train', lengths, max_inputs=50, max_targets=16)
  assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(level, message)]


def test_the_length_that_suffices_is_the_shortest():
  rng = np.random.default_rng(0)
  for n in (1, 7, 20, 21, 40, 100, 333, 1000):
    lengths = rng.integers(2, 90, n)
    required = truncation.required_row_length(lengths, 16)
    share = lambda row, lengths=lengths: (lengths > row - 16).mean()
    assert share(required) <= 0.05 < share(required - 1)
