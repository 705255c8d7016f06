"""Causal multi-head attention over the tokens of one's own document.

B batch, T segment length, M memory, S = M + T keys, P rows of input, D model width, N heads,
H head width, C persistent vectors.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import (
  convolution,
  dense,
  documents,
  dropout,
  flash,
  local,
  persistent,
  position,
  relative,
  span,
)

MASKED = -0.7 * jnp.finfo(jnp.float32).max  # finite: a row of nothing but it stays finite


KeysValues = dict[str, jax.Array]
Shared = tuple[jax.Array, ...]
Params = dict[str, Any]
# What persistent vectors share with the context: its softmax; nothing but the sum, by heads or
# by the whole width; or nothing, where each half of the heads has one of both.
PERSISTENT = ('all_attention', 'attention_split', 'single_head', 'head_split')
Mix = Callable[[jax.Array, jax.Array], tuple[jax.Array, KeysValues]]


def projections(shared_query_key: bool) -> tuple[str, ...]:
  """What is projected from the input, and convolved where there are convolutions."""
  return ('key', 'value') if shared_query_key else ('query', 'key', 'value')


def projection(inputs: tuple[int, ...], D: int, bias: bool, dtype, **module) -> nn.DenseGeneral:
  """What heads found, [B, T, N, H], back to the width."""
  names = ('heads', 'kv', 'embed')
  return dense.dense_general(inputs, (D,), names, use_bias=bias, dtype=dtype, **module)


class Attention(nn.Module):
  """softmax(q k^T / sqrt(H)) v, projected back to the width.

  Attributes:
    heads: N.
    bias: projections have biases.
    per_dim_scale: learn the query scale of each feature (praxis), shared by the heads:
      log2(e) / sqrt(H) * softplus(s), which is 1 / sqrt(H) at the initial s = 0.
    taps: of the causal convolutions on the projected q, k and v (Primer). None: none.
    shared_query_key: q is a linear map, head by head, of the convolved k (full Primer).
    relative: keys are scored by their distance too: `relative`, `shaw` or `table` (see
      `layers.relative`).
    clamp_length, max_length: of the distances.
    sees_itself: a token attends to itself. If not, the one before it is the nearest.
    span: makes the module that learns how far heads look (see `layers.span`). None: no limit.
    renormalize: what is left under the mask of the span adds up to 1 again.
    persistent_vectors: C, learned keys and values of each head (see `layers.persistent`).
    persistent_kind: one of PERSISTENT.
    dropout: rate of the probabilities.
    distance_dropout: rate of the encodings of distances, of `relative`.
    head_width: H. None: D / N.
    kernel: one of `flash.KERNELS`, where one can do it. None: that there is for the device.
    projected: back to the width. If not, [B, T, N, H] is returned.
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
  sees_itself: bool = True
  span: Callable[..., nn.Module] | None = None
  renormalize: bool = True
  persistent_vectors: int = 0
  persistent_kind: str = 'all_attention'
  dropout: float = 0.0
  distance_dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32
  head_width: int | None = None
  projected: bool = True
  kernel: str | None = None

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
    shared: Shared | None = None,
    valid_BxT: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
    distance_key: jax.Array | None = None,
    causal_BxT: jax.Array | None = None,
  ) -> tuple[jax.Array, KeysValues]:
    """Returns [B, T, D], and what a memory keeps of this segment, [B, T, N, H] each.

    That is `keys` and `values`, and `query`, `key` and `value` before their convolutions; and
    what `mix` adds to it. Where spans are learned, `span` says how far they go (`span.Spans`).

    Args:
      x_BxPxD: inputs of queries, keys and values: the T of the segment; before them, where the
        memory is of inputs, its M and, with convolutions, as many more as these look back.
      visible_BxTxS: which keys a query attends to (see `documents.visible`): first the M of
        the memory, then the T of the segment. With more rows than x, it is that of blocks
        (see `layers.local`).
      rotation: turns queries and keys by their position (see `position.rotation`), for the rows
        that become keys.
      memory: keys and values of earlier segments (see `layers.cache`).
      position_BxP: of each token in its document, for the convolutions; for those rows too.
      mix: changes what was attended to, [B, T, N, H], before it is projected back; it is given
        the scores [B, N, T, S] too, which are minus infinity beyond a span.
      distance_BxTxS: from query to key, where the keys do not stand in order.
      shared: parameters of positions that layers share: u and v of `relative`, None where this
        one has its own; the vectors of `table`.
      valid_BxT: 0 at padding.
      dropout_key: to drop probabilities with. None: none are.
      distance_key: to drop encodings of distances with.
      causal_BxT: document numbers, where visible is nothing but what is of the same number, up to
        the token itself: for a kernel. None: it is something else.
    """
    D, F = x_BxPxD.shape[-1], visible_BxTxS.shape[0] // x_BxPxD.shape[0]
    T, S = F * visible_BxTxS.shape[1], visible_BxTxS.shape[2]
    S += T - T // F
    M = 0 if memory is None else memory['keys'].shape[2]
    rows, segment = self._projected(x_BxPxD, T, S - M, memory, position_BxP)
    unturned_BxTxNxH = rows['query']
    if rotation is not None:
      rows['query'] = position.rotate(rows['query'], tuple(part[:, -T:] for part in rotation))
      rows['key'] = position.rotate(rows['key'], rotation)
    kept = segment | {'keys': rows['key'], 'values': rows['value']}
    drops = self.dropout > 0 and dropout_key is not None
    alone = causal_BxT is not None and memory is None and mix is None and not drops
    kernel = self._kernel(rows['query'].shape) if alone else 'xla'
    if kernel != 'xla':
      rows['query'] *= self._query_scale(rows['query'].shape[-1]).astype(self.dtype)
      context_BxTxNxH = flash.attend(kernel, rows['query'], rows['key'], rows['value'], causal_BxT)
    else:
      distances = distance_BxTxS, shared, distance_key
      given = x_BxPxD, unturned_BxTxNxH, visible_BxTxS, memory, mix, distances, valid_BxT
      context_BxTxNxH, more = self._by_scores(rows, F, *given, dropout_key)
      kept |= more
    if not self.projected:
      return context_BxTxNxH, kept
    project = projection(context_BxTxNxH.shape[2:], D, self.bias, self.dtype, name='out')
    return project(context_BxTxNxH), kept

  def _kernel(self, shape):
    """Which of `flash.KERNELS` finds what queries of a shape look for."""
    more = self.relative is not None or self.span is not None or self.persistent_vectors
    looked_at = self.is_mutable_collection('intermediates')  # at the probabilities
    if more or not self.sees_itself or looked_at or self.is_initializing():
      return 'xla'
    return flash.choose(self.kernel, shape, self.dtype)

  def _by_scores(
    self, rows, F, x_BxPxD, unturned_BxTxNxH, visible_BxTxS, memory, mix, distances, valid_BxT, key
  ):
    """What heads find, [B, T, N, H], and what is kept of it."""
    D, T, kept = x_BxPxD.shape[-1], unturned_BxTxNxH.shape[1], {}
    M = 0 if memory is None else memory['keys'].shape[2]
    q_BxTxNxH = local.of_queries(rows['query'][..., : self.context_heads, :], F)
    k_BxSxNxH, v_BxSxNxH = (local.of_keys(rows[name], F, T) for name in ('key', 'value'))
    scores_BxNxTxS = self._scores(q_BxTxNxH, k_BxSxNxH, memory, D, distances)
    scores_BxNxTxS = jnp.where(visible_BxTxS[:, None], scores_BxNxTxS, MASKED)
    soft_BxNxTxS = None
    if self.span is not None:
      given = x_BxPxD[:, -T:], visible_BxTxS.shape[1:], distances[0], valid_BxT, F
      soft_BxNxTxS, kept['span'] = self._soft_mask(*given)
    attended = functools.partial(self._attended, v_BxSxNxH, memory, M)
    given = scores_BxNxTxS, soft_BxNxTxS, visible_BxTxS
    unturned_BxTxNxH = local.of_queries(unturned_BxTxNxH, F)
    context_BxTxNxH = self._context(unturned_BxTxNxH, *given, attended, key)
    context_BxTxNxH = local.joined(context_BxTxNxH.astype(self.dtype), F)
    if mix is not None:
      if soft_BxNxTxS is not None:  # what the softmax, under the mask, is monotone in
        scores_BxNxTxS += jnp.log(soft_BxNxTxS)
      context_BxTxNxH, mixed = mix(context_BxTxNxH, jax.lax.stop_gradient(scores_BxNxTxS))
      kept |= mixed
    return context_BxTxNxH, kept

  def of_heads(self, params: Params, heads: tuple[int, ...]) -> Params:
    """The parameters of some of the heads, as they are for an `Attention` of these alone.

    What those of all heads add to the output is the sum of the parts: the first has its bias.
    """

    def part(path, leaf):
      names = [key.key for key in path]
      if names[0] == 'out':
        first = 0 in heads or names[1] == 'kernel'
        return leaf[jnp.asarray(heads)] if names[1] == 'kernel' else leaf * first
      if names[-1] == 'per_dim_scale':
        return leaf
      first_axis = ('content_bias', 'position_bias', 'query_kernel', 'span', 'span_bias', 'bias')
      axis = 0 if names[-1] in (*first_axis, 'persistent_keys', 'persistent_values') else 1
      return jnp.take(leaf, jnp.asarray(heads), axis=axis)

    return jax.tree_util.tree_map_with_path(part, params)

  def _soft_mask(self, x_BxTxD, shape, distance_BxTxS, valid_BxT, F):
    """How much keys count under the spans, and the spans."""
    if distance_BxTxS is None:
      distance_BxTxS = documents.distances(*shape)
    nearest_BxTxS = distance_BxTxS - (not self.sees_itself)
    valid_BxT = None if valid_BxT is None else local.of_queries(valid_BxT, F)
    learned = self.span(heads=self.context_heads, name='span')
    soft, spans = learned(local.of_queries(x_BxTxD, F), nearest_BxTxS, valid_BxT)
    longest_BxN = spans.longest_BxN.reshape(len(x_BxTxD), F, -1).max(axis=1)
    return soft, spans._replace(longest_BxN=longest_BxN)

  @property
  def context_heads(self) -> int:
    """Heads that look at the context."""
    return self.heads // 2 if self._persistent('head_split') else self.heads

  def _persistent(self, kind):
    return self.persistent_vectors > 0 and self.persistent_kind == kind

  def _context(self, q_BxTxNxH, scores_BxNxTxS, soft_BxNxTxS, visible_BxTxS, attended, key):
    """What heads find in the context and among the persistent vectors, [B, T, N, H]."""
    shape, C, kind = q_BxTxNxH.shape, self.persistent_vectors, self.persistent_kind
    # A token that sees nothing, not even itself, would have the mean of all that it must not see.
    sees_Bx1xTx1 = None if self.sees_itself else visible_BxTxS.any(axis=-1)[:, None, :, None]
    keys = key, None if key is None else jax.random.fold_in(key, 1)
    drop = lambda weights, part=0: dropout.drop(weights, self.dropout, keys[part])
    if not C or kind != 'all_attention':
      (weights,), scale = self._weights([(scores_BxNxTxS, soft_BxNxTxS)], sees_Bx1xTx1)
      of_context = _scaled(attended(drop(weights)), scale)
    if not C:
      return of_context
    if kind == 'head_split':
      q_BxTxNxH = q_BxTxNxH[:, :, self.context_heads :]
    elif kind == 'single_head':
      q_BxTxNxH = q_BxTxNxH.reshape(*shape[:2], 1, -1)
    vectors = persistent.PersistentVectors(C, self.dtype, name='persistent')
    scores_BxNxTxC, values_NxCxH = vectors(q_BxTxNxH)

    def of_vectors(weights):
      return self._multiply('bntc,nch->btnh', drop(weights, 1).astype(self.dtype), values_NxCxH)

    if kind == 'all_attention':
      both = [(scores_BxNxTxS, soft_BxNxTxS), (scores_BxNxTxC, None)]
      (weights, learned), scale = self._weights(both)
      return _scaled(attended(drop(weights)) + of_vectors(learned), scale)
    learned = of_vectors(jax.nn.softmax(scores_BxNxTxC, axis=-1))
    if kind == 'head_split':
      return jnp.concatenate([of_context, learned], axis=2)
    return of_context + learned.reshape(shape)

  def _weights(self, parts, sees_Bx1xTx1=None):
    """What values are weighted with, and [B, N, T, 1] that their sum is to be scaled with.

    The parts, scores and soft masks or None, share one softmax p. Under the masks m of a span,
    w = m p / (sum(m p) + epsilon). The division is left to the end, where there are H numbers of
    a query and not S.
    """
    if len(parts) == 1 and self.span is None:
      weights, scale = [jax.nn.softmax(parts[0][0], axis=-1)], sees_Bx1xTx1
    else:
      total = lambda of: sum(part.sum(axis=-1, keepdims=True) for part in of)
      highest = [scores.max(axis=-1, keepdims=True) for scores, _ in parts]
      highest_BxNxTx1 = jax.lax.stop_gradient(functools.reduce(jnp.maximum, highest))
      exps = [jnp.exp(scores - highest_BxNxTx1) for scores, _ in parts]
      softs = [soft for _, soft in parts]
      weights = [e if soft is None else e * soft for e, soft in zip(exps, softs, strict=True)]
      mass = total(exps)
      if self.span is not None and self.renormalize:
        mass = total(weights) + span.EPSILON * mass
      scale = 1 / mass if sees_Bx1xTx1 is None else sees_Bx1xTx1 / mass
    probs = weights[0] if len(weights) == 1 else jnp.concatenate(weights, axis=-1)
    self.sow('intermediates', 'probs', probs if scale is None else probs * scale)
    return weights, scale

  def _attended(self, v_BxSxNxH, memory, M, probs_BxNxTxS):
    """The values of the context, weighted."""
    probs_BxNxTxS = probs_BxNxTxS.astype(self.dtype)
    context_BxTxNxH = self._multiply('bnts,bsnh->btnh', probs_BxNxTxS[..., M:], v_BxSxNxH)
    if memory is not None:
      probs_BxNxTxM = probs_BxNxTxS[..., :M]
      context_BxTxNxH += self._multiply('bntm,bnmh->btnh', probs_BxNxTxM, memory['values'])
    return context_BxTxNxH

  def _multiply(self, indices, a, b):
    """A product of dtype, in at least float32."""
    wide = jnp.promote_types(self.dtype, jnp.float32)
    return jnp.einsum(indices, a, b, preferred_element_type=wide)

  def _scores(self, q_BxTxNxH, k_BxSxNxH, memory, D, distances):
    """How well queries and keys match, and distances where they count; scaled, not masked."""
    scale_H = self._query_scale(q_BxTxNxH.shape[-1]).astype(self.dtype)
    S = k_BxSxNxH.shape[1] + (0 if memory is None else memory['keys'].shape[2])
    q_BxTxNxH, scores_of_distance = self._of_distance(q_BxTxNxH, scale_H, D, S, *distances)
    # Cache and segment stay apart: joining them would copy the cache.
    scores_BxNxTxS = self._multiply('btnh,bsnh->bnts', q_BxTxNxH, k_BxSxNxH)
    if memory is not None:
      scores_BxNxTxM = self._multiply('btnh,bnmh->bntm', q_BxTxNxH, memory['keys'])
      scores_BxNxTxS = jnp.concatenate([scores_BxNxTxM, scores_BxNxTxS], axis=-1)
    return scores_BxNxTxS + scores_of_distance

  def _of_distance(self, q_BxTxNxH, scale_H, D, S, distance_BxTxS, shared, distance_key):
    """The scaled queries of the keys, and the scores of the distances."""
    N, H = q_BxTxNxH.shape[-2:]
    if self.relative == 'table':
      q_BxTxNxH = q_BxTxNxH * scale_H
      nearest = int(not self.sees_itself)
      return q_BxTxNxH, relative.of_table(q_BxTxNxH, shared[0], distance_BxTxS, S, nearest)
    if self.relative == 'shaw':
      of_distance = relative.ShawPosition(
        N, self.max_length, self.clamp_length, self.dtype, name='relative'
      )
      scores = of_distance(q_BxTxNxH, scale_H, S, distance_BxTxS)
      biased_BxTxNxH = q_BxTxNxH + self._bias('content_bias', N, H).astype(self.dtype)
      return biased_BxTxNxH * scale_H, scores
    if self.relative == 'relative':
      names = ('content_bias', 'position_bias')
      own = lambda: [self._bias(name, N, H) for name in names]
      u_NxH, v_NxH = own() if shared is None else shared
      alone = not self._persistent('all_attention')
      of_distance = relative.RelativePosition(
        N, self.clamp_length, self.dtype, alone, self.distance_dropout, name='relative'
      )
      biased_BxTxNxH = (q_BxTxNxH + v_NxH.astype(self.dtype)) * scale_H
      scores = of_distance(biased_BxTxNxH, D, S, distance_BxTxS, distance_key)
      return (q_BxTxNxH + u_NxH.astype(self.dtype)) * scale_H, scores
    return q_BxTxNxH * scale_H, 0

  def _projected(self, x_BxPxD, T, keys, memory, position_BxP):
    """Queries of the last T rows, keys and values of the last `keys`; what was convolved."""
    D = x_BxPxD.shape[-1]
    before = x_BxPxD.shape[1] - keys  # rows that only the convolutions look at
    rows, convolved = {}, {}
    for name in projections(self.shared_query_key):
      count = T if name == 'query' else keys
      shape = (
        self.heads if name == 'query' else self.context_heads,
        self.head_width or D // self.heads,
      )
      how = {'use_bias': self.bias, 'dtype': self.dtype, 'name': name}
      project = dense.dense_general((D,), shape, ('embed', 'heads', 'kv'), **how)
      rows[name] = project(x_BxPxD[:, -(before + count) :])
      if self.taps is not None:
        earlier = None if memory is None else memory[name]
        earlier = rows[name][:, :before] if before else earlier
        convolved[name] = rows[name][:, before:]
        convolve = convolution.CausalConvolution(self.taps, self.dtype, name=f'{name}_convolution')
        rows[name] = convolve(convolved[name], position_BxP[:, -count:], earlier)
    if self.shared_query_key:
      rows['query'] = self._query_of_key(rows['key'][:, -T:])
    return rows, convolved

  def _bias(self, name, N, H):
    """u or v."""
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ('heads', 'kv'))
    return self.param(name, init, (N, H), jnp.promote_types(self.dtype, jnp.float32))

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


def _scaled(context_BxTxNxH, scale_BxNxTx1):
  """What was attended to, scaled by query and head."""
  if scale_BxNxTx1 is None:
    return context_BxTxNxH
  return context_BxTxNxH * jnp.swapaxes(scale_BxNxTx1, 1, 2)
