"""Causal multi-head attention over the tokens of a document, with a memory of earlier segments.

  softmax((q k^T + distance scores) scale) v, projected back to the width

The scale is 1 / sqrt(H). Several query heads may share a head of keys and values.

The logits s of the softmax may be capped to c tanh(s / c), before any mask (praxis).
The softmax may include persistent vectors, and learned spans may mask it. `config.kernels` selects
the kernel that computes it, and says what each can compute.

B batch, T segment length, M memory, S = M + T keys, P inputs of keys, D model width, N query heads,
C key heads, H head width.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.config import kernels
from ngrammer_jax.layers import axis_names, dense, dropout, mesh_axes, softmax
from ngrammer_jax.layers.attention import blocks, full, fused, local, persistent, relative, span
from ngrammer_jax.layers.attention.cache import KeyValues
from ngrammer_jax.layers.attention.persistent import Persistent
from ngrammer_jax.layers.attention.projection import (
  HeadProjection,
  Projections,
  rotate_last,
  with_params,
)
from ngrammer_jax.layers.context import Context

# Maps the attended values [B, T, N, H], and the pairs [B, N, T] if requested, to new values.
PostAttention = Callable[[jax.Array, jax.Array | None], jax.Array]


class LayerInputs(NamedTuple):
  """A memory of layer inputs; their keys and values are projected in every segment.

  rows_BxRxD: the M inputs before the segment, and `Projections.lookback` more before these.
  norm: module that normalises them, as it did the inputs of the segment. None: no norm.
  """

  rows_BxRxD: jax.Array
  norm: nn.Module | None = None


class Projected(NamedTuple):
  """Keys, values and spans of a segment, for the memory.

  Attributes:
    keys_BxTxCxH, values_BxTxCxH: after convolution, norm and rotation.
    convolved: `query`, `key` and `value` before their convolutions, [B, T, N, H]; else empty.
    spans: learned spans of the heads. None: no spans are learned.
  """

  keys_BxTxCxH: jax.Array
  values_BxTxCxH: jax.Array
  convolved: dict[str, jax.Array]
  spans: span.Spans | None


class Attention(nn.Module):
  """Attention of the tokens of a segment to the memory, to the segment and to learned vectors.

  Attributes:
    heads: N.
    projections: options of the projections.
    position: makes the module that encodes distances (see `relative`). None: scores do not depend
      on distances.
    span: makes the module of the learned spans (see `layers.attention.span`). None: no spans.
    persistent: learned keys and values of each head. None: no persistent vectors.
    dropout: rate of the probabilities.
    kernel: a name of `config.kernels`. None: selected for the device.
    dtype: dtype of the projections; scores and softmax take at least float32.
    logit_cap: c, also for the logits of persistent vectors. None: logits are not capped.
    key_heads: C. None: N.
    head_width: H. None: D / N.
    scale: multiplies the scores. None: 1 / sqrt(H).
  """

  heads: int
  projections: Projections = Projections()
  position: Callable[..., nn.Module] | None = None
  span: Callable[..., nn.Module] | None = None
  persistent: Persistent | None = None
  dropout: float = 0.0
  kernel: str | None = None
  dtype: jnp.dtype = jnp.float32
  logit_cap: float | None = None
  key_heads: int | None = None
  head_width: int | None = None
  scale: float | None = None

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context,
    memory: LayerInputs | KeyValues | None = None,
    post_attention_fn: PostAttention | None = None,
    return_pairs: bool = False,
    dropout_key: jax.Array | None = None,
  ) -> tuple[jax.Array, Projected]:
    """Returns [B, T, D], and the projections of this segment for a memory.

    Args:
      x_BxTxD: inputs.
      context: context of the segment.
      memory: inputs of earlier tokens, or their keys and values (see `layers.attention.cache`).
      post_attention_fn: changes the attended values before the output projection.
      return_pairs: whether to pass it the earlier key that each query attends to most.
      dropout_key: key of the dropout. None: no dropout.
    """
    if context.keys.visible_BxTxS is None and context.keys.key_documents_BxS is None:
      raise ValueError('attention needs the keys of the segment: pass a context of `context.make`')
    D, drop = x_BxTxD.shape[-1], dropout.Dropout(self.dropout, dropout_key)
    rows, convolved = self._project(x_BxTxD, context, memory)
    query_BxTxNxH, heads = rows['query'], self._make_heads(rows, context)
    span_mask, spans = self._span_mask(x_BxTxD, context)
    source = None
    if isinstance(memory, KeyValues):
      source = memory.with_rotated_sinks(context.positions.sink_rotation)
    needs = self._needs(context, memory, span_mask, return_pairs, drop)
    if context.keys.in_blocks:
      # Of intermediates, blocks record no probabilities.
      if lacking := needs - kernels.KERNELS['blocks'] - {'probabilities'}:
        raise ValueError(f'attention in blocks does not support {kernels.NEEDS[min(lacking)]}')
      attend, source = blocks.attend, self._memory_source(source or memory, context)
    else:
      workload = fused.workload(query_BxTxNxH, key_heads=heads.key_BxSxCxH.shape[2])
      attend = ATTEND[kernels.select(self.kernel, needs, workload)]
      attend = full.attend if 'probabilities' in needs else attend
    context_part = attend(heads, span_mask, context.keys, source, return_pairs, drop)
    y_BxTxNxH = self._with_persistent(context_part, query_BxTxNxH, span_mask, drop)
    y_BxTxNxH = y_BxTxNxH.astype(self.dtype)
    if post_attention_fn is not None:
      y_BxTxNxH = post_attention_fn(y_BxTxNxH, context_part.pair_BxNxT)
    names = ('heads', 'kv', 'embed')
    p = self.projections
    options = {'use_bias': p.bias if p.output_bias is None else p.output_bias, 'dtype': self.dtype}
    project = dense.dense_general(y_BxTxNxH.shape[2:], (D,), names, **options, name='out')
    y_BxTxD = checkpoint_name(project(y_BxTxNxH), 'attention_output')
    return y_BxTxD, Projected(heads.key_BxSxCxH, heads.value_BxSxCxH, convolved, spans)

  @property
  def context_heads(self) -> int:
    """Number of heads that attend to the context."""
    return self.heads // 2 if self._has_persistent('head_split') else self.heads

  @property
  def context_key_heads(self) -> int:
    """Number of heads of keys and values of the context."""
    return self.key_heads or self.context_heads

  def _has_persistent(self, kind):
    vectors = self.persistent
    return vectors is not None and vectors.vectors > 0 and vectors.kind == kind

  def _needs(self, context, memory, span_mask, return_pairs, drop):
    """Returns what attention to the context needs, see `config.kernels.NEEDS`."""
    needs = {
      'mask': not context.keys.is_plain_causal,
      'grouped': self.context_key_heads != self.context_heads,
      'joint_norm': self.projections.norm == 'full' and isinstance(memory, LayerInputs),
      'distances': self.position is not None,
      'spans': self.span is not None,
      'all_keys': span_mask is not None and span_mask.counts_all_keys,
      'persistent': self.persistent is not None and self.persistent.vectors > 0,
      'cap': self.logit_cap is not None,
      'dropout': drop.is_active,
      'pairs': return_pairs,
      'cache': isinstance(memory, KeyValues),
      'prefix': context.keys.has_prefix,
      # Only the full score matrix has all of them.
      'probabilities': self.is_mutable_collection('intermediates') or self.is_initializing(),
    }
    return frozenset(name for name, is_needed in needs.items() if is_needed)

  def _span_mask(self, x_BxTxD, context):
    """Returns the mask of the learned spans and the spans, None without them."""
    if self.span is None:
      return None, None
    module = self.span(heads=self.context_heads, name='span')
    z_BxTxN, spans = module.spans(x_BxTxD, context.valid_BxT)
    mask = full.SpanMask(z_BxTxN, module.ramp, module.renormalize, module.epsilon_keys)
    return mask, spans

  def _project(self, x_BxTxD, context, memory):
    """Returns queries, keys and values by name, and the inputs of their convolutions.

    Keys and values include those of a memory of inputs, unless blocks project these.
    """
    lookback, keys = self.projections.lookback, x_BxTxD.shape[1]
    x_BxPxD, (T, D) = x_BxTxD, x_BxTxD.shape[1:]
    if isinstance(memory, LayerInputs):
      rows_BxRxD, norm = memory
      if context.keys.in_blocks:  # the blocks project the other rows
        rows_BxRxD = rows_BxRxD[:, rows_BxRxD.shape[1] - lookback :]
      keys += rows_BxRxD.shape[1] - lookback
      x_BxPxD = jnp.concatenate([rows_BxRxD if norm is None else norm(rows_BxRxD), x_BxTxD], axis=1)
    before = x_BxPxD.shape[1] - keys  # inputs that only the convolutions read
    project = HeadProjection(self.projections, self.dtype)
    rows, convolved = {}, {}
    for name in self.projections.names:
      count, heads = (T, self.heads) if name == 'query' else (keys, self.context_key_heads)
      inputs = mesh_axes.shard_rows(_last_rows(x_BxPxD, before + count))
      position_BxP = context.positions.position_BxP
      position_BxP = None if position_BxP is None else _last_rows(position_BxP, count)
      earlier = memory.rows.get(name) if isinstance(memory, KeyValues) else None
      features = heads, self.head_width or D // self.heads
      rows[name], inputs = project(name, inputs, features, position_BxP, before, earlier)
      if inputs is not None:
        convolved[name] = inputs
    if self.projections.shared_query_key:
      rows['query'] = self._query_from_key(_last_rows(rows['key'], T))
    return rows, convolved

  def _query_from_key(self, k_BxTxNxH):
    N, H = k_BxTxNxH.shape[-2:]
    init = axis_names.with_axis_names(nn.initializers.normal(H**-0.5), ('heads', 'kv', None))
    kernel_NxHxH = self.param('query_kernel', init, (N, H, H), self._param_dtype())
    y_BxTxNxH = jnp.einsum('btnh,nhg->btng', k_BxTxNxH, kernel_NxHxH.astype(self.dtype))
    return checkpoint_name(y_BxTxNxH, 'projected')

  def _make_heads(self, rows, context):
    """Rotates queries and keys, scales queries and encodes distances."""
    positions = context.positions
    query_BxTxNxH = rotate_last(rows['query'][..., : self.context_heads, :], positions.rotation)
    key_BxSxCxH = rotate_last(rows['key'], positions.rotation)
    N, H = query_BxTxNxH.shape[-2:]
    scale_H, distance = self._query_scale(H).astype(self.dtype), None
    if self.position is None:
      query_BxTxNxH = query_BxTxNxH * scale_H
    else:
      encode = self.position(dtype=self.dtype, name='relative')
      u_NxH, v_NxH = self._position_biases(encode.biases, positions.params, (N, H))
      distance_query_BxTxNxH = (query_BxTxNxH + v_NxH) * scale_H
      distance = relative.DistanceTerm(
        distance_query_BxTxNxH, *encode(context, N, H, self.logit_cap is not None)
      )
      query_BxTxNxH = (query_BxTxNxH + u_NxH) * scale_H
    rows = checkpoint_name((query_BxTxNxH, key_BxSxCxH, rows['value']), 'heads')
    return full.Heads(*rows, distance, self.logit_cap)

  def _position_biases(self, names, shared, shape):
    """Returns u and v of `relative`, 0 for those without a name; layers may share them."""
    if names and shared is not None:
      biases = shared
    else:
      init = axis_names.with_axis_names(nn.initializers.normal(0.02), ('heads', 'kv'))
      biases = [self.param(name, init, shape, self._param_dtype()) for name in names]
    return (*(bias.astype(self.dtype) for bias in biases), 0, 0)[:2]

  def _query_scale(self, H):
    if not self.projections.per_dim_scale:
      return jnp.asarray(H**-0.5 if self.scale is None else self.scale)
    init = axis_names.with_axis_names(nn.initializers.zeros, ('kv',))
    scale_H = self.param('per_dim_scale', init, (H,), self._param_dtype())
    log2_e = 1.442695041  # with the digits of praxis
    return log2_e * H**-0.5 * jax.nn.softplus(scale_H)

  def _param_dtype(self):
    return jnp.promote_types(self.dtype, jnp.float32)

  def _with_persistent(self, context_part, query_BxTxNxH, span_mask, drop):
    """Combines attention to the context and to the persistent vectors, [B, T, N, H]."""
    if self.persistent is None or not self.persistent.vectors:
      self._sow_probs(context_part.weights_BxNxTxS)
      return context_part.values_BxTxNxH
    kind, shape = self.persistent.kind, query_BxTxNxH.shape
    if kind == 'head_split':
      query_BxTxNxH = query_BxTxNxH[:, :, self.context_heads :]
    elif kind == 'single_head':
      query_BxTxNxH = query_BxTxNxH.reshape(*shape[:2], 1, -1)
    options = self.persistent.vectors, self.dtype, self.persistent.has_zero_gate
    vectors = persistent.PersistentVectors(*options, name='persistent')
    scores_BxNxTxP, values_NxPxH = vectors(query_BxTxNxH)
    scores_BxNxTxP = softmax.cap_logits(scores_BxNxTxP, self.logit_cap)
    persistent_part = persistent.attend(scores_BxNxTxP, values_NxPxH, drop.fold_in(1))
    if kind == 'all_attention':
      epsilon = span.EPSILON if span_mask is not None and span_mask.renormalize else 0.0
      joint = full.joint_softmax(context_part, persistent_part, epsilon)
      self._sow_probs(joint.weights_BxNxTxS)
      return joint.values_BxTxNxH
    self._sow_probs(context_part.weights_BxNxTxS)
    values = context_part.values_BxTxNxH, persistent_part.values_BxTxNxH
    if kind == 'head_split':
      return jnp.concatenate(values, axis=2)
    return values[0] + values[1].reshape(shape)

  def _sow_probs(self, probs_BxNxTxS):
    if probs_BxNxTxS is not None:
      self.sow('intermediates', 'probs', probs_BxNxTxS)

  def _memory_source(self, memory, context):
    """Returns the source of the memory's keys and values for blocks."""
    if memory is None:
      return blocks.MemorySource()
    if isinstance(memory, KeyValues):
      return blocks.cache_source(memory, context.keys.order_BxM)
    M = memory.rows_BxRxD.shape[1] - self.projections.lookback
    position_BxP, rotation = context.positions.position_BxP, context.positions.rotation
    rotation = rotation and rotation.between(0, M)
    rows = memory.rows_BxRxD, position_BxP[:, :M], rotation
    names = [n for name in ('key', 'value') for n in (name, f'{name}_convolution')]
    params = nn.unbox(self.variables['params'])
    by_head = lambda leaf: jnp.moveaxis(leaf, -2, 0)  # heads are the second axis from the end
    weights = {name: jax.tree.map(by_head, params[name]) for name in names if name in params}
    norm, key_heads = memory.norm, self.context_key_heads
    repeat = lambda leaf: jnp.broadcast_to(leaf, (key_heads, *leaf.shape))
    if 'key_norm' in params:
      weights['key_norm'] = jax.tree.map(repeat, params['key_norm'])
    if norm is not None:
      weights['norm'] = jax.tree.map(repeat, nn.unbox(norm.variables['params']))
      norm = norm.clone(parent=None, name=None)
    lookback, H = self.projections.lookback, weights['key']['kernel'].shape[-1]

    def project(weights, rows, cache, head):
      del cache, head
      rows_BxRxD, position_BxK, rotation = rows
      one_head = {
        name: jax.tree.map(lambda leaf: jnp.expand_dims(leaf, -2), weights[name])
        for name in names
        if name in weights
      }
      if 'key_norm' in weights:
        one_head['key_norm'] = weights['key_norm']
      project_head = HeadProjection(self.projections, self.dtype, with_params(one_head))
      with nn.logical_axis_rules(()):  # each device projects its own rows and heads
        if norm is not None:
          rows_BxRxD = norm.apply({'params': weights['norm']}, rows_BxRxD)
        key_BxKx1xH, value_BxKx1xH = (
          project_head(name, rows_BxRxD, (1, H), position_BxK, lookback)[0]
          for name in ('key', 'value')
        )
      return rotate_last(key_BxKx1xH, rotation)[:, :, 0], value_BxKx1xH[:, :, 0]

    return blocks.MemorySource(project, weights, rows)


def _last_rows(array_BxRx, count):
  """Returns the last rows of an array."""
  return array_BxRx[:, array_BxRx.shape[1] - count :]


ATTEND = {  # by the names that `kernels.select` returns
  'xla': local.attend,
  'splash': functools.partial(fused.attend, 'splash'),
  'cudnn': functools.partial(fused.attend, 'cudnn'),
}
