"""Sizes of the tables of n-gram memories, and the primes among them.

This file imports no JAX, because configs with invalid tables are refused before JAX is imported.

G orders, K heads of each order, V distinct ids.
"""

import functools
import itertools

MAX_ROWS = 2**29  # of a head, so that primes p < 2 V fit in 30 bits
MAX_ORDER = 32  # each order hashes as many ids, and the state keeps the ids of the longest one
MAX_HEADS = 1024  # of each order
ROW_RULES = (
  'prime',
  'longcat',
  'over_encoding',
  'exact',
  'multiple',
  'multiple_plus_one',
  'vocabulary',
  'shared_prime',
)


def check_widths(width: int, heads: int, dim: int, combine: str, num_orders: int) -> None:
  """Raises ValueError if n-gram vectors do not fit the heads, see `layers.NGrammer`."""
  if heads < 1 or width % heads:
    raise ValueError(f'width {width} must be divisible by heads={heads}')
  H = width // heads
  if not 0 < dim <= H:
    raise ValueError(
      f'n-gram dim {dim} is not between 1 and the head width {H} (width {width} / {heads} heads)'
    )
  if combine == 'concat' and num_orders * dim > H:
    raise ValueError(f'{num_orders} orders of n-gram dim {dim} exceed the head width {H}')
  if combine == 'add' and dim != H:
    raise ValueError(f'combine "add" needs n-gram dim {dim} to equal the head width {H}')


def is_prime(n: int) -> bool:
  """Returns whether n < 3,215,031,751 is prime (Miller-Rabin, exact with these bases)."""
  bases = (2, 3, 5, 7)
  if n < 2 or any(n % base == 0 for base in bases):
    return n in bases
  twos = ((n - 1) & (1 - n)).bit_length() - 1
  odd = (n - 1) >> twos
  for base in bases:
    powers = [pow(base, odd << i, n) for i in range(twos)]
    if powers[0] != 1 and n - 1 not in powers:
      return False
  return True


@functools.lru_cache
def primes_above(V: int, count: int) -> tuple[int, ...]:
  """Returns the first `count` primes p with V < p < 2 V.

  Raises:
    ValueError: there are fewer primes.
  """
  candidates = (n for n in range(V + 1, 2 * V) if is_prime(n))
  primes = tuple(itertools.islice(candidates, count))
  if len(primes) < count:
    raise ValueError(
      f'{count} heads need {count} primes between {V} and {2 * V}, but there are only '
      f'{len(primes)}: use a larger n-gram vocabulary or fewer heads'
    )
  return primes


