import itertools

import pytest

from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.config.ngram.hashes import NumpyHash
from ngrammer_jax.config.ngram.sizes import table_sizes


def test_published_multipliers():
  """Of DeepSeek-V4.1 in layers 1 and 14, the demo in layer 15, and Qwen3.8-Flash-Next."""
  expected = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    15: [28919099099511, 56020370062535, 53929037264533],
  }
  for layer, values in expected.items():
    assert hashes.engram_multipliers(99_092, len(values), 0, layer).tolist() == values
  ple = hashes.ple_multipliers(248_320, 3, 1234, 0)
  assert ple.tolist() == [23703573157769, 20109073645365, 8052911324071]


def test_the_newest_byte_has_the_highest_power():
  """As in the code of BLT, in 64 bits with sign."""
  a = hashes.BLT_FACTORS[1]
  value = (5 * a**2 + 7 * a + 9 + 2**63) % 2**64 - 2**63
  rows = NumpyHash('blt', (3,), ((97, 101),), 260).numpy_rows([[5], [7], [9]])
  assert rows.tolist()[1] == value % 101


def slow_shared(ngram_hash, ids):
  """The 2-grams of these ids that share their row of the first head with another one."""
  rows = {}
  for x, y in itertools.product(range(ids), repeat=2):
    row = (x + y * ngram_hash.vocabulary) % ngram_hash.sizes[0][0]
    rows.setdefault(row, []).append((x, y))
  return sum(len(grams) for grams in rows.values() if len(grams) > 1) / ids**2


def test_rows_near_multiples_of_the_vocabulary_collide():
  """LongCat's own rows, 78 V + 1, where 40 ids are all there are."""
  V, random, shared = 40, {}, {}
  for rule in ('multiple', 'multiple_plus_one', 'prime'):
    (sizes,) = table_sizes(rule, (78 * V + V // 3,), (2, 3), 2, V, 1)
    ngram_hash = NumpyHash('polynomial', (2, 3), sizes, V)
    shared[rule], random[rule] = hashes.shared_rows(ngram_hash)
    assert shared[rule] == slow_shared(ngram_hash, V)
  assert shared['prime'] == 0
  # A random function: 1 - (1 - 1/3120)^1599.
  assert random['multiple'] == pytest.approx(0.401, abs=1e-3)


def test_collision_rate_of_large_vocabularies():
  V = 8192
  rate = lambda rule, kind: hashes.shared_rows(
    NumpyHash(kind, (3, 2), table_sizes(rule, (78 * V + V // 3,), (3, 2), 1, V, 1)[0], V)
  )
  shared, random = rate('multiple_plus_one', 'polynomial')
  assert shared > 0.99 and random == pytest.approx(0.791, abs=1e-3)
  shared, random = rate('prime', 'engram')
  assert shared == pytest.approx(random, abs=0.005)


@pytest.mark.parametrize(
  'kind, sizes, vocabulary, message',
  [
    ('md5', ((5,),), 9, "hash 'md5' is not one of engram, ple, polynomial, blt, praxis"),
    (
      *('blt', ((5,) * 12,), 9),
      'hash "blt" has constants for 11 heads of each order, not for 12: use fewer heads',
    ),
    (
      *('praxis', ((5, 7),), 9),
      'hash "praxis" needs equal numbers of rows in all heads of an order: use row_rule="exact"',
    ),
    (
      *('polynomial', ((2**28,),), 2**34),
      "hash 'polynomial' of 2 ids out of 17,179,869,184 does not fit in 64 bits: use shorter "
      'n-grams or fewer rows',
    ),
  ],
)
def test_hashes_that_cannot_be_say_what_to_change(kind, sizes, vocabulary, message):
  with pytest.raises(ValueError) as caught:
    NumpyHash(kind, (2,), sizes, vocabulary)
  assert str(caught.value) == message
