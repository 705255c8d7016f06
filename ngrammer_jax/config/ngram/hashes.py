"""Hashes of n-grams: ids of consecutive tokens to rows of a table.

This file imports no JAX, because configs with an overflowing hash are refused before JAX is
imported. Weight converters use the hashes too.

For the n-gram (x_t, x_{t-1}, ..., x_{t-n+1}), head j of its order and a table of p rows:

  engram, ple  row = (x_t m_0 XOR x_{t-1} m_1 XOR ... XOR x_{t-n+1} m_{n-1}) mod p
  polynomial   row = (x_t + x_{t-1} V + ... + x_{t-n+1} V^{n-1}) mod p
  blt          row = (x_t a_j^{n-1} + x_{t-1} a_j^{n-2} + ... + x_{t-n+1}) mod p
  salted       row = (x_t (1000003 + 2654435761 s) + x_{t-1} (P_1 + 40503 s) + ...) mod p
  praxis       row = ((x_t + x_{t-1} V + ... + x_{t-n+1} V^{n-1}) b_j + b_j) mod q_j mod p
  speedrun     row = (x_t c_0 XOR x_{t-1} c_1 XOR ...) mod (p - 1), in 32 bits
  id           row = x_t, 0 if it is not below p; of 1-grams

All others use signed 64-bit integers. 'blt' and 'salted' wrap around; no other hash overflows with
ids below V. Remainders are at least 0. V is the number of distinct ids. The odd multipliers m are
drawn for each layer, and the same for all orders and heads (Engram, Cheng et al. 2026; Qwen's PLE).
a_j are constants (BLT, Pagnoni et al. 2024); b_j = j + 1 and q_j is the j-th prime above p (praxis;
section 3.3 of the N-Grammer paper draws both at random). P_i are primes, and s = 1 + 97 g + 7919 j
is the salt of head j of the g-th order, both from 0 (host tables of nanochat and modded-nanogpt).
Over-Encoding (Huang et al. 2025) and LongCat-Flash-Lite use the polynomial. c are constants with
wrapping products (records 62 to 92 of modded-nanogpt); n-grams that begin before a boundary have
row p - 1. As published, the bigram of the second token has p - 1 in place of its first token.

So each hash is a sum or a XOR of one product for each place in the n-gram. `NumpyHash` has the
factors; `layers.ngram.hashing` computes the same rows on the device, in 32 bits.

G orders, K heads of each order, N ids in the longest n-gram, n ids in an n-gram of an order.
"""

import dataclasses

import numpy as np

from ngrammer_jax.config.ngram.sizes import primes_above

KINDS = ('engram', 'ple', 'polynomial', 'blt', 'salted', 'praxis', 'speedrun', 'id')
NO_TOKEN = -1  # in place of a token before a boundary, for 'speedrun'
# By the length of the n-gram: the factor of each place in it.
SPEEDRUN_FACTORS = {2: (36313, 27191), 3: (17351, 60961, 45259)}
# The same of the hash from an n-gram to its row of random signs, see `layers.ngram.signs`.
SIGN_FACTORS = {2: (48271, 30011), 3: (58699, 39779, 26801)}
# Of 'salted', of each place in the n-gram; and of the salt, of the first place and of the others.
SALTED_FACTORS = (1000003, 998244353, 911382323, 805306457)
SALT_FACTORS = (2654435761, 40503)
BLT_FACTORS = (
  1000000007,
  5915587277,
  1500450271,
  3267000013,
  5754853343,
  4093082899,
  9576890767,
  3628273133,
  2860486313,
  5463458053,
  3367900313,
)


def num_places(kind: str, orders: tuple[int, ...]) -> int:
  """Returns the number of ids in a hash: the token and its predecessors."""
  if kind == 'speedrun' and 2 in orders:  # whose second token is not hashed as those after it
    return max(3, *orders)
  return max(orders)


def engram_multipliers(vocabulary: int, count: int, seed: int, layer: int) -> np.ndarray:
  """Returns Engram's multiplier of each place in the n-gram, odd, uint64 [count].

  Args:
    vocabulary: V, number of distinct ids; no product of an id and a multiplier reaches 2^63.
    count: N.
    seed: seed of the memory.
    layer: number of the memory's block, from 0.
  """
  rng = np.random.default_rng(seed + 10007 * layer)
  values = rng.integers(0, _multiplier_bound(vocabulary), size=count, dtype=np.int64)
  return (2 * values + 1).astype(np.uint64)


def ple_multipliers(vocabulary: int, count: int, seed: int, index: int) -> np.ndarray:
  """Returns PLE's multiplier of each place in the n-gram, odd, uint64 [count].

  Args:
    vocabulary: V, number of distinct ids; no product of an id and a multiplier reaches 2^63.
    count: N.
    seed: seed of the memory.
    index: place of the layer among the layers of the memory, from 0.
  """
  states = [seed + 10007 * index + 0x9E3779B97F4A7C15 * (place + 1) for place in range(count)]
  values = [_splitmix64(state) % _multiplier_bound(vocabulary) for state in states]
  return np.array([2 * value + 1 for value in values], np.uint64)


