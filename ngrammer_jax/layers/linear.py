"""A linear map between named axes."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp


class Linear(nn.Module):
  """y = x kernel + bias, over the last `contract` axes of x.

  Attributes:
    features: shape of the output axes.
    names: logical names of the kernel's axes, inputs first.
    contract: how many trailing axes of the input are summed over.
    bias: add one.
    dtype: of the computation.
    initializer: of kernel and bias. None: a normal kernel, of variance 1 / inputs, cut at two
      deviations, and no bias.
  """

  features: tuple[int, ...]
  names: tuple[str, ...]
  contract: int = 1
  bias: bool = False
  dtype: jnp.dtype = jnp.float32
  initializer: nn.initializers.Initializer | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    inputs = x.shape[-self.contract :]
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    deviation = math.prod(inputs) ** -0.5

    def normal(key, shape, dtype):
      unit = jax.random.truncated_normal(key, -2, 2, shape, dtype)
      return unit * (deviation / 0.87962566)  # which truncation leaves of a unit deviation

    kernel = self.param(
      'kernel',
      nn.with_logical_partitioning(self.initializer or normal, self.names),
      (*inputs, *self.features),
      param_dtype,
    )
    y = jnp.tensordot(x.astype(self.dtype), kernel.astype(self.dtype), self.contract)
    if self.bias:
      names = self.names[self.contract :]
      init = nn.with_logical_partitioning(self.initializer or nn.initializers.zeros, names)
      y += self.param('bias', init, self.features, param_dtype).astype(self.dtype)
    return y
