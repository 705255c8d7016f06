"""Causal multi-head attention over the tokens of one's own document.

B batch, T segment length, S keys, D model width, N heads, H head width.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import linear, position

MASKED = -0.7 * jnp.finfo(jnp.float32).max  # finite: a row of nothing but it stays finite


class Attention(nn.Module):
  """softmax(q k^T / sqrt(H)) v, projected back to the width.

  Attributes:
    heads: N.
    bias: projections have biases.
    per_dim_scale: learn the query scale of each feature (praxis), shared by the heads:
      log2(e) / sqrt(H) * softplus(s), which is 1 / sqrt(H) at the initial s = 0.
    dtype: of the projections; scores and softmax take at least float32.
  """

  heads: int
  bias: bool = False
  per_dim_scale: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    visible_BxTxS: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None = None,
  ) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BxTxD: inputs of queries, keys and values.
      visible_BxTxS: which keys a query attends to (see `documents.visible`).
      rotation: turns queries and keys by their position (see `position.rotation`).
    """
    D = x_BxTxD.shape[-1]
    H = D // self.heads
    q_BxTxNxH = self._project('query', H)(x_BxTxD)
    k_BxSxNxH = self._project('key', H)(x_BxTxD)
    v_BxSxNxH = self._project('value', H)(x_BxTxD)
    if rotation is not None:
      q_BxTxNxH = position.rotate(q_BxTxNxH, rotation)
      k_BxSxNxH = position.rotate(k_BxSxNxH, rotation)
    q_BxTxNxH = q_BxTxNxH * self._query_scale(H).astype(self.dtype)
    at_least_float32 = jnp.promote_types(self.dtype, jnp.float32)
    scores_BxNxTxS = jnp.einsum(
      'btnh,bsnh->bnts', q_BxTxNxH, k_BxSxNxH, preferred_element_type=at_least_float32
    )
    scores_BxNxTxS = jnp.where(visible_BxTxS[:, None], scores_BxNxTxS, MASKED)
    probs_BxNxTxS = jax.nn.softmax(scores_BxNxTxS, axis=-1)
    self.sow('intermediates', 'probs', probs_BxNxTxS)
    context_BxTxNxH = jnp.einsum('bnts,bsnh->btnh', probs_BxNxTxS.astype(self.dtype), v_BxSxNxH)
    output = linear.Linear((D,), ('heads', 'kv', 'embed'), 2, self.bias, self.dtype, name='out')
    return output(context_BxTxNxH)

  def _project(self, name, H):
    return linear.Linear(
      (self.heads, H), ('embed', 'heads', 'kv'), bias=self.bias, dtype=self.dtype, name=name
    )

  def _query_scale(self, H):
    if not self.per_dim_scale:
      return jnp.asarray(H**-0.5)
    init = nn.with_logical_partitioning(nn.initializers.zeros, ('kv',))
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    scale_H = self.param('per_dim_scale', init, (H,), param_dtype)
    log2_e = 1.442695041  # to the digits of praxis
    return log2_e * H**-0.5 * jax.nn.softplus(scale_H)
