"""The gated look-up of Engram (Cheng et al. 2026), of DeepSeek-V4.1 and of Qwen's PLE.

For every branch g of the residual stream, with the looked-up vector e of a token:

  k = W_k e + b_k,  v = W_v e + b_v                     W_k of each branch, one W_v for all
  s = RMSNorm_k(k) . RMSNorm_q(h) / sqrt(D)
  alpha = sigmoid(sign(s) sqrt(max(|s|, 1e-6)))         equations 4 and 6 have sigmoid(s)
  u = alpha v
  y = u + silu(conv(RMSNorm_c(u)))                      causal, depthwise, dilated

B batch, T segment length, G branches, D model width, M width of e, R inputs before the convolution.
"""

from typing import NamedTuple

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import convolution, dense, normalization

MIN_SCORE = 1e-6  # smaller scores have no gradient through the root


class Convolution(NamedTuple):
  """Options of the convolution: number of taps, tokens between taps, epsilon of its norm."""

  taps: int = 4
  dilation: int = 3
  epsilon: float = 1e-5

  @property
  def rows(self) -> int:
    """R, number of earlier inputs."""
    return (self.taps - 1) * self.dilation


class Gate(nn.Module):
  """The gated vectors to add to the residual stream, [B, T, G, D].

  Attributes:
    convolution: None: no convolution, y = u.
    bias: whether the projections have biases.
    epsilon: of the norms of keys and queries. None: the machine epsilon.
    is_offset: whether the norms store scale - 1 as their parameter.
    kind: `learned`, or `half`: alpha is 0.5, a control.
    zero_score: alpha at a score of 0: `half`, or `positive` (alpha of the smallest positive score).
    dtype: dtype of the output; scores are in at least float32.
    is_neutral: whether W_v and therefore y are 0 at the start.
  """

  convolution: Convolution | None = Convolution()
  bias: bool = True
  epsilon: float | None = None
  is_offset: bool = False
  kind: str = 'learned'
  zero_score: str = 'half'
  dtype: jnp.dtype = jnp.float32
  is_neutral: bool = False

  @nn.compact
  def __call__(
    self,
    h_BxTxGxD: jax.Array,
    e_BxTxM: jax.Array,
    position_BxT: jax.Array,
    before_BxRxGxD: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns y [B, T, G, D] and the inputs of the convolution [B, T, G, D], None without one.

    The gates alpha [B, T, G] are sown as the intermediate `gate`.

    Args:
      h_BxTxGxD: the residual stream.
      e_BxTxM: the looked-up vectors.
      position_BxT: position of each token in its document, for the convolution.
      before_BxRxGxD: inputs of the convolution before the segment. None: zeros.
    """
    D = h_BxTxGxD.shape[-1]
    alpha_BxTxG = self._gate(h_BxTxGxD, e_BxTxM)
    self.sow('intermediates', 'gate', alpha_BxTxG)
    kernel_init = nn.initializers.zeros if self.is_neutral else dense.KERNEL_INIT
    v_BxTxD = self._dense('value', e_BxTxM, (D,), ('embed',), kernel_init)
    u_BxTxGxD = alpha_BxTxG[..., None].astype(self.dtype) * v_BxTxD[:, :, None]
    if self.convolution is None:
      return u_BxTxGxD, None
    c_BxTxGxD = self._norm('convolution_norm', self.convolution.epsilon)(u_BxTxGxD)
    convolve = convolution.CausalConvolution(
      taps=self.convolution.taps,
      dtype=self.dtype,
      dilation=self.convolution.dilation,
      taps_init=nn.initializers.zeros,  # the layer starts without the convolution
      names=(None, None),
      name='convolution',
    )
    convolved_BxTxGxD = convolve(c_BxTxGxD, position_BxT, before_BxRxGxD)
    return u_BxTxGxD + jax.nn.silu(convolved_BxTxGxD), c_BxTxGxD

  def _gate(self, h_BxTxGxD: jax.Array, e_BxTxM: jax.Array) -> jax.Array:
    """Returns alpha [B, T, G]."""
    G, D = h_BxTxGxD.shape[-2:]
    wide = jnp.promote_types(self.dtype, jnp.float32)
    if self.kind == 'half':
      return jnp.full(h_BxTxGxD.shape[:-1], 0.5, wide)
    k_BxTxGxD = self._dense('key', e_BxTxM, (G, D), ('branches', 'embed'))
    k_BxTxGxD = self._norm('key_norm', self.epsilon, wide)(k_BxTxGxD)
    q_BxTxGxD = self._norm('query_norm', self.epsilon, wide)(h_BxTxGxD)
    s_BxTxG = (k_BxTxGxD * q_BxTxGxD).sum(axis=-1) * D**-0.5
    root_BxTxG = jnp.sqrt(jnp.maximum(jnp.abs(s_BxTxG), MIN_SCORE))
    sign_BxTxG = jnp.sign(s_BxTxG)
    if self.zero_score == 'positive':
      sign_BxTxG = jnp.where(s_BxTxG >= 0, 1, sign_BxTxG)
    return jax.nn.sigmoid(sign_BxTxG * root_BxTxG)

  def _dense(
    self,
    name: str,
    e_BxTxM: jax.Array,
    features: tuple[int, ...],
    names: tuple[str | None, ...],
    kernel_init: nn.initializers.Initializer = dense.KERNEL_INIT,
  ) -> jax.Array:
    """Returns a projection of e to features with these axis names."""
    layer = dense.dense_general(
      inputs=e_BxTxM.shape[-1:],
      features=features,
      names=(None, *names),
      use_bias=self.bias,
      kernel_init=kernel_init,
      dtype=self.dtype,
      name=name,
    )
    return checkpoint_name(layer(e_BxTxM), 'memory')

  def _norm(
    self, name: str, epsilon: float | None, dtype: jnp.dtype | None = None
  ) -> normalization.RMSNorm:
    return normalization.RMSNorm(
      axes=2,
      epsilon=epsilon,
      is_offset=self.is_offset,
      dtype=self.dtype if dtype is None else dtype,
      name=name,
    )
