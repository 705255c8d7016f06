"""Causal multi-head attention over the tokens of one's own document.

B batch, T segment length, M memory, S = M + T keys, D model width, N heads, H head width.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import linear, position

MASKED = -0.7 * jnp.finfo(jnp.float32).max  # finite: a row of nothing but it stays finite


KeysValues = dict[str, jax.Array]


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
    memory: KeysValues | None = None,
  ) -> tuple[jax.Array, KeysValues]:
    """Returns [B, T, D], and the keys and values [B, T, N, H] of this segment.

    Args:
      x_BxTxD: inputs of queries, keys and values.
      visible_BxTxS: which keys a query attends to (see `documents.visible`): first the M of
        the memory, then the T of the segment.
      rotation: turns all S keys, and the queries, by position (see `position.rotation`).
      memory: `keys` and `values` [B, M, N, H] of earlier segments, before rotation.
    """
    D = x_BxTxD.shape[-1]
    H = D // self.heads
    q_BxTxNxH = self._project('query', H)(x_BxTxD)
    segment = {
      'keys': self._project('key', H)(x_BxTxD),
      'values': self._project('value', H)(x_BxTxD),
    }
    # Memory and segment stay apart: joined, the whole memory would be copied.
    parts = [segment] if memory is None else [memory, segment]
    ends = [part['keys'].shape[1] for part in parts[:-1]]
    keys = [part['keys'] for part in parts]
    if rotation is not None:
      *before, own = zip(*(jnp.split(turn, ends, axis=-3) for turn in rotation), strict=True)
      q_BxTxNxH = position.rotate(q_BxTxNxH, own)
      turns = [*before, own]
      keys = [position.rotate(k, turn) for k, turn in zip(keys, turns, strict=True)]
    q_BxTxNxH = q_BxTxNxH * self._query_scale(H).astype(self.dtype)
    at_least_float32 = jnp.promote_types(self.dtype, jnp.float32)
    scores = [
      jnp.einsum('btnh,bsnh->bnts', q_BxTxNxH, k, preferred_element_type=at_least_float32)
      for k in keys
    ]
    scores_BxNxTxS = jnp.concatenate(scores, axis=-1)
    scores_BxNxTxS = jnp.where(visible_BxTxS[:, None], scores_BxNxTxS, MASKED)
    probs_BxNxTxS = jax.nn.softmax(scores_BxNxTxS, axis=-1)
    self.sow('intermediates', 'probs', probs_BxNxTxS)
    weights = jnp.split(probs_BxNxTxS.astype(self.dtype), ends, axis=-1)
    context_BxTxNxH = sum(
      jnp.einsum('bnts,bsnh->btnh', w, part['values'])
      for w, part in zip(weights, parts, strict=True)
    )
    output = linear.Linear((D,), ('heads', 'kv', 'embed'), 2, self.bias, self.dtype, name='out')
    return output(context_BxTxNxH), segment

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
