"""The schedule of a mixture: weights hold in every row, and in all rows together."""

import math

import numpy as np

from ngrammer_jax.data.rows.mixture_schedule import MixtureSchedule, PartSchedule
from tests.loops import each

BLOCK = 3


@each('parts', [1, 2, 3, 4, 7, 16])
@each('batch_size', [1, 2, 5, 64, 1024])
def test_weights_hold_after_any_number_of_blocks(parts, batch_size):
  rng = np.random.default_rng(parts)
  for concentration in (0.3, 5.0):
    weights = rng.dirichlet(np.full(parts, concentration))
    schedule = MixtureSchedule(tuple(weights * 7), batch_size)
    for blocks in (0, 1, 2, 3, 10, 1001, 2**30):
      counts = schedule.segments_before(blocks)
      assert (counts.sum(axis=0) == blocks).all() and (counts >= 0).all()
      error = abs(counts - blocks * weights[:, None]).max()
      # Shares have 31 bits.
      assert error < max(math.ceil(math.log2(parts)), 1e-3) + blocks / 2**30
      if blocks < 2**30:
        total_error = abs(counts.sum(axis=1) - blocks * batch_size * weights).max()
        assert total_error < (1.001 if parts == 2 else 2 * parts)


@each('weights', [(1.0,), (3.0, 1.0), (0.0, 1.0, 0.0, 2.0, 0.5), (1.0, 0.0)])
@each('batch_size', [1, 4, 7])
def test_segments_before_a_step_are_those_of_all_earlier_steps(weights, batch_size):
  schedule = MixtureSchedule(weights, batch_size, BLOCK)
  parts = np.stack([schedule.parts(step) for step in range(60)])
  for step in (0, 1, 2, 3, 31, 60):
    expected = [(parts[:step] == part).sum(axis=0) for part in range(len(weights))]
    np.testing.assert_array_equal(schedule.segments_before(step), expected)
  for start in range(0, 60, BLOCK):
    assert (parts[start : start + BLOCK] == parts[start]).all()
  assert set(np.unique(parts)) == set(np.flatnonzero(weights))
  second = PartSchedule(schedule, len(weights) - 1)
  np.testing.assert_array_equal(second.is_reading(31), parts[31] == len(weights) - 1)
  np.testing.assert_array_equal(second.segments_before(31), schedule.segments_before(31)[-1])


def test_rows_take_turns():
  """No row reads one part alone, and the parts of a step are in proportion."""
  parts = np.stack([MixtureSchedule((3.0, 1.0), 8).parts(step) for step in range(8)])
  assert ((parts == 1).sum(axis=1) == 2).all() and ((parts == 1).sum(axis=0) == 2).all()
