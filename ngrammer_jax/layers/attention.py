"""Causal multi-head attention over the tokens of one's own document.

B batch, T segment length, M memory, S = M + T keys, D model width, N heads, H head width.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import convolution, linear, position

MASKED = -0.7 * jnp.finfo(jnp.float32).max  # finite: a row of nothing but it stays finite


KeysValues = dict[str, jax.Array]
Mix = Callable[[jax.Array, jax.Array], tuple[jax.Array, KeysValues]]


def projections(shared_query_key: bool) -> tuple[str, ...]:
  """What is projected from the input, and convolved where there are convolutions."""
  return ('key', 'value') if shared_query_key else ('query', 'key', 'value')


class Attention(nn.Module):
  """softmax(q k^T / sqrt(H)) v, projected back to the width.

  Attributes:
    heads: N.
    bias: projections have biases.
    per_dim_scale: learn the query scale of each feature (praxis), shared by the heads:
      log2(e) / sqrt(H) * softplus(s), which is 1 / sqrt(H) at the initial s = 0.
    taps: of the causal convolutions on the projected q, k and v (Primer). None: none.
    shared_query_key: q is a linear map, head by head, of the convolved k (full Primer).
    dtype: of the projections; scores and softmax take at least float32.
  """

  heads: int
  bias: bool = False
  per_dim_scale: bool = False
  taps: int | None = None
  shared_query_key: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    visible_BxTxS: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    memory: KeysValues | None = None,
    position_BxT: jax.Array | None = None,
    mix: Mix | None = None,
  ) -> tuple[jax.Array, KeysValues]:
    """Returns [B, T, D], and what a memory keeps of this segment, [B, T, N, H] each.

    That is `keys` and `values`, and `query`, `key` and `value` before their convolutions; and
    what `mix` adds to it.

    Args:
      x_BxTxD: inputs of queries, keys and values.
      visible_BxTxS: which keys a query attends to (see `documents.visible`): first the M of
        the memory, then the T of the segment.
      rotation: turns queries and keys by their position (see `position.rotation`).
      memory: of earlier segments (see `layers.cache`).
      position_BxT: of each token in its document, for the convolutions.
      mix: changes what was attended to, [B, T, N, H], before it is projected back; it is given
        the scores [B, N, T, S] too.
    """
    D = x_BxTxD.shape[-1]
    H = D // self.heads
    names = projections(self.shared_query_key)
    projected = {name: self._project(name, H)(x_BxTxD) for name in names}
    mixed, segment = projected, {}
    if self.taps is not None:
      segment = projected
      mixed = {
        name: convolution.CausalConvolution(self.taps, self.dtype, name=f'{name}_convolution')(
          rows, position_BxT, None if memory is None else memory[name]
        )
        for name, rows in projected.items()
      }
    k_BxTxNxH, v_BxTxNxH = mixed['key'], mixed['value']
    q_BxTxNxH = self._query_of_key(k_BxTxNxH) if self.shared_query_key else mixed['query']
    if rotation is not None:
      q_BxTxNxH = position.rotate(q_BxTxNxH, rotation)
      k_BxTxNxH = position.rotate(k_BxTxNxH, rotation)
    q_BxTxNxH = q_BxTxNxH * self._query_scale(H).astype(self.dtype)
    score = functools.partial(
      jnp.einsum, preferred_element_type=jnp.promote_types(self.dtype, jnp.float32)
    )
    # Memory and segment stay apart: joining them would copy the memory.
    scores_BxNxTxS = score('btnh,bsnh->bnts', q_BxTxNxH, k_BxTxNxH)
    if memory is not None:
      scores_BxNxTxM = score('btnh,bnmh->bntm', q_BxTxNxH, memory['keys'])
      scores_BxNxTxS = jnp.concatenate([scores_BxNxTxM, scores_BxNxTxS], axis=-1)
    scores_BxNxTxS = jnp.where(visible_BxTxS[:, None], scores_BxNxTxS, MASKED)
    probs_BxNxTxS = jax.nn.softmax(scores_BxNxTxS, axis=-1)
    self.sow('intermediates', 'probs', probs_BxNxTxS)
    probs_BxNxTxS = probs_BxNxTxS.astype(self.dtype)
    M = 0 if memory is None else memory['keys'].shape[2]
    context_BxTxNxH = jnp.einsum('bnts,bsnh->btnh', probs_BxNxTxS[..., M:], v_BxTxNxH)
    if memory is not None:
      probs_BxNxTxM = probs_BxNxTxS[..., :M]
      context_BxTxNxH += jnp.einsum('bntm,bnmh->btnh', probs_BxNxTxM, memory['values'])
    if mix is not None:
      context_BxTxNxH, kept = mix(context_BxTxNxH, scores_BxNxTxS)
      segment = segment | kept
    output = linear.Linear((D,), ('heads', 'kv', 'embed'), 2, self.bias, self.dtype, name='out')
    return output(context_BxTxNxH), segment | {'keys': k_BxTxNxH, 'values': v_BxTxNxH}

  def _project(self, name, H):
    return linear.Linear(
      (self.heads, H), ('embed', 'heads', 'kv'), bias=self.bias, dtype=self.dtype, name=name
    )

  def _query_of_key(self, k_BxTxNxH):
    N, H = k_BxTxNxH.shape[-2:]
    names = ('heads', 'kv', None)
    init = nn.with_logical_partitioning(nn.initializers.normal(H**-0.5), names)
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    kernel_NxHxH = self.param('query_kernel', init, (N, H, H), param_dtype).astype(self.dtype)
    return jnp.einsum('btnh,nhg->btng', k_BxTxNxH, kernel_NxHxH)

  def _query_scale(self, H):
    if not self.per_dim_scale:
      return jnp.asarray(H**-0.5)
    init = nn.with_logical_partitioning(nn.initializers.zeros, ('kv',))
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    scale_H = self.param('per_dim_scale', init, (H,), param_dtype)
    log2_e = 1.442695041  # to the digits of praxis
    return log2_e * H**-0.5 * jax.nn.softplus(scale_H)
