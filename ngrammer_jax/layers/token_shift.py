"""Token shift: each token is mixed with its predecessors in the document.

  y_t = x_t + w_0 * x_t + w_1 * x_{t-1} + ... + w_{W-1} * x_{t-W+1}

with learned weights w for each feature, initially 0. It is the smallest memory. The Canon layers of
Allen-Zhu (2025, "Physics of Language Models 4.1") have W = 4.

B batch, T segment length, D model width, W tokens.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import convolution, document_masks
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.state import State


class TokenShift(nn.Module):
  """Mixes each token with its W - 1 predecessors.

  The state has the last W - 1 inputs as `rows` [B, W - 1, D], and the `position` of the next token
  in its document, int32 [B].

  Attributes:
    tokens: W.
    width: D.
    dtype: of the output and the rows; the weights are in at least float32.
  """

  tokens: int
  width: int
  dtype: jnp.dtype = jnp.float32

  def empty_state(self, batch: int, slots: int | None) -> State:
    """Returns the state before the first segment."""
    del slots
    return {
      'rows': jnp.zeros((batch, self.tokens - 1, self.width), self.dtype),
      'position': jnp.zeros((batch,), jnp.int32),
    }

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
    """Returns y [B, T, D], and the next state."""
    position_BxT = document_masks.positions(context.starts_BxT, state['position'])
    convolve = convolution.CausalConvolution(
      taps=self.tokens,
      dtype=self.dtype,
      taps_init=nn.initializers.zeros,
      names=(None, 'embed'),
      name='convolution',
    )
    x_BxTx1xD = x_BxTxD[:, :, None]
    mixed_BxTx1xD = convolve(x_BxTx1xD, position_BxT, state['rows'][:, :, None])
    valid_BxT = context.valid_BxT
    inputs_BxTxD = jax.lax.stop_gradient(x_BxTxD)
    position_Bx1 = cache.keep_last(state['position'][:, None], position_BxT + 1, valid_BxT)
    next_state = {
      'rows': cache.keep_last(state['rows'], inputs_BxTxD, valid_BxT),
      'position': position_Bx1[:, 0],
    }
    return x_BxTxD + mixed_BxTx1xD[:, :, 0], next_state
