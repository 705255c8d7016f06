"""The join of N-Grammer: each head of a token with its n-gram vectors (Roy et al. 2022).

  y = [LN(x)[: H - G E]; LN(g_1); ...; LN(g_G)]  ('concat')
  y = LN(x) + LN(g_1) + ... + LN(g_G)            ('add')

B batch, T segment length, N heads, H head width, G orders, E width of an n-gram vector.
"""

import functools

import jax
import jax.numpy as jnp

from ngrammer_jax.layers import normalization


def combine(
  x_BxTxNxH: jax.Array, ngram_BxTxGNxE: jax.Array, join: str, dtype: jnp.dtype
) -> jax.Array:
  """Returns y [B, T, N, H].

  The norms `unigram_norm` and `ngram_norm` belong to the calling module.

  Args:
    x_BxTxNxH: embeddings.
    ngram_BxTxGNxE: vectors of the n-grams of every order and head; 'add' needs E = H.
    join: 'concat' or 'add'.
    dtype: dtype of the output.
  """
  norm = functools.partial(normalization.LayerNorm, per_head=True, dtype=dtype)
  unigram_BxTxNxH = norm(name='unigram_norm')(x_BxTxNxH)
  ngram_BxTxGNxE = norm(name='ngram_norm')(ngram_BxTxGNxE)
  N, H = x_BxTxNxH.shape[-2:]
  GN, E = ngram_BxTxGNxE.shape[-2:]
  G = GN // N
  ngrams = jnp.split(ngram_BxTxGNxE, G, axis=-2)
  if join == 'add':
    return sum(ngrams, start=unigram_BxTxNxH)
  # Overwrites the last features in place, so that there is only one array of this size.
  ngrams_BxTxNxGE = jnp.concatenate(ngrams, axis=-1)
  first = H - G * E
  return jax.lax.dynamic_update_slice_in_dim(unigram_BxTxNxH, ngrams_BxTxNxGE, first, axis=-1)
