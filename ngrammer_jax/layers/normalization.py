"""Layer normalisation of the whole width or of each head, and RMS normalisation.

LayerNorm: y = scale * (x - mean) / sqrt(variance + epsilon) + bias
RMSNorm:   y = scale * x / sqrt(mean(x^2) + epsilon)
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, mesh_axes


class LayerNorm(nn.Module):
  """Normalises the last axis, then scales and shifts it.

  The variance is biased.

  Attributes:
    per_head: the input is [..., N, H], and every head has its own scale and bias.
    epsilon: added to the variance.
    dtype: dtype of the output; None: dtype of the input. Statistics are in at least float32.
  """

  per_head: bool = False
  epsilon: float = 1e-6
  dtype: jnp.dtype | None = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = x.shape[-2:] if self.per_head else x.shape[-1:]
    ones = axis_names.with_axis_names(nn.initializers.ones, _names(shape))
    zeros = axis_names.with_axis_names(nn.initializers.zeros, _names(shape))
    dtype = x.dtype if self.dtype is None else self.dtype
    param_dtype = jnp.promote_types(dtype, jnp.float32)
    scale = self.param('scale', ones, shape, param_dtype)
    bias = self.param('bias', zeros, shape, param_dtype)
    return _normalise(x, scale, bias, self.epsilon, dtype)


# The gradient is written out because it needs only x and two numbers per row, nothing else of
# the size of x. The barriers prevent XLA from broadcasting these numbers to the size of x.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalise(
  x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, dtype: jnp.dtype
) -> jax.Array:
  y, _ = _forward(x, scale, bias, epsilon, dtype)
  return y


def _forward(
  x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean = wide.mean(axis=-1, keepdims=True)
  if x.dtype == jnp.bfloat16 and mesh_axes.device()[0] != 'cpu':
    # In the same pass as the mean. Rounding changes the variance by a share of 1e-5 where the mean
    # is 10 deviations, and 1e-3 where it is 100, of which bfloat16 has no digits.
    variance = jnp.maximum(jnp.square(wide).mean(axis=-1, keepdims=True) - jnp.square(mean), 0)
  else:
    variance = jnp.square(wide - mean).mean(axis=-1, keepdims=True)
  mean, inverse = jax.lax.optimization_barrier((mean, jax.lax.rsqrt(variance + epsilon)))
  y = (wide - mean) * inverse * scale + bias
  return y.astype(dtype), (x, mean, inverse, scale, bias)


def _backward(
  epsilon: float, dtype: jnp.dtype, residuals: tuple[jax.Array, ...], dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """dx = (g - mean(g) - z mean(g z)) / deviation, with the normalised z of x and g = scale dy."""
  x, mean, inverse, scale, bias = residuals
  dy = dy.astype(mean.dtype)
  z = (x.astype(mean.dtype) - mean) * inverse
  g = scale * dy
  mean_g = g.mean(axis=-1, keepdims=True)
  mean_gz = (g * z).mean(axis=-1, keepdims=True)
  mean_g, mean_gz = jax.lax.optimization_barrier((mean_g, mean_gz))
  dx = (g - mean_g - z * mean_gz) * inverse
  rows = tuple(range(x.ndim - scale.ndim))
  dscale = (dy * z).sum(axis=rows)
  dbias = dy.sum(axis=rows)
  return dx.astype(x.dtype), dscale.astype(scale.dtype), dbias.astype(bias.dtype)


_normalise.defvjp(_forward, _backward)


class RMSNorm(nn.Module):
  """Divides the last axis by its root mean square, then scales it.

  Attributes:
    axes: number of trailing axes of the scale.
    joint: whether the norm is over all these axes together, not over the last one.
    initial: initial scale.
    epsilon: added to the mean square. None: the machine epsilon of the dtype of the statistics.
    is_offset: whether the parameter is scale - 1, so that weight decay pulls the scale to 1.
    dtype: dtype of the output; None: dtype of the input. Statistics are in at least float32.
  """

  axes: int = 1
  epsilon: float | None = 1e-6
  is_offset: bool = False
  dtype: jnp.dtype | None = jnp.float32
  joint: bool = False
  initial: float = 1.0

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = x.shape[x.ndim - self.axes :]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dtype = x.dtype if self.dtype is None else self.dtype
    init = nn.initializers.constant(self.initial - self.is_offset)
    init = axis_names.with_axis_names(init, _names(shape))
    scale = self.param('scale', init, shape, jnp.promote_types(dtype, jnp.float32))
    if self.is_offset:
      scale = 1 + scale
    epsilon = jnp.finfo(wide).eps if self.epsilon is None else self.epsilon
    axis = tuple(range(-self.axes, 0)) if self.joint else -1
    mean_square = jnp.square(x.astype(wide)).mean(axis=axis, keepdims=True)
    # Without the barrier XLA computes it again for every value of x.
    inverse = jax.lax.optimization_barrier(jax.lax.rsqrt(mean_square + epsilon))
    return (x * inverse * scale).astype(dtype)


def _names(shape: tuple[int, ...]) -> tuple[str | None, ...]:
  """Returns the axis names of a scale or bias.

  No rule shards them: sharding these small vectors would propagate to the activations.
  """
  return *[None] * (len(shape) - 1), 'norm'
