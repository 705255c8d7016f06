"""Checks of ids: a lookup out of range is clipped by JAX, and a float is no index."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors


def check(name: str, ids: Any, size: int | None) -> None:
  """Raises BadInput for ids that are not integers, or known to be out of range.

  Args:
    name: what they are, for the error message.
    ids: an array of any shape. Under `jit`, only its dtype is known.
    size: number of ids, the first of which is 0. None: not known.
  """
  array = ids if isinstance(ids, jax.Array) else np.asarray(ids)
  if array.size and not jnp.issubdtype(array.dtype, jnp.integer):
    raise errors.BadInput(f'{name} have the dtype {array.dtype}, expected integers')
  if size is None or isinstance(array, jax.core.Tracer) or not array.size:
    return
  low, high = int(array.min()), int(array.max())
  if low < 0 or high >= size:
    wrong = low if low < 0 else high
    raise errors.BadInput(
      f'{name} have {wrong:,}, expected ids from 0 to {size - 1:,}: they are of another vocabulary'
    )
