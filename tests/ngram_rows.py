"""Hashes of n-grams in NumPy, in 64 bits."""

import functools

import numpy as np


def numpy_rows(ngram_hash, ids):
  """Returns the rows of n-grams within their heads, int64 [..., G K] in (order, head) order.

  The ids are x_t, x_{t-1}, ..., integers [..., K or 1], N of them.
  """
  join = np.bitwise_xor if ngram_hash.is_xor else np.add
  ids = [np.asarray(x, np.int64).view(np.uint64) for x in ids]
  rows = []
  for g, (order, sizes_K) in enumerate(zip(ngram_hash.orders, ngram_hash.sizes, strict=True)):
    products = [
      x * factors_K for x, factors_K in zip(ids[:order], ngram_hash.factors(g), strict=True)
    ]
    mix = functools.reduce(join, products).view(np.int64)
    if ngram_hash.kind == 'praxis':
      mix = mix + np.arange(1, len(sizes_K) + 1)
    rows.append(mix % ngram_hash.divisors(g) % sizes_K)
  return np.concatenate(rows, axis=-1)
