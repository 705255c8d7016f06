"""Random signs of n-grams, as in modded-nanogpt from record 83 on (Chen et al. 2015).

The vector of an n-gram is multiplied by a row of a constant table of random signs. N-grams that
collide in the large table rarely have the same signs, so they interfere less.

  xor       r = (x_t XOR x_{t-1} XOR ... XOR x_{t-n+1}) mod R
  products  r = (x_t c_0 XOR x_{t-1} c_1 XOR ...) mod R, in 32 bits that wrap around

for the n-gram of x_t, ..., x_{t-n+1}; 0 if it begins before a boundary. c are constants of record
92, see `config.ngram.hashes`.

R rows of signs, n length of the n-gram.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.layers.ngram import hashing


def rows(ids: Sequence[jax.Array], kind: str, count: int) -> jax.Array:
  """Returns the row of signs of each n-gram, int32 [...].

  Args:
    ids: the ids x_t, ..., x_{t-n+1}, int32 [...]; `hashes.NO_TOKEN` before a boundary, unless
      another id is in its place.
    kind: `xor` or `products`.
    count: R.
  """
  n = len(ids)
  factors = (1,) * n
  if kind == 'products':
    factors = hashes.SIGN_FACTORS[n]
  row = hashing.xor_products(ids, factors) % count
  return jnp.where(ids[-1] == hashes.NO_TOKEN, 0, row)
