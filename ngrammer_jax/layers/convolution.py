"""Causal depthwise convolution within documents (Primer, So et al. 2021; Engram).

  y_t = w_0 x_t + w_1 x_{t-d} + ... + w_{W-1} x_{t-(W-1)d}    with dilation d

B batch, T segment length, N heads, H head width, W taps, R = (W - 1) d inputs before a segment.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names


def first_tap_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Returns the taps of Primer before training: w_0 is 0.5, the others are 0.5 / W."""
  del key
  return jnp.full(shape, 0.5 / shape[0], dtype).at[0].set(0.5)


class CausalConvolution(nn.Module):
  """Depthwise convolution of each feature of each head, without bias.

  Inputs of earlier documents count as 0.

  Attributes:
    taps: W.
    dtype: dtype of the output.
    dilation: d, tokens from one tap to the next.
    taps_init: initializer of the taps.
    names: logical names of the axes of a tap, [N, H].
  """

  taps: int
  dtype: jnp.dtype = jnp.float32
  dilation: int = 1
  taps_init: nn.initializers.Initializer = first_tap_init
  names: tuple[str | None, str | None] = ('heads', 'kv')

  @nn.compact
  def __call__(
    self, x_BxTxNxH: jax.Array, position_BxT: jax.Array, before_BxRxNxH: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, T, N, H].

    Args:
      x_BxTxNxH: inputs.
      position_BxT: position of each token in its document (see `document_masks.positions`).
      before_BxRxNxH: the R inputs before the segment. None means zeros.
    """
    W = self.taps
    d = self.dilation
    T = x_BxTxNxH.shape[1]
    R = (W - 1) * d
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    init = axis_names.with_axis_names(self.taps_init, ('taps', *self.names))
    w_WxNxH = self.param('taps', init, (W, *x_BxTxNxH.shape[-2:]), param_dtype)
    w_WxNxH = w_WxNxH.astype(self.dtype)
    if before_BxRxNxH is None:
      padded = jnp.pad(x_BxTxNxH, ((0, 0), (R, 0), (0, 0), (0, 0)))
    else:
      padded = jnp.concatenate([before_BxRxNxH, x_BxTxNxH], axis=1)
    y_BxTxNxH = w_WxNxH[0] * x_BxTxNxH
    for i in range(1, W):
      in_document_BxTx1x1 = (position_BxT >= i * d)[..., None, None]
      shifted_BxTxNxH = padded[:, R - i * d : R - i * d + T]
      y_BxTxNxH += w_WxNxH[i] * jnp.where(in_document_BxTx1x1, shifted_BxTxNxH, 0)
    return y_BxTxNxH
