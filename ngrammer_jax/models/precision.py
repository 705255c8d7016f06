"""The dtypes of a model: compute and parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config

PARAMETER_DTYPES = ('float32', 'bfloat16', 'float16', 'float64')


def compute_dtype(config: model_config.ModelConfig) -> jnp.dtype:
  """Returns the dtype of activations on the default backend.

  Raises:
    BadInput: float64 without 64-bit mode.
  """
  if config.dtype == 'auto':
    if jax.default_backend() == 'cpu':
      return jnp.dtype('float32')
    return jnp.dtype('bfloat16')
  check_x64('model.dtype', config.dtype)
  return jnp.dtype(config.dtype)


def check_x64(key: str, dtype: str) -> None:
  """Raises BadInput with the key for float64 without 64-bit mode."""
  if dtype == 'float64' and not jax.config.jax_enable_x64:
    raise errors.BadInput(f'{key}="float64" needs the environment variable JAX_ENABLE_X64=1')


def available_dtype(dtype: np.dtype) -> np.dtype:
  """Returns the dtype of an array in memory: without 64-bit mode, float64 becomes float32."""
  if dtype == np.float64 and not jax.config.jax_enable_x64:
    return np.dtype(np.float32)
  return dtype


def stored_dtype(dtype: Any) -> str | None:
  """Returns the name of a parameter dtype in a file; None: unchanged.

  Args:
    dtype: its name, or the dtype of NumPy or JAX.

  Raises:
    BadInput: an invalid parameter dtype.
  """
  if dtype is None:
    return None
  try:
    name = jnp.dtype(dtype).name
  except TypeError:
    name = ''
  if name not in PARAMETER_DTYPES:
    raise errors.BadInput(
      f'dtype={dtype!r} is no parameter dtype: use one of {", ".join(PARAMETER_DTYPES)}'
    )
  return name


def loaded_dtype(dtype: Any) -> str | None:
  """Returns the name of a parameter dtype in memory, see `stored_dtype`.

  Raises:
    BadInput: an invalid parameter dtype, or it is float64 without 64-bit mode.
  """
  name = stored_dtype(dtype)
  if name is not None:
    check_x64('dtype', name)
  return name
