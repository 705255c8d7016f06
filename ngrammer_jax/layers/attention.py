"""Causal multi-head attention over the tokens of one's own document.

B batch, T segment length, M memory, S = M + T keys, P rows of input, D model width, N heads,
H head width.
"""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import convolution, dropout, linear, position, relative

MASKED = -0.7 * jnp.finfo(jnp.float32).max  # finite: a row of nothing but it stays finite


KeysValues = dict[str, jax.Array]
Biases = tuple[jax.Array, jax.Array]
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
    relative: keys are scored by their distance too, `relative` or `shaw` (see `layers.relative`).
    clamp_length, max_length: of the distances.
    dropout: rate of the probabilities.
    dtype: of the projections; scores and softmax take at least float32.
  """

  heads: int
  bias: bool = False
  per_dim_scale: bool = False
  taps: int | None = None
  shared_query_key: bool = False
  relative: str | None = None
  clamp_length: int | None = None
  max_length: int | None = None
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    x_BxPxD: jax.Array,
    visible_BxTxS: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    memory: KeysValues | None = None,
    position_BxP: jax.Array | None = None,
    mix: Mix | None = None,
    distance_BxTxS: jax.Array | None = None,
    biases: Biases | None = None,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, KeysValues]:
    """Returns [B, T, D], and what a memory keeps of this segment, [B, T, N, H] each.

    That is `keys` and `values`, and `query`, `key` and `value` before their convolutions; and
    what `mix` adds to it.

    Args:
      x_BxPxD: inputs of queries, keys and values: the T of the segment; before them, where the
        memory is of inputs, its M and, with convolutions, as many more as these look back.
      visible_BxTxS: which keys a query attends to (see `documents.visible`): first the M of
        the memory, then the T of the segment.
      rotation: turns queries and keys by their position (see `position.rotation`), for the rows
        that become keys.
      memory: keys and values of earlier segments (see `layers.cache`).
      position_BxP: of each token in its document, for the convolutions; for those rows too.
      mix: changes what was attended to, [B, T, N, H], before it is projected back; it is given
        the scores [B, N, T, S] too.
      distance_BxTxS: from query to key, where the keys do not stand in order.
      biases: u and v of relative positions, shared by layers; None: this one has its own.
      dropout_key: to drop probabilities with. None: none are.
    """
    D, (T, S) = x_BxPxD.shape[-1], visible_BxTxS.shape[1:]
    M = 0 if memory is None else memory['keys'].shape[2]
    rows, segment = self._projected(x_BxPxD, T, S - M, memory, position_BxP)
    k_BxSxNxH, v_BxSxNxH, q_BxTxNxH = rows['key'], rows['value'], rows.get('query')
    if q_BxTxNxH is None:
      q_BxTxNxH = self._query_of_key(k_BxSxNxH[:, -T:])
    if rotation is not None:
      q_BxTxNxH = position.rotate(q_BxTxNxH, tuple(part[:, -T:] for part in rotation))
      k_BxSxNxH = position.rotate(k_BxSxNxH, rotation)
    scores_BxNxTxS = self._scores(q_BxTxNxH, k_BxSxNxH, memory, D, S, distance_BxTxS, biases)
    scores_BxNxTxS = jnp.where(visible_BxTxS[:, None], scores_BxNxTxS, MASKED)
    probs_BxNxTxS = jax.nn.softmax(scores_BxNxTxS, axis=-1)
    self.sow('intermediates', 'probs', probs_BxNxTxS)
    probs_BxNxTxS = dropout.drop(probs_BxNxTxS, self.dropout, dropout_key).astype(self.dtype)
    context_BxTxNxH = self._multiply('bnts,bsnh->btnh', probs_BxNxTxS[..., M:], v_BxSxNxH)
    if memory is not None:
      probs_BxNxTxM = probs_BxNxTxS[..., :M]
      context_BxTxNxH += self._multiply('bntm,bnmh->btnh', probs_BxNxTxM, memory['values'])
    context_BxTxNxH = context_BxTxNxH.astype(self.dtype)
    if mix is not None:
      context_BxTxNxH, kept = mix(context_BxTxNxH, scores_BxNxTxS)
      segment = segment | kept
    output = linear.Linear((D,), ('heads', 'kv', 'embed'), 2, self.bias, self.dtype, name='out')
    return output(context_BxTxNxH), segment | {'keys': k_BxSxNxH, 'values': v_BxSxNxH}

  def _multiply(self, indices, a, b):
    """A product of dtype, in at least float32."""
    wide = jnp.promote_types(self.dtype, jnp.float32)
    return jnp.einsum(indices, a, b, preferred_element_type=wide)

  def _scores(self, q_BxTxNxH, k_BxSxNxH, memory, D, S, distance_BxTxS, biases):
    """How well queries and keys match, and distances where they count; scaled, not masked."""
    scale_H = self._query_scale(D // self.heads).astype(self.dtype)
    scores_of_distance = 0
    if self.relative == 'shaw':
      of_distance = relative.ShawPosition(
        self.heads, self.max_length, self.clamp_length, self.dtype, name='relative'
      )
      scores_of_distance = of_distance(q_BxTxNxH, scale_H, S, distance_BxTxS)
      q_BxTxNxH += self._bias('content_bias', D // self.heads).astype(self.dtype)
    elif self.relative:
      names = ('content_bias', 'position_bias')
      own = lambda: [self._bias(name, D // self.heads) for name in names]
      u_NxH, v_NxH = own() if biases is None else biases
      of_distance = relative.RelativePosition(
        self.heads, self.clamp_length, self.dtype, name='relative'
      )
      biased_BxTxNxH = (q_BxTxNxH + v_NxH.astype(self.dtype)) * scale_H
      scores_of_distance = of_distance(biased_BxTxNxH, D, S, distance_BxTxS)
      q_BxTxNxH += u_NxH.astype(self.dtype)
    q_BxTxNxH = q_BxTxNxH * scale_H
    # Cache and segment stay apart: joining them would copy the cache.
    scores_BxNxTxS = self._multiply('btnh,bsnh->bnts', q_BxTxNxH, k_BxSxNxH)
    if memory is not None:
      scores_BxNxTxM = self._multiply('btnh,bnmh->bntm', q_BxTxNxH, memory['keys'])
      scores_BxNxTxS = jnp.concatenate([scores_BxNxTxM, scores_BxNxTxS], axis=-1)
    return scores_BxNxTxS + scores_of_distance

  def _projected(self, x_BxPxD, T, keys, memory, position_BxP):
    """Queries of the last T rows, keys and values of the last `keys`; what was convolved."""
    D = x_BxPxD.shape[-1]
    before = x_BxPxD.shape[1] - keys  # rows that only the convolutions look at
    rows, convolved = {}, {}
    for name in projections(self.shared_query_key):
      count = T if name == 'query' else keys
      project = linear.Linear(
        (self.heads, D // self.heads), ('embed', 'heads', 'kv'), 1, self.bias, self.dtype, name=name
      )
      rows[name] = project(x_BxPxD[:, -(before + count) :])
      if self.taps is not None:
        earlier = None if memory is None else memory[name]
        earlier = rows[name][:, :before] if before else earlier
        convolved[name] = rows[name][:, before:]
        convolve = convolution.CausalConvolution(self.taps, self.dtype, name=f'{name}_convolution')
        rows[name] = convolve(convolved[name], position_BxP[:, -count:], earlier)
    return rows, convolved

  def _bias(self, name, H):
    """u or v."""
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ('heads', 'kv'))
    return self.param(name, init, (self.heads, H), jnp.promote_types(self.dtype, jnp.float32))

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