@functools.lru_cache
def table_sizes(
  rule: str, rows: tuple[int, ...], orders: tuple[int, ...], heads: int, num_ids: int, layers: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
  """Returns the rows of each head of an n-gram memory, [layers][G][K].

  Args:
    rule: rule from the base numbers m to rows. For head j of order g, both from 0: 'prime': the
      smallest unused primes of at least m over heads, orders and layers (Engram, PLE); 'longcat': m
      + 2 (g K + j) + 1; 'over_encoding': m + 2 j; 'exact': m; 'multiple': the multiple of V nearest
      to m; 'multiple_plus_one': one more than that; 'vocabulary': V, a row for each id;
      'shared_prime': the largest prime of at most m, and all orders and heads look up the same
      rows.
    rows: the base number for all orders, or one for each.
    orders: lengths of the n-grams.
    heads: K.
    num_ids: V.
    layers: number of layers with the memory; only their primes differ.

  Raises:
    ValueError: invalid sizes.
  """
  if rule not in ROW_RULES:
    raise ValueError(f'row_rule {rule!r} is not one of {", ".join(ROW_RULES)}')
  if not orders or min(orders) < 1 or len(set(orders)) < len(orders):
    raise ValueError(f'orders {orders} must be distinct numbers of at least 1')
  if len(rows) not in (1, len(orders)):
    raise ValueError(
      f'rows {rows} has {len(rows)} numbers for {len(orders)} orders: '
      f'expected one for all orders, or one for each'
    )
  bases = rows * len(orders) if len(rows) == 1 else rows
  if not 1 <= min(bases) <= max(bases) <= MAX_ROWS:
    raise ValueError(f'rows {rows} of a head must be between 1 and {MAX_ROWS:,}')
  if rule == 'prime':
    sizes = _prime_sizes(bases, heads, layers)
  else:
    sizes = (_regular_sizes(rule, bases, heads, num_ids),) * layers
  for layer_sizes in sizes:
    _check_table(rule, layer_sizes, orders)
  return sizes


def _prime_sizes(
  bases: tuple[int, ...], heads: int, layers: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
  """Returns the rows of each head [layers][G][K], distinct primes."""
  used_primes: set[int] = set()
  sizes = []
  for _ in range(layers):
    layer_sizes = []
    for base in bases:
      unused = (n for n in itertools.count(base) if n not in used_primes and is_prime(n))
      primes = tuple(itertools.islice(unused, heads))
      used_primes.update(primes)
      layer_sizes.append(primes)
    sizes.append(tuple(layer_sizes))
  return tuple(sizes)


def _regular_sizes(
  rule: str, bases: tuple[int, ...], heads: int, num_ids: int
) -> tuple[tuple[int, ...], ...]:
  """Returns the rows of each head [G][K] by a rule other than 'prime'."""
  sizes = []
  for g, rows in enumerate(bases):
    sizes.append(tuple(_regular_size(rule, rows, g * heads, j, num_ids) for j in range(heads)))
  return tuple(sizes)


def _regular_size(rule: str, rows: int, earlier_heads: int, j: int, num_ids: int) -> int:
  """Returns the rows of head j of an order, after the heads of earlier orders."""
  match rule:
    case 'longcat':
      return rows + 2 * (earlier_heads + j) + 1
    case 'over_encoding':
      return rows + 2 * j
    case 'exact':
      return rows
    case 'multiple':
      return _nearest_multiple(rows, num_ids)
    case 'multiple_plus_one':
      return _nearest_multiple(rows, num_ids) + 1
    case 'vocabulary':
      return num_ids
    case 'shared_prime':
      return _largest_prime(rows)


def _nearest_multiple(rows: int, num_ids: int) -> int:
  return num_ids * max(1, (rows + num_ids // 2) // num_ids)


def _largest_prime(most: int) -> int:
  """Returns the largest prime of at most a number."""
  for n in range(most, 1, -1):
    if is_prime(n):
      return n
  raise ValueError('row_rule "shared_prime" needs at least 2 rows: use more rows')


def first_rows(rule: str, sizes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
  """Returns the first row of each head in the table [G K], followed by the total number of rows.

  Args:
    rule: see `table_sizes`.
    sizes: rows of each head [G][K].
  """
  flat_sizes = tuple(itertools.chain.from_iterable(sizes))
  if rule == 'shared_prime':
    return (*[0] * len(flat_sizes), flat_sizes[0])
  return tuple(itertools.accumulate(flat_sizes, initial=0))


def _check_table(rule: str, sizes: tuple[tuple[int, ...], ...], orders: tuple[int, ...]) -> None:
  """Raises ValueError for too many rows, or heads that cannot share rows."""
  largest = max(map(max, sizes))
  if rule == 'shared_prime' and len({size for order in sizes for size in order}) > 1:
    raise ValueError(
      'row_rule "shared_prime" needs the same number of rows for all orders: use one number'
    )
  total = first_rows(rule, sizes)[-1]
  if largest > MAX_ROWS:
    raise ValueError(
      f'a head of {largest:,} rows exceeds the {MAX_ROWS:,} rows of its hash: '
      f'use fewer rows, and more heads'
    )
  if total >= 2**31:
    raise ValueError(
      f'the table of orders {orders} would have {total:,} rows, but must have less than 2^31: '
      f'split the orders over several memories'
    )
