"""Layer normalisation, of the whole width or of each head by itself."""

from flax import linen as nn
import jax
import jax.numpy as jnp


class LayerNorm(nn.Module):
  """y = scale * (x - mean) / sqrt(variance + epsilon) + bias, over the last axis.

  Statistics are taken in at least float32, with the biased variance.

  Attributes:
    per_head: the input is [..., N, H] and every head has a scale and bias of its own.
    epsilon: added to the variance, inside the root.
    dtype: of the output; statistics stay in at least float32.
  """

  per_head: bool = False
  epsilon: float = 1e-6
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = x.shape[-2:] if self.per_head else x.shape[-1:]
    # No logical names: sharding so few numbers would only draw the activations after them.
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    scale = self.param('scale', nn.initializers.ones, shape, param_dtype)
    bias = self.param('bias', nn.initializers.zeros, shape, param_dtype)

    # Computed again in the backward pass: that keeps x alone, and not two more of its size.
    @jax.checkpoint
    def normalise(x, scale, bias):
      x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
      centred = x - x.mean(axis=-1, keepdims=True)
      variance = jnp.square(centred).mean(axis=-1, keepdims=True)
      y = centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias
      return y.astype(self.dtype)

    return normalise(x, scale, bias)
