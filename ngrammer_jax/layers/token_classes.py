"""Token classes: tokens with the same normalised text share a class (Engram)."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names


def variable(module: nn.Module, vocabulary_size: int) -> jax.Array:
  """Returns `token_classes` of the collection `codebook` of a module, int32 [V].

  Before training, each token is its own class.
  """
  init = functools.partial(jnp.arange, vocabulary_size, dtype=jnp.int32)
  init = axis_names.with_axis_names(init, (None,))
  return module.variable('codebook', 'token_classes', init).value