def _multiplier_bound(vocabulary: int) -> int:
  return max(1, (2**63 - 1) // vocabulary // 2)


def _splitmix64(state: int) -> int:
  """Returns one output of the generator of Steele et al. (2014)."""
  state = (state + 0x9E3779B97F4A7C15) % 2**64
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
  state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
  return state ^ state >> 31


@dataclasses.dataclass(frozen=True)
class NumpyHash:
  """The hash of an n-gram memory in one layer, with its constants.

  Attributes:
    kind: one of `KINDS`.
    orders: lengths of the n-grams.
    sizes: rows of each head [G][K], see `config.ngram.sizes.table_sizes`.
    vocabulary: V, number of distinct ids.
    seed: seed of the multipliers.
    layer: number of the block, for 'engram'.
    index: place of the layer among the layers of the memory, for 'ple'.

  Raises:
    ValueError: an unknown kind, or invalid sizes for the kind.
  """

  kind: str
  orders: tuple[int, ...]
  sizes: tuple[tuple[int, ...], ...]
  vocabulary: int
  seed: int = 0
  layer: int = 0
  index: int = 0

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f'hash {self.kind!r} is not one of {", ".join(KINDS)}')
    heads = max(len(sizes_K) for sizes_K in self.sizes)
    if self.kind == 'blt' and heads > len(BLT_FACTORS):
      raise ValueError(
        f'hash "blt" has constants for {len(BLT_FACTORS)} heads of each order, not for {heads}: '
        f'use fewer heads'
      )
    if self.kind == 'speedrun':
      self._check_speedrun(heads)
    if self.kind == 'salted' and max(self.orders) > len(SALTED_FACTORS):
      raise ValueError(
        f'hash "salted" has constants for n-grams of up to {len(SALTED_FACTORS)} ids, not for '
        f'{max(self.orders)}: use shorter n-grams'
      )
    if self.kind == 'praxis' and any(len(set(sizes_K)) > 1 for sizes_K in self.sizes):
      raise ValueError(
        'hash "praxis" needs equal numbers of rows in all heads of an order: use row_rule="exact"'
      )
    if self.kind == 'id' and self.orders != (1,):
      raise ValueError(
        f'hash "id" only supports single ids, not orders={self.orders}: use orders=(1,)'
      )
    largest = max(max(self.divisors(g)) for g in range(len(self.orders)))
    has_sum = self.kind in ('polynomial', 'praxis')
    if has_sum and max(self.orders) * self.vocabulary * largest >= 2**63:
      raise ValueError(
        f'hash {self.kind!r} of {max(self.orders)} ids out of {self.vocabulary:,} does not fit in '
        f'64 bits: use shorter n-grams or fewer rows'
      )

  def _check_speedrun(self, heads: int) -> None:
    """Raises ValueError for n-grams or rows unsupported by the hash 'speedrun'."""
    unknown = set(self.orders) - set(SPEEDRUN_FACTORS)
    if unknown or heads > 1:
      raise ValueError(
        f'hash "speedrun" has constants for one head of 2- and of 3-grams, not for orders='
        f'{self.orders} with heads={heads}: use orders=(2,) or (2, 3), and heads=1'
      )
    if min(map(min, self.sizes)) < 2:
      raise ValueError(
        'hash "speedrun" needs at least 2 rows, one for the first token: use more rows'
      )

  @property
  def is_xor(self) -> bool:
    """Whether 64-bit products of ids and factors are combined by XOR instead of a sum."""
    return self.kind in ('engram', 'ple')

  def multipliers(self) -> np.ndarray:
    """Returns the multipliers of 'engram' or 'ple', uint64 [N]."""
    if self.kind == 'engram':
      return engram_multipliers(self.vocabulary, max(self.orders), self.seed, self.layer)
    return ple_multipliers(self.vocabulary, max(self.orders), self.seed, self.index)

  def factors(self, g: int) -> np.ndarray:
    """Returns the factor of the id s places back in n-grams of order g, uint64 [n, K or 1]."""
    places = range(self.orders[g])
    divisors_K = self.divisors(g)
    match self.kind:
      case 'engram' | 'ple':
        return self.multipliers()[: len(places), None]
      case 'id':
        factors = [[1] * len(divisors_K)]
      case 'polynomial':
        factors = [[pow(self.vocabulary, s, p) for p in divisors_K] for s in places]
      case 'blt':
        factors_K = BLT_FACTORS[: len(divisors_K)]
        factors = [[pow(a, s, 2**64) for a in factors_K] for s in reversed(places)]
      case 'salted':
        salts_K = [1 + 97 * g + 7919 * j for j in range(len(divisors_K))]
        factors = [_salted_factors(s, salts_K) for s in places]
      case 'praxis':
        primes = [*enumerate(divisors_K, start=1)]
        factors = [[b * pow(self.vocabulary, s, q) % q for b, q in primes] for s in places]
      case 'speedrun':
        factors = [[c] for c in SPEEDRUN_FACTORS[self.orders[g]]]
    return np.array(factors, np.uint64)

  def divisors(self, g: int) -> tuple[int, ...]:
    """Returns the divisor of each head in the first remainder, [K]."""
    sizes_K = self.sizes[g]
    if self.kind == 'praxis':
      return primes_above(sizes_K[0], len(sizes_K))
    if self.kind == 'speedrun':
      return tuple(size - 1 for size in sizes_K)
    return sizes_K


def _salted_factors(place: int, salts_K: list[int]) -> list[int]:
  """Returns the factor of the id at a place of the n-gram for each salt."""
  salt_factor = SALT_FACTORS[min(place, 1)]
  return [SALTED_FACTORS[place] + salt * salt_factor for salt in salts_K]
