"""Products in at least float32 of arrays in a narrower dtype, such as bfloat16.

The result has a gradient in float32. A product of it with a bfloat16 operand would run in float32,
at half of the rate of bfloat16 products or less. So the gradient is rounded to the dtype of the
operands first, as all other gradients of a bfloat16 model are.
"""

import jax
import jax.numpy as jnp


def wide_einsum(indices: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Multiplies two arrays in at least float32.

  If they have one dtype, the products of the gradient have operands of this dtype too.

  Args:
    indices: as for `jnp.einsum`.
    a, b: the arrays.

  Raises:
    TypeError: the dtype is narrower than float32, and the product is differentiated in forward
      mode (`jax.jvp`).
  """
  if a.dtype != b.dtype or a.dtype == _wide(a):
    return _einsum(indices, a, b)
  return _narrow_einsum(indices, a, b)


def _wide(array: jax.Array) -> jnp.dtype:
  return jnp.promote_types(array.dtype, jnp.float32)


def _einsum(indices: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(indices, a, b, preferred_element_type=_wide(a))


_narrow_einsum = jax.custom_vjp(_einsum, nondiff_argnums=(0,))


def _forward(
  indices: str, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _einsum(indices, a, b), (a, b)


def _backward(
  indices: str, operands: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
  a, b = operands
  dy = dy.astype(a.dtype)
  (da,) = jax.linear_transpose(lambda a: jnp.einsum(indices, a, b), a)(dy)
  (db,) = jax.linear_transpose(lambda b: jnp.einsum(indices, a, b), b)(dy)
  return da, db


_narrow_einsum.defvjp(_forward, _backward)
