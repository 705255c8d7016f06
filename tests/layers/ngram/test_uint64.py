import itertools

import jax
import numpy as np
import pytest

from ngrammer_jax.layers.ngram import uint64

EXTREMES = [0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
DIVISORS = np.array([1, 2, 3, 97, 2**16, 16_000_057, 2**28 - 57, 2**28, 2**29])
WIDE_DIVISORS = np.array([5, 2**29 - 3, 2**31 - 1])
ONE = np.array([1])


def some_pairs():
  """All pairs of extreme values, and random ones; Python integers."""
  rng = np.random.default_rng(0)
  drawn = rng.integers(0, 2**64, (100, 2), np.uint64) >> rng.integers(0, 64, (100, 2), np.uint64)
  pairs = [*itertools.product(EXTREMES, repeat=2), *drawn.tolist()]
  return [list(values) for values in zip(*pairs, strict=True)]


def to_python(value):
  words = zip(value.high.tolist(), value.low.tolist(), strict=True)
  return [high << 32 | low for high, low in words]


@jax.jit
def compute(a_words, b_words, int32):
  a, b = uint64.from_words(a_words), uint64.from_words(b_words)
  by_divisor = uint64.UInt64(a.high[:, None], a.low[:, None])
  return {
    'add': uint64.add(a, b),
    'xor': uint64.xor(a, b),
    'multiply': uint64.multiply(a, b),
    'from_int32': uint64.from_int32(int32),
    'remainder': uint64.signed_remainder(by_divisor, DIVISORS),
    'wide_remainder': uint64.signed_remainder(by_divisor, WIDE_DIVISORS),
    'remainder_of_one': uint64.signed_remainder(by_divisor, ONE),
  }


@pytest.mark.parametrize('wide', [False, True])
def test_equals_python_integers(wide):
  a, b = some_pairs()
  int32 = np.array([0, 1, -1, 2**31 - 1, -(2**31), -77], np.int32)
  words = [uint64.split_words(np.array(values, np.uint64)) for values in (a, b)]
  with jax.enable_x64(wide):
    results = compute(*words, int32)
  assert to_python(results['add']) == [(x + y) % 2**64 for x, y in zip(a, b, strict=True)]
  assert to_python(results['xor']) == [x ^ y for x, y in zip(a, b, strict=True)]
  assert to_python(results['multiply']) == [x * y % 2**64 for x, y in zip(a, b, strict=True)]
  assert to_python(results['from_int32']) == [int(x) % 2**64 for x in int32]
  signed = [x - 2**64 * (x >= 2**63) for x in a]
  all_divisors = {'remainder': DIVISORS, 'wide_remainder': WIDE_DIVISORS, 'remainder_of_one': ONE}
  for name, divisors in all_divisors.items():
    assert results[name].dtype == 'int32'
    assert results[name].tolist() == [[x % p for p in divisors.tolist()] for x in signed]
