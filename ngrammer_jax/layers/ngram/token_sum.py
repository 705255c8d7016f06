"""N-gram vectors added to the token embedding: BLT, Over-Encoding and LongCat.

  y = x + f sum_i W_i e_i   ('sum'),   the same divided by 1 + I   ('mean'),

with the vector e_i of each of I orders and heads, and W_i the identity if nothing is projected. f
is 1 or learned; the modded-nanogpt speedrun learns f in every block.

B batch, T segment length, D model width, I = orders x heads, E width of a vector.
"""

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, normalization


class TokenSum(nn.Module):
  """Returns token embeddings with the vectors of their n-grams, [B, T, D].

  Attributes:
    is_mean: divides by the number of summands.
    is_projected: whether every e_i has its own projection. Otherwise E = D.
    factor: initial value of f. None: f is 1.
    amplification: `none`; `sqrt_width`: multiplies the result by the square root of D; `norm`:
      normalises the result.
    dtype: dtype of the output.
  """

  is_mean: bool = False
  is_projected: bool = False
  factor: float | None = None
  amplification: str = 'none'
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, e_BxTxIxE: jax.Array) -> jax.Array:
    """Returns [B, T, D].

    Raises:
      ValueError: E is not D, and there is no projection.
    """
    D = x_BxTxD.shape[-1]
    count, E = e_BxTxIxE.shape[-2:]
    if self.is_projected:
      # The sum of all projections is one product; each has E inputs.
      init = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal', 1, 2, 0)
      init = axis_names.with_axis_names(init, (None, None, 'embed'))
      param_dtype = jnp.promote_types(self.dtype, jnp.float32)
      w_IxExD = self.param('projection', init, (count, E, D), param_dtype)
      sum_BxTxD = jnp.einsum('btie,ied->btd', e_BxTxIxE, w_IxExD.astype(self.dtype))
      sum_BxTxD = checkpoint_name(sum_BxTxD, 'memory')
    elif E == D:
      sum_BxTxD = e_BxTxIxE.sum(axis=-2)
    else:
      raise ValueError(f'n-gram vectors of width {E} do not fit width {D}: add a projection')
    if self.factor is not None:
      init = axis_names.with_axis_names(nn.initializers.constant(self.factor), ())
      wide = jnp.promote_types(self.dtype, jnp.float32)
      sum_BxTxD = self.param('factor', init, (), wide).astype(self.dtype) * sum_BxTxD
    y_BxTxD = x_BxTxD + sum_BxTxD
    if self.is_mean:
      y_BxTxD = y_BxTxD / (1 + count)
    if self.amplification == 'sqrt_width':
      y_BxTxD = y_BxTxD * jnp.asarray(D**0.5, y_BxTxD.dtype)
    if self.amplification == 'norm':
      y_BxTxD = normalization.LayerNorm(dtype=self.dtype, name='norm')(y_BxTxD)
    return y_BxTxD
