"""Checks of ids: JAX clips ids out of range, and a float is no index."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors


def check_range(name: str, ids: Any, size: int | None) -> None:
  """Raises BadInput for non-integer ids, and for concrete ids out of range.

  Args:
    name: name of the ids in the error message.
    ids: an array of any shape. Under `jit`, only its dtype is known.
    size: number of ids, from 0 on. None: unknown.
  """
  dtype = getattr(ids, 'dtype', None) or np.asarray(ids).dtype
  if np.size(ids) and not jnp.issubdtype(dtype, jnp.integer):
    raise errors.BadInput(f'{name} must be integers, not {dtype}')
  is_known = not isinstance(ids, jax.core.Tracer) and getattr(ids, 'is_fully_addressable', True)
  if size is None or not is_known or not np.size(ids):
    return
  array = np.asarray(ids)  # an operation of JAX would be traced, even of a known array
  low, high = int(array.min()), int(array.max())
  if low < 0 or high >= size:
    out_of_range = low if low < 0 else high
    raise errors.BadInput(
      f'{name} contain {out_of_range:,}, expected ids from 0 to {size - 1:,}: check the vocabulary'
    )
