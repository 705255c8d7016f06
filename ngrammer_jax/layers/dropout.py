"""Dropout with explicit keys, so that scanned and unrolled layers draw alike."""

import jax
import jax.numpy as jnp


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zeros in a share `rate` of the places, the others scaled to keep the mean. None: x itself."""
  if key is None or rate == 0:
    return x
  keep = 1 - rate
  return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)
