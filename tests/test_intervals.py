"""Intervals of means over seeds, and data equivalents."""

import math

import numpy as np
import pytest
from scipy import stats

from studies import intervals


def test_an_interval_is_that_of_students_t():
  values = [1.0, 1.2, 1.7]
  mean, half_width = intervals.mean_interval(values)
  low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
  np.testing.assert_allclose([mean - half_width, mean + half_width], [low, high], rtol=1e-12)
  assert str(intervals.mean_interval([1.5])) == '1.5000'


def test_differences_are_paired_by_seed():
  losses, baseline = {1: 1.0, 2: 2.0, 3: 9.0}, {1: 1.5, 2: 2.5, 4: 0.0}
  assert intervals.paired_difference(losses, baseline) == (-0.5, 0.0)
  assert intervals.paired_difference({5: 1.0}, baseline) is None


def test_a_data_equivalent_is_read_from_the_curve_of_the_baseline():
  baseline = {100: [2.1, 1.9], 200: [1.8], 400: [1.7]}
  equivalent = lambda loss, tokens=100: intervals.data_equivalent(loss, tokens, baseline)
  assert equivalent(2.0) == pytest.approx(1)
  assert equivalent(1.9) == pytest.approx(math.sqrt(2))
  assert equivalent(1.8, 200) == pytest.approx(1)
  assert equivalent(1.75) == pytest.approx(2 * math.sqrt(2))
  assert equivalent(1.6) == math.inf
  assert equivalent(2.2) == 0
