import pytest

from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.config.ngram.hashes import NumpyHash
from tests.ngram_rows import numpy_rows


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
  rows = numpy_rows(NumpyHash('blt', (3,), ((97, 101),), 260), [[5], [7], [9]])
  assert rows.tolist()[1] == value % 101


@pytest.mark.parametrize(
  'kind, sizes, vocabulary, message',
  [
    (
      *('md5', ((5,),), 9),
      "hash 'md5' is not one of engram, ple, polynomial, blt, salted, praxis, speedrun, id",
    ),
    (
      'speedrun',
      ((1,),),
      9,
      'hash "speedrun" needs at least 2 rows, one for the first token: use more rows',
    ),
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
