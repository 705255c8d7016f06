"""Hashes of n-grams on the device, exact without 64-bit integers.

The formulas are in `config.ngram.hashes`: a sum or a XOR of the products of ids and factors,
reduced to a row by a remainder.

G orders, K heads of each order, N ids in the longest n-gram.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.layers.ngram import uint64


@dataclasses.dataclass(frozen=True)
class NGramHash(hashes.NumpyHash):
  """A hash of arrays of ids; for its attributes see `hashes.NumpyHash`."""

  def __call__(self, ids: Sequence[jax.Array], multipliers: jax.Array | None = None) -> jax.Array:
    """Returns the rows of n-grams within their heads, int32 [..., G K] in (order, head) order.

    Args:
      ids: the ids x_t, x_{t-1}, ..., int32 [..., K or 1], as many as `hashes.num_places`.
      multipliers: uint32 [N, 2] (see `uint64.split_words`) for 'engram' and 'ple' if the vocabulary
        size is only known at run time. None: drawn for `vocabulary`.
    """
    places = hashes.num_places(self.kind, self.orders)
    if len(ids) != places:
      raise ValueError(f'n-grams of orders {self.orders} need {places} ids, not {len(ids)}')
    rows = [self._order_rows(g, ids, multipliers) for g in range(len(self.orders))]
    return jnp.concatenate(rows, axis=-1)

  def _order_rows(
    self, g: int, ids: Sequence[jax.Array], multipliers: jax.Array | None
  ) -> jax.Array:
    """Returns the rows in the heads of order g, int32 [..., K]."""
    if self.kind == 'speedrun':
      return self._speedrun_rows(g, ids)
    if self.kind == 'id':
      (x, *_), sizes_K = ids, np.array(self.sizes[g], np.int32)
      return jnp.where((x >= 0) & (x < sizes_K), x, 0)
    factors = uint64.split_words(self.factors(g))
    if self.is_xor and multipliers is not None:
      factors = multipliers[: self.orders[g], None]
    mix = None
    for x, factors_Kx2 in zip(ids, factors, strict=False):
      product = uint64.multiply(uint64.from_int32(x), uint64.from_words(factors_Kx2))
      if mix is None:
        mix = product
      elif self.is_xor:
        mix = uint64.xor(mix, product)
      else:
        mix = uint64.add(mix, product)
    sizes_K = np.array(self.sizes[g])
    if self.kind != 'praxis':
      return uint64.signed_remainder(mix, sizes_K)
    offsets_K = uint64.split_words(np.arange(1, len(sizes_K) + 1))
    mix = uint64.add(mix, uint64.from_words(offsets_K))
    return uint64.signed_remainder(mix, self.divisors(g)) % sizes_K.astype(np.int32)

  def _speedrun_rows(self, g: int, ids: Sequence[jax.Array]) -> jax.Array:
    """Returns the rows of order g by the hash 'speedrun', int32 [..., 1]."""
    n = self.orders[g]
    (last,) = self.divisors(g)
    is_whole = ids[n - 1] != hashes.NO_TOKEN
    if n == 2:
      is_second = is_whole & (ids[2] == hashes.NO_TOKEN)
      ids = [ids[0], jnp.where(is_second, last, ids[1])]
    mix = xor_products(ids, hashes.SPEEDRUN_FACTORS[n])
    return jnp.where(is_whole, mix % last, last)


def xor_products(ids: Sequence[jax.Array], factors: Sequence[int]) -> jax.Array:
  """Returns the XOR of the products of ids and factors, which wrap around in 32 bits, int32."""
  mix = jnp.int32(0)
  for x, factor in zip(ids, factors, strict=False):
    mix ^= x * jnp.int32(factor)
  return mix
