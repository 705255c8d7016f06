"""Per-layer embeddings of Gemma 3n: multiplicative token rows, with one residual stream (Gemma 4).

  u = sqrt(P) e
  u = (RMSNorm_r(W_m x_0 / sqrt(D)) + sqrt(P) e) / sqrt(2)      with the embedding x_0 of the token
  y = x + RMSNorm_y(W_p (act(W_g x) * u))

The rows e of all orders and heads stand side by side. Gemma has e of 1-grams, so that e and x_0 are
two embeddings of the token. In the official code all layers share the weight of RMSNorm_r; here
each layer has its own. Qwen's PLE is different: a gate of n-grams (see `gate`).

B batch, T segment length, D model width, P values of the rows of a token.
"""

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import activations, dense, normalization


class Product(nn.Module):
  """Returns the hidden states with the products, [B, T, D].

  Attributes:
    activation: act, a key of `activations.ACTIVATIONS`.
    has_embedding_part: whether u depends on x_0.
    epsilon: of the norms. None: the machine epsilon.
    is_offset: whether the norms store scale - 1 as their parameter.
    is_neutral: whether the scale of RMSNorm_y is 0 at the start, so that y = x.
    dtype: dtype of the output.
  """

  activation: str = 'gelu'
  has_embedding_part: bool = False
  epsilon: float | None = None
  is_offset: bool = False
  is_neutral: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self, x_BxTxD: jax.Array, e_BxTxP: jax.Array, embedding_BxTxD: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BxTxD: hidden states.
      e_BxTxP: rows, zeros for a token without any.
      embedding_BxTxD: x_0, required with `has_embedding_part`.
    """
    D, P = x_BxTxD.shape[-1], e_BxTxP.shape[-1]
    u_BxTxP = P**0.5 * e_BxTxP.astype(self.dtype)
    if self.has_embedding_part:
      r_BxTxP = self._project('embedding', embedding_BxTxD, P, ('embed', None)) * D**-0.5
      r_BxTxP = self._norm('embedding_norm')(r_BxTxP)
      u_BxTxP = (r_BxTxP + u_BxTxP) * 0.5**0.5
    h_BxTxP = self._project('gate', x_BxTxD, P, ('embed', None))
    h_BxTxP = activations.ACTIVATIONS[self.activation](h_BxTxP)
    y_BxTxD = self._project('out', h_BxTxP * u_BxTxP, D, (None, 'embed'))
    initial_scale = 1.0
    if self.is_neutral:
      initial_scale = 0.0
    return x_BxTxD + self._norm('norm', initial_scale)(y_BxTxD)

  def _project(
    self, name: str, x_BxTx: jax.Array, features: int, names: tuple[str | None, ...]
  ) -> jax.Array:
    y_BxTx = dense.project(x_BxTx, features, names, use_bias=False, dtype=self.dtype, name=name)
    return checkpoint_name(y_BxTx, 'memory')

  def _norm(self, name: str, initial: float = 1.0) -> normalization.RMSNorm:
    return normalization.RMSNorm(
      epsilon=self.epsilon,
      is_offset=self.is_offset,
      initial=initial,
      dtype=self.dtype,
      name=name,
    )
