"""Valid sizes of an N-Grammer layer, and the primes of its hash. Imports no JAX."""

import functools

COMBINE = ('concat', 'add')
MAX_ROWS = 2**29  # the sum of two remainders below p < 2 V must fit in int32


def check(
  width: int,
  heads: int,
  vocabulary_size: int,
  dim: int,
  combine: str,
  orders: tuple[int, ...] = (2,),
) -> None:
  """Raises ValueError for invalid sizes."""
  if combine not in COMBINE:
    raise ValueError(f'combine {combine!r} is not one of {", ".join(COMBINE)}')
  if heads < 1 or width % heads:
    raise ValueError(f'width {width} must be divisible by heads={heads}')
  if not orders or min(orders) < 2 or len(set(orders)) < len(orders):
    raise ValueError(f'orders {orders} must be distinct numbers of at least 2')
  H, G = width // heads, len(orders)
  if not 0 < dim <= H:
    raise ValueError(
      f'n-gram dim {dim} is not between 1 and the head width {H} (width {width} / {heads} heads)'
    )
  if combine == 'concat' and G * dim > H:
    raise ValueError(f'{G} orders of n-gram dim {dim} exceed the head width {H}')
  if combine == 'add' and dim != H:
    raise ValueError(f'combine "add" needs n-gram dim {dim} to equal the head width {H}')
  if G * heads * vocabulary_size >= 2**31:
    raise ValueError(
      f'{G * heads} heads of {vocabulary_size:,} n-grams exceed the 2^31 rows of a table'
    )
  primes_above(vocabulary_size, heads)


def _is_prime(n: int) -> bool:
  return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@functools.lru_cache
def primes_above(V: int, count: int) -> tuple[int, ...]:
  """Returns the first `count` primes p with V < p < 2 V.

  Raises:
    ValueError: there are fewer, or V is too large for exact 32-bit arithmetic.
  """
  if not 0 < V <= MAX_ROWS:
    raise ValueError(f'{V:,} n-grams per head are not between 1 and {MAX_ROWS:,}')
  primes = []
  for n in range(V + 1, 2 * V):
    if len(primes) == count:
      break
    if _is_prime(n):
      primes.append(n)
  if len(primes) < count:
    raise ValueError(
      f'{count} heads need {count} primes between {V} and {2 * V}, but there are only '
      f'{len(primes)}: use a larger n-gram vocabulary or fewer heads'
    )
  return tuple(primes)
