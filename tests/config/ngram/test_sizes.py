import numpy as np
import pytest

from ngrammer_jax.config.ngram import sizes as ngram_sizes
from ngrammer_jax.config.ngram.sizes import primes_above, table_sizes

# The primes above 196,608 and 393,216 of the praxis tables.
PRAXIS_PRIMES = {
  196_608: (
    *(196613, 196643, 196657, 196661, 196663, 196681, 196687, 196699),
    *(196709, 196717, 196727, 196739, 196751, 196769, 196771, 196799),
  ),
  393_216: (393241, 393247, 393257, 393271, 393287, 393299, 393301, 393311),
}


@pytest.mark.parametrize('V, primes', [*PRAXIS_PRIMES.items(), (13, (17, 19)), (4, (5, 7))])
def test_first_primes_above_the_vocabulary(V, primes):
  assert primes_above(V, len(primes)) == primes


def test_primes_equal_trial_division():
  # The last numbers are products of two primes, pseudoprimes to 2, 3, 5 one by one among them.
  numbers = [*range(2000), *range(2**28 - 300, 2**28), 25_326_001, 2047, 121, 781, 1_373_653]
  slow_is_prime = lambda n: n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
  for n in numbers:
    assert ngram_sizes.is_prime(n) == slow_is_prime(n), n


def test_impossible_vocabulary_says_what_to_change():
  with pytest.raises(ValueError) as caught:
    primes_above(16, 8)
  assert str(caught.value) == (
    '8 heads need 8 primes between 16 and 32, but there are only 5: '
    'use a larger n-gram vocabulary or fewer heads'
  )


def test_published_prime_sizes():
  """Rows of the tables of DeepSeek-V4.1, of the Engram demo and of Qwen's PLE."""
  v41 = table_sizes('prime', (16_000_000,), (2, 3, 4), 8, 99_092, 2)
  assert [np.sum(sizes) for sizes in v41] == [384_006_168, 384_016_682]
  assert v41[0][0][:3] == (16_000_057, 16_000_079, 16_000_081) and v41[1][0][0] == 16_000_477
  demo = table_sizes('prime', (129_280 * 5,), (2, 3), 8, 99_092, 2)
  assert [np.sum(sizes) for sizes in demo] == [10_344_164, 10_348_242]
  (ple,) = table_sizes('prime', (20_000_000,), (2, 3), 8, 248_320, 1)
  assert (np.sum(ple), ple[0][0], ple[1][-1]) == (320_001_446, 20_000_003, 20_000_171)


def test_no_two_heads_of_any_order_and_layer_share_a_prime():
  sizes = table_sizes('prime', (20, 29, 20), (2, 3, 5), 2, 9, 2)
  # The second order finds 29 taken by neither, and the third one continues after both.
  assert sizes[0] == ((23, 29), (31, 37), (41, 43))
  assert sizes[1] == ((47, 53), (59, 61), (67, 71))


def test_sizes_by_other_rules():
  sizes = lambda rule, rows: table_sizes(rule, rows, (2, 4), 3, 10, 1)[0]
  assert sizes('longcat', (78,)) == ((79, 81, 83), (85, 87, 89))
  assert sizes('over_encoding', (78, 101)) == ((78, 80, 82), (101, 103, 105))
  assert sizes('exact', (78,)) == ((78,) * 3,) * 2
  assert sizes('multiple', (74, 76)) == ((70,) * 3, (80,) * 3)
  assert sizes('multiple_plus_one', (1, 75)) == ((11,) * 3, (81,) * 3)
  assert len(table_sizes('exact', (1,), (1,), 1, 10, 3)) == 3


@pytest.mark.parametrize(
  'rule, rows, orders, heads, message',
  [
    ('primes', (9,), (2,), 1, "row_rule 'primes' is not one of prime, longcat, over_encoding, "),
    ('prime', (9,), (0, 2), 1, 'orders (0, 2) must be distinct numbers of at least 1'),
    ('prime', (9,), (2, 2), 1, 'orders (2, 2) must be distinct numbers of at least 1'),
    ('prime', (9,), (), 1, 'orders () must be distinct numbers of at least 1'),
    (
      *('prime', (9, 9), (2, 3, 4), 1),
      'rows (9, 9) has 2 numbers for 3 orders: expected one for all orders, or one for each',
    ),
    ('prime', (0,), (2,), 1, 'rows (0,) of a head must be between 1 and 536,870,912'),
    ('exact', (2**29 + 1,), (2,), 1, 'rows (536870913,) of a head must be between 1 and 536,8'),
    (
      *('prime', (2**29 - 43,), (2,), 4),
      'a head of 536,870,923 rows exceeds the 536,870,912 rows of its hash: use fewer '
      'rows, and more heads',
    ),
    (
      *('exact', (2**27,), (2, 3), 8),
      'the table of orders (2, 3) would have 2,147,483,648 rows, but must have less than 2^31: '
      'split the orders over several memories',
    ),
  ],
)
def test_sizes_that_cannot_be_say_what_to_change(rule, rows, orders, heads, message):
  with pytest.raises(ValueError) as caught:
    table_sizes(rule, rows, orders, heads, 10, 1)
  assert str(caught.value).startswith(message)
