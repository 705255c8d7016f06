"""`nn.DenseGeneral` whose parameters carry logical axis names, with a fast gradient on CPUs."""

import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, mesh_axes

KERNEL_INIT = nn.initializers.lecun_normal()  # truncated, of variance 1 / inputs


def symmetric(bound: float) -> nn.initializers.Initializer:
  """Returns a uniform initializer in [-bound, bound] (JAX's starts at 0)."""

  def initialize(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return initialize


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
    inputs: sizes of the trailing axes of x, summed over.
    features: sizes of the axes of y in their place.
    names: logical names of the kernel's axes, inputs first; the bias has the names of the features.
    kernel_init, bias_init: initializers; inputs and features are flattened to one axis each.
    dtype: dtype of the computation; parameters have at least float32.
    **fields: other fields of `nn.DenseGeneral`, such as `use_bias` and `name`.
  """
  return nn.DenseGeneral(
    features,
    axis=tuple(range(-len(inputs), 0)),
    dtype=dtype,
    param_dtype=jnp.promote_types(dtype, jnp.float32),
    kernel_init=_unflattened(kernel_init, names, (*inputs, *features)),
    bias_init=_unflattened(bias_init, names[len(inputs) :], features),
    dot_general=dot_general,
    **fields,
  )


def _unflattened(
  init: nn.initializers.Initializer, names: tuple[str, ...], shape: tuple[int, ...]
) -> nn.initializers.Initializer:
  """Returns an initializer of arrays of a shape with axis names.

  DenseGeneral initialises flattened axes, but the names belong to the original axes.
  """

  def initialize(key, flat, dtype):
    return init(key, flat, dtype).reshape(shape)

  return axis_names.with_axis_names(initialize, names)


def project(x: jax.Array, features: int, names: tuple[str, str], **options: Any) -> jax.Array:
  """Returns a linear map of the last axis of x; for the options see `dense_general`."""
  return dense_general(x.shape[-1:], (features,), names, **options)(x)


def dot_general(
  x: jax.Array,
  kernel: jax.Array,
  dimension_numbers: Any,
  precision: Any = None,
  preferred_element_type: Any = None,
) -> jax.Array:
  """`jax.lax.dot_general` of rows [..., inputs] and a kernel, with a fast gradient on CPUs.

  The products of XLA on CPUs are fast if the first operand is stored with the summed axis last.
  The operands of the gradient of a kernel are not: XLA transposes one of them, often the wider one,
  takes a slow product, and computes the operand again for its other uses.

  Args:
    x: rows; their last axes are summed over.
    kernel: its first or its last axes are summed over.
    dimension_numbers: as for `jax.lax.dot_general`; there are no batch axes.
    precision, preferred_element_type: as for `jax.lax.dot_general`.

  Raises:
    TypeError: forward-mode differentiation (`jax.jvp`) on a CPU, or with a result in a dtype other
      than the dtype of x.
  """
  # The gradient of a result in another dtype has to be rounded, see `gradients`.
  has_other_dtype = preferred_element_type not in (None, x.dtype)
  if _is_cpu() or has_other_dtype:
    return _dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)
  return jax.lax.dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)


def _is_cpu() -> bool:
  return mesh_axes.device()[0] == 'cpu'


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _dot_general(x: jax.Array, kernel: jax.Array, *options: Any) -> jax.Array:
  return jax.lax.dot_general(x, kernel, *options)


def _forward(
  x: jax.Array, kernel: jax.Array, *options: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # `jax.lax.dot_general`, so that a policy of rematerialisation sees the product.
  return jax.lax.dot_general(x, kernel, *options), (x, kernel)


def _backward(
  dimension_numbers: Any,
  precision: Any,
  preferred_element_type: Any,
  operands: tuple[jax.Array, jax.Array],
  dy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  return gradients(*operands, dimension_numbers, dy, precision)


_dot_general.defvjp(_forward, _backward)


def gradients(
  x: jax.Array, kernel: jax.Array, dimension_numbers: Any, dy: jax.Array, precision: Any = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the gradients of x and of the kernel of `dot_general`, in their dtype.

  The gradient of the product is rounded to this dtype (see `layers.products`).

  Args:
    x, kernel, dimension_numbers, precision: as for `dot_general`.
    dy: gradient of the product.
  """
  (inputs, kernel_inputs), _ = dimension_numbers
  dy = dy.astype(x.dtype)
  row_axes = x.ndim - len(inputs)
  features = tuple(range(row_axes, dy.ndim))
  kernel_features = tuple(axis for axis in range(kernel.ndim) if axis not in kernel_inputs)
  dx = jax.lax.dot_general(dy, kernel, ((features, kernel_features), ((), ())), precision)
  if kernel_inputs[0] == 0:
    d_kernel = _sum_of_outer_products(x, dy, row_axes, precision)
  else:
    d_kernel = _sum_of_outer_products(dy, x, row_axes, precision)
  return dx, d_kernel


def _sum_of_outer_products(a: jax.Array, b: jax.Array, row_axes: int, precision: Any) -> jax.Array:
  """Returns the sum over rows of the outer products of [*rows, *A] and [*rows, *B], [*A, *B].

  The first `row_axes` axes of both are rows. On a CPU the narrower array is transposed; XLA does so
  once for all products of the same array.
  """
  rows = tuple(range(row_axes))
  if not _is_cpu():
    return jax.lax.dot_general(a, b, ((rows, rows), ((), ())), precision)

  def product(narrow, wide):
    others = tuple(range(row_axes, narrow.ndim))
    summed = tuple(range(len(others), narrow.ndim))
    transposed = narrow.transpose(*others, *rows)
    return jax.lax.dot_general(transposed, wide, ((summed, rows), ((), ())), precision)

  def width(array):
    return math.prod(array.shape[row_axes:])

  if width(a) <= width(b):
    return product(a, b)
  # Without the barrier XLA swaps the operands again.
  swapped = jax.lax.optimization_barrier(product(b, a))
  b_axes = b.ndim - row_axes
  return swapped.transpose(*range(b_axes, swapped.ndim), *range(b_axes))
