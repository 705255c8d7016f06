"""The position-wise feed-forward layer, gated or not.

B batch, T segment length, D model width, F inner width.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

ACTIVATIONS = {
  'gelu': jax.nn.gelu,  # the tanh form
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
  'squared_relu': lambda x: jnp.square(jax.nn.relu(x)),
}


class FeedForward(nn.Module):
  """act(x W_gate) * (x W_in) W_out when gated (GLU, Shazeer 2020), else act(x W_in) W_out.

  Attributes:
    width: F.
    activation: a key of ACTIVATIONS.
    gated: multiply the inner layer by an activated gate.
    bias: linear maps have biases.
    dtype: of the computation.
  """

  width: int
  activation: str = 'gelu'
  gated: bool = True
  bias: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    activate = ACTIVATIONS[self.activation]
    inner_BxTxF = self._dense('in', self.width, 'embed', 'mlp')(x_BxTxD)
    if self.gated:
      inner_BxTxF *= activate(self._dense('gate', self.width, 'embed', 'mlp')(x_BxTxD))
    else:
      inner_BxTxF = activate(inner_BxTxF)
    return self._dense('out', x_BxTxD.shape[-1], 'mlp', 'embed')(inner_BxTxF)

  def _dense(self, name, features, from_axis, to_axis):
    return nn.Dense(
      features,
      use_bias=self.bias,
      dtype=self.dtype,
      kernel_init=nn.with_logical_partitioning(
        nn.initializers.lecun_normal(), (from_axis, to_axis)
      ),
      bias_init=nn.with_logical_partitioning(nn.initializers.zeros, (to_axis,)),
      name=name,
    )
