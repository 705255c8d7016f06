"""`nn.DenseGeneral` whose parameters carry logical axis names, with a fast gradient on CPUs."""

import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, placement

KERNEL_INIT = nn.initializers.lecun_normal()  # truncated, of variance 1 / inputs


def dense_general(
  inputs: tuple[int, ...],
  features: tuple[int, ...],
  names: tuple[str, ...],
  *,
  kernel_init: nn.initializers.Initializer = KERNEL_INIT,
  bias_init: nn.initializers.Initializer = nn.initializers.zeros,
  dtype: jnp.dtype = jnp.float32,
  **fields: Any,
) -> nn.DenseGeneral:
  """Returns a linear map y = x kernel + bias from the last axes of x to new ones.

  Args:
    inputs: sizes of the trailing axes of x that are summed over.
    features: sizes of the axes of y that replace them.
    names: logical names of the kernel's axes, inputs first; the bias has those of the features.
    kernel_init, bias_init: initializers; inputs and features are flattened to one axis each.
    dtype: dtype of the computation; parameters have at least float32.
    **fields: other fields of `nn.DenseGeneral`, such as `use_bias` and `name`.
  """

  def with_axis_names(init, names, shape):
    # DenseGeneral initialises flattened axes, but the names are those of the original axes.
    unflattened = lambda key, flat, dtype: init(key, flat, dtype).reshape(shape)
    return axis_names.with_axis_names(unflattened, names)

  return nn.DenseGeneral(
    features,
    axis=tuple(range(-len(inputs), 0)),
    dtype=dtype,
    param_dtype=jnp.promote_types(dtype, jnp.float32),
    kernel_init=with_axis_names(kernel_init, names, (*inputs, *features)),
    bias_init=with_axis_names(bias_init, names[len(inputs) :], features),
    dot_general=dot_general if placement.device()[0] == 'cpu' else None,
    **fields,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot_general(
  x: jax.Array, kernel: jax.Array, dimension_numbers: Any, precision: Any = None
) -> jax.Array:
  """`jax.lax.dot_general` of rows [..., inputs] and a kernel, with a fast gradient on CPUs.

  The products of XLA on CPUs are fast if the first operand is stored with the summed axis last.
  The operands of the gradient of a kernel are not; XLA transposes one of them, often the wider one,
  takes a slow product, and computes the operand again for its other uses.

  Args:
    x: rows; their last axes are summed over.
    kernel: the summed axes are its first or last ones.
    dimension_numbers: as for `jax.lax.dot_general`; there are no batch axes.
    precision: as for `jax.lax.dot_general`.
  """
  return jax.lax.dot_general(x, kernel, dimension_numbers, precision)


def _forward(x, kernel, dimension_numbers, precision):
  return dot_general(x, kernel, dimension_numbers, precision), (x, kernel)


def _backward(dimension_numbers, precision, residuals, dy):
  (x, kernel), ((inputs, kernel_inputs), _) = residuals, dimension_numbers
  rows = tuple(range(x.ndim - len(inputs)))
  features = tuple(range(len(rows), dy.ndim))
  kernel_features = tuple(axis for axis in range(kernel.ndim) if axis not in kernel_inputs)
  axes = (features, kernel_features), ((), ())
  dx = jax.lax.dot_general(dy, kernel, axes, precision)
  operands = (x, dy) if kernel_inputs[0] == 0 else (dy, x)
  return dx, sum_of_outer_products(*operands, len(rows), precision)


dot_general.defvjp(_forward, _backward)


def sum_of_outer_products(
  a: jax.Array, b: jax.Array, num_rows: int, precision: Any = None
) -> jax.Array:
  """Returns the sum over rows of the outer products of two arrays, [*A, *B].

  Transposes the narrower array; XLA does so once for all products that it is in.

  Args:
    a: [*rows, *A].
    b: [*rows, *B].
    num_rows: number of axes of the rows.
    precision: as for `jax.lax.dot_general`.
  """

  def product(narrow, wide):
    rows, others = tuple(range(num_rows)), tuple(range(num_rows, narrow.ndim))
    summed = tuple(range(len(others), narrow.ndim))
    axes = (summed, rows), ((), ())
    return jax.lax.dot_general(narrow.transpose(*others, *rows), wide, axes, precision)

  width = lambda array: math.prod(array.shape[num_rows:])
  if width(a) <= width(b):
    return product(a, b)
  # Without the barrier XLA swaps the operands again.
  c = jax.lax.optimization_barrier(product(b, a))
  num_b = b.ndim - num_rows
  return c.transpose(*range(num_b, c.ndim), *range(num_b))
