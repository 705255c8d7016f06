"""Causal depthwise convolution within documents (Primer, So et al. 2021).

  y_t = w_0 x_t + w_1 x_{t-1} + ... + w_{W-1} x_{t-W+1}

B batch, T segment length, N heads, H head width, W taps.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp


class CausalConvolution(nn.Module):
  """Depthwise convolution of each feature of each head, without bias.

  Inputs of earlier documents count as 0. Initially w_0 is 0.5 and the others are 0.5 / W.

  Attributes:
    taps: W.
    dtype: dtype of the output.
  """

  taps: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self, x_BxTxNxH: jax.Array, position_BxT: jax.Array, before_BxRxNxH: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, T, N, H].

    Args:
      x_BxTxNxH: inputs.
      position_BxT: position of each token in its document (see `documents.positions`).
      before_BxRxNxH: the R = W - 1 inputs before the segment. None means zeros.
    """
    W, T = self.taps, x_BxTxNxH.shape[1]

    def init(key, shape, dtype):
      return jnp.full(shape, 0.5 / W, dtype).at[0].set(0.5)

    names = (None, 'heads', 'kv')
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    shape = (W, *x_BxTxNxH.shape[-2:])
    w_WxNxH = self.param('taps', nn.with_logical_partitioning(init, names), shape, param_dtype)
    w_WxNxH = w_WxNxH.astype(self.dtype)
    if before_BxRxNxH is None:
      padded = jnp.pad(x_BxTxNxH, ((0, 0), (W - 1, 0), (0, 0), (0, 0)))
    else:
      padded = jnp.concatenate([before_BxRxNxH, x_BxTxNxH], axis=1)
    y_BxTxNxH = w_WxNxH[0] * x_BxTxNxH
    for i in range(1, W):
      in_document_BxTx1x1 = (position_BxT >= i)[..., None, None]
      shifted_BxTxNxH = padded[:, W - 1 - i : W - 1 - i + T]
      y_BxTxNxH += w_WxNxH[i] * jnp.where(in_document_BxTx1x1, shifted_BxTxNxH, 0)
    return y_BxTxNxH
