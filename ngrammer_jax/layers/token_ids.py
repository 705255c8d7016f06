"""Checks of ids: a lookup out of range is clipped by JAX, and a float is no index."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors


def check_range(name: str, ids: Any, size: int | None) -> None:
  """Raises BadInput for ids that are not integers, or known to be out of range.

  Args:
    name: what they are, for the error message.
    ids: an array of any shape. Under `jit`, only its dtype is known.
    size: number of ids, the first of which is 0. None: not known.
  """
  dtype = getattr(ids, 'dtype', None) or np.asarray(ids).dtype
  if np.size(ids) and not jnp.issubdtype(dtype, jnp.integer):
    raise errors.BadInput(f'{name} have the dtype {dtype}, expected integers')
  is_known = not isinstance(ids, jax.core.Tracer) and getattr(ids, 'is_fully_addressable', True)
  if size is None or not is_known or not np.size(ids):
    return
  array = np.asarray(ids)  # an operation of JAX would be traced, even of a known array
  low, high = int(array.min()), int(array.max())
  if low < 0 or high >= size:
    out_of_range = low if low < 0 else high
    raise errors.BadInput(
      f'{name} have {out_of_range:,}, expected ids from 0 to {size - 1:,}: '
      'they are of another vocabulary'
    )
