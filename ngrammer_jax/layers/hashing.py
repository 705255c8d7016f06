"""Exact hashing of n-grams of ids to table rows, in 32 bits.

The row of the n-gram (z_t, z_{t-1}, ...) for head i is

  row = ((x * a_i + b_i) mod p_i) mod V,   x = z_t + z_{t-1} K + z_{t-2} K^2 + ...

with a_i = b_i = i + 1 and p_i the i-th prime above V (praxis; section 3.3 of the N-Grammer paper
draws them at random instead). x overflows 32 bits for common values of K, which gives wrong rows
without an error. The hash is linear before its last two remainders, so it separates into one table
per position of the n-gram, which the host computes exactly:

  table[j, i, z] = (a_i K^j z + (b_i if j = 0 else 0)) mod p_i
  row = ((table[0, i, z_t] + table[1, i, z_{t-1}] + ...) mod p_i) mod V

N heads, K ids, V rows of one head.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.ngram_sizes import primes_above


@functools.lru_cache
def hash_tables(K: int, V: int, heads: int, order: int = 2) -> np.ndarray:
  """Returns the tables of the separated hash, int32 [order, N, K]; table j is for z_{t-j}."""
  p_N = np.array(primes_above(V, heads), dtype=np.int64)
  a_N = np.arange(1, heads + 1, dtype=np.int64)
  id_K = np.arange(K, dtype=np.int64)
  tables = []
  factor_N = a_N % p_N
  for j in range(order):
    offset_N = a_N if j == 0 else np.zeros_like(a_N)
    # Both factors are below 2^31, so the 64-bit product is exact.
    tables.append((factor_N[:, None] * id_K[None, :] + offset_N[:, None]) % p_N[:, None])
    factor_N = factor_N * K % p_N
  return np.stack(tables).astype(np.int32)


def ngram_rows(ids: Sequence[jax.Array], K: int, V: int) -> jax.Array:
  """Returns the table rows of n-grams, int32 [..., N] in [0, V).

  Args:
    ids: the ids z_t, z_{t-1}, ..., [..., N] each, one for each position of the n-gram, in [0, K).
    K: number of distinct ids.
    V: rows of the n-gram table of one head.
  """
  N = ids[0].shape[-1]
  tables = jnp.asarray(hash_tables(K, V, N, len(ids)))
  p_N = jnp.asarray(primes_above(V, N), jnp.int32)
  head_N = jnp.arange(N)
  total = jnp.zeros_like(ids[0])
  for table_NxK, z in zip(tables, ids, strict=True):
    total = (total + table_NxK[head_N, z]) % p_N
  return total % V
