"""The dtype that a model computes in."""

import jax
import jax.numpy as jnp

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config


def compute_dtype(config: model_config.ModelConfig) -> jnp.dtype:
  """Returns the dtype of activations on the default backend.

  Raises:
    BadInput: float64 without 64-bit mode.
  """
  if config.dtype == 'auto':
    return jnp.dtype('float32' if jax.default_backend() == 'cpu' else 'bfloat16')
  if config.dtype == 'float64' and not jax.config.jax_enable_x64:
    raise errors.BadInput('model.dtype="float64" needs the environment variable JAX_ENABLE_X64=1')
  return jnp.dtype(config.dtype)
