"""Causal multi-head attention over the tokens of a document, with a memory of earlier segments.

  softmax((q k^T + distance scores) scale) v, projected back to the width

The scale is 1 / sqrt(H). Several query heads may share a head of keys and values.

The logits s of the softmax may be capped to c tanh(s / c), before any mask (praxis). The softmax
may include persistent vectors, and learned spans may mask it. `config.kernels` selects the kernel
and lists what each kernel supports.

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
from ngrammer_jax.layers import axis_names, dense, mesh_axes, softmax
from ngrammer_jax.layers.attention import (
  blocks,
  full,
  fused,
  local,
  memory_source,
  persistent,
  relative,
  span,
)
from ngrammer_jax.layers.attention.cache import KeyValues
from ngrammer_jax.layers.attention.memory_source import LayerInputs
from ngrammer_jax.layers.attention.persistent import Persistent
from ngrammer_jax.layers.attention.projection import HeadProjection, Projections, rotate_last
from ngrammer_jax.layers.attention.span import Spans
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.dropout import Dropout

# Maps the values [B, P, C, H] and the inputs [B, P, D] of their tokens to new values.
ValueFunction = Callable[[jax.Array, jax.Array], jax.Array]
# Maps the attended values [B, T, N, H], and the pairs [B, N, T] if requested, to new values.
PostAttention = Callable[[jax.Array, jax.Array | None], jax.Array]


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
  spans: Spans | None


class Attention(nn.Module):
  """Attention of the tokens of a segment to the memory, to the segment and to learned vectors.

  Attributes:
    heads: N.
    projections: options of the projections.
    position: constructor of the distance encoding (see `relative`). None: scores do not depend on
      distances.
    span: constructor of the learned spans (see `layers.attention.span`). None: no spans.
    persistent: learned keys and values of each head. None: no persistent vectors.
    dropout: rate of the probabilities.
    kernel: a name of `config.kernels`. None: selected for the device.
    dtype: dtype of the projections; scores and softmax take at least float32.
    logit_cap: c, also for the logits of persistent vectors. None: logits are not capped.
    key_heads: C. None: N.
    head_width: H. None: D / N.
    scale: multiplies the scores. None: 1 / sqrt(H).
    number: of the layer, see `layers.attention.cudnn`.
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
  number: int = 0

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context,
    memory: LayerInputs | KeyValues | None = None,
    post_attention_fn: PostAttention | None = None,
    return_pairs: bool = False,
    dropout_key: jax.Array | None = None,
    value_fn: ValueFunction | None = None,
  ) -> tuple[jax.Array, Projected]:
    """Returns [B, T, D], and the projections of this segment for a memory.

    Args:
      x_BxTxD: inputs.
      context: context of the segment.
      memory: inputs of earlier tokens, or their keys and values (see `layers.attention.cache`).
      post_attention_fn: changes the attended values before the output projection.
      return_pairs: whether to pass `post_attention_fn` the most attended earlier key of each query.
      dropout_key: key of the dropout. None: no dropout.
      value_fn: changes the values, including values of memory inputs, before attention reads them.
    """
    if context.keys.visible_BxTxS is None and context.keys.key_documents_BxS is None:
      raise ValueError('attention needs the keys of the segment: pass a `context.make(...)`')
    drop = Dropout(self.dropout, dropout_key)
    projected, convolved, inputs_BxPxD = self._project(x_BxTxD, context, memory)
    if value_fn is not None:
      projected['value'] = value_fn(projected['value'], inputs_BxPxD)
    heads = self._rotate_and_scale(projected, context)
    span_mask, spans = self._span_mask(x_BxTxD, context)
    needs = self._needs(context, memory, span_mask, return_pairs, drop)
    if value_fn is not None and isinstance(memory, LayerInputs):
      needs |= {'value_rows'}
    attend = self._select_kernel(needs, context, projected)
    earlier = self._earlier_keys(memory, context)
    context_part = attend(heads, span_mask, context.keys, earlier, return_pairs, drop)
    y_BxTxNxH = self._with_persistent(context_part, projected['query'], span_mask, drop)
    y_BxTxNxH = y_BxTxNxH.astype(self.dtype)
    if post_attention_fn is not None:
      y_BxTxNxH = post_attention_fn(y_BxTxNxH, context_part.pair_BxNxT)
    y_BxTxD = self._project_output(y_BxTxNxH, x_BxTxD.shape[-1])
    return y_BxTxD, Projected(heads.key_BxSxCxH, heads.value_BxSxCxH, convolved, spans)

  @property
  def context_heads(self) -> int:
    """Number of heads that attend to the context."""
    if self._has_persistent('head_split'):
      return self.heads // 2
    return self.heads

  @property
  def context_key_heads(self) -> int:
    """Number of heads of keys and values of the context."""
    return self.key_heads or self.context_heads

  def _has_persistent(self, kind: str) -> bool:
    vectors = self.persistent
    return vectors is not None and vectors.vectors > 0 and vectors.kind == kind

  def _needs(
    self,
    context: Context,
    memory: LayerInputs | KeyValues | None,
    span_mask: full.SpanMask | None,
    return_pairs: bool,
    drop: Dropout,
  ) -> frozenset[str]:
    """Returns what attention to the context needs, see `config.kernels.NEEDS`."""
    needs = {
      'mask': not context.keys.is_plain_causal,
      'window': context.keys.window is not None,
      'grouped': self.context_key_heads != self.context_heads,
      'joint_norm': self.projections.norm == 'full' and isinstance(memory, LayerInputs),
      'distances': self.position is not None,
      'spans': self.span is not None,
      'all_keys': span_mask is not None and span_mask.counts_all_keys,
      'persistent': self.persistent is not None and self.persistent.vectors > 0,
      'cap': self.logit_cap is not None,
      'dropout': drop.is_active,
      'pairs': return_pairs,
      'cache': isinstance(memory, KeyValues) and not context.keys.skips_cache,
      'prefix': context.keys.has_prefix,
      'short_prompt': context.keys.is_short_prompt,
      # Only the full score matrix has all of them.
      'probabilities': self.is_mutable_collection('intermediates') or self.is_initializing(),
    }
    return frozenset(name for name, is_needed in needs.items() if is_needed)

  def _select_kernel(
    self, needs: frozenset[str], context: Context, projected: dict[str, jax.Array]
  ) -> Callable[..., full.PartialAttention]:
    """Returns the function that computes attention to the context, see `full.attend`.

    Raises:
      ValueError: attention works in blocks, and blocks lack a required feature.
    """
    if context.keys.in_blocks:
      # Of intermediates, blocks record no probabilities.
      if lacking := needs - kernels.KERNELS['blocks'] - {'probabilities'}:
        raise ValueError(f'attention in blocks does not support {kernels.NEEDS[min(lacking)]}')
      return blocks.attend
    if 'probabilities' in needs:
      return full.attend
    workload = fused.workload(
      projected['query'],
      key_heads=projected['key'].shape[2],
      asks_for_cudnn=kernels.asks_for_cudnn(self.kernel, needs),
    )
    kernel = kernels.select(self.kernel, needs, workload)
    if kernel == 'xla':
      return local.attend
    return functools.partial(fused.attend, kernel, self.number)

  def _earlier_keys(
    self, memory: LayerInputs | KeyValues | None, context: Context
  ) -> KeyValues | memory_source.MemorySource | None:
    """Returns the keys and values of a memory that the heads do not include yet."""
    if context.keys.skips_cache:
      memory = None
    cached = None
    if isinstance(memory, KeyValues):
      cached = memory.with_rotated_sinks(context.positions.sink_rotation)
    if not context.keys.in_blocks:
      return cached
    if cached is not None:
      return memory_source.from_cache(cached, context.keys.order_BxM)
    if memory is None:
      return memory_source.MemorySource()
    params = nn.unbox(self.variables['params'])
    return memory_source.from_layer_inputs(
      memory, params, context.positions, self.projections, self.context_key_heads, self.dtype
    )

  def _span_mask(
    self, x_BxTxD: jax.Array, context: Context
  ) -> tuple[full.SpanMask | None, Spans | None]:
    """Returns the mask of the learned spans, and the spans; None without spans."""
    if self.span is None:
      return None, None
    module = self.span(heads=self.context_heads, name='span')
    z_BxTxN, spans = module.spans(x_BxTxD, context.valid_BxT)
    mask = full.SpanMask(z_BxTxN, module.ramp, module.renormalize, module.epsilon_keys)
    return mask, spans

  def _project(
    self, x_BxTxD: jax.Array, context: Context, memory: LayerInputs | KeyValues | None
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
    """Returns queries, keys and values by name, the inputs of their convolutions, and [B, P, D].

    Keys and values include the memory of inputs, unless blocks project it. The last result is the
    inputs of the same tokens.
    """
    lookback = self.projections.lookback
    T, D = x_BxTxD.shape[1:]
    x_BxPxD = x_BxTxD
    num_keys = T
    if isinstance(memory, LayerInputs):
      rows_BxRxD = memory.rows_BxRxD
      if context.keys.in_blocks:  # the blocks project the other rows
        rows_BxRxD = _last_rows(rows_BxRxD, lookback)
      num_keys += rows_BxRxD.shape[1] - lookback
      if memory.norm is not None:
        rows_BxRxD = memory.norm(rows_BxRxD)
      x_BxPxD = jnp.concatenate([rows_BxRxD, x_BxTxD], axis=1)
    num_before = x_BxPxD.shape[1] - num_keys  # inputs that only the convolutions read
    head_width = self.head_width or D // self.heads
    project = HeadProjection(self.projections, self.dtype)
    projected, convolved = {}, {}
    for name in self.projections.names:
      count, num_heads = num_keys, self.context_key_heads
      if name == 'query':
        count, num_heads = T, self.heads
      inputs_BxPxD = mesh_axes.shard_rows(_last_rows(x_BxPxD, num_before + count))
      position_BxP = context.positions.position_BxP
      if position_BxP is not None:
        position_BxP = _last_rows(position_BxP, count)
      earlier = None
      if isinstance(memory, KeyValues):
        earlier = memory.rows.get(name)
      projected[name], convolution_inputs = project(
        name, inputs_BxPxD, (num_heads, head_width), position_BxP, num_before, earlier
      )
      if convolution_inputs is not None:
        convolved[name] = convolution_inputs
    if self.projections.shared_query_key:
      projected['query'] = self._query_from_key(_last_rows(projected['key'], T))
    return projected, convolved, x_BxPxD[:, num_before:]

  def _query_from_key(self, k_BxTxNxH: jax.Array) -> jax.Array:
    """Returns the queries [B, T, N, H] as a linear map of the keys, head by head."""
    N, H = k_BxTxNxH.shape[-2:]
    init = axis_names.with_axis_names(nn.initializers.normal(H**-0.5), ('heads', 'kv', None))
    kernel_NxHxH = self.param('query_kernel', init, (N, H, H), self._param_dtype())
    y_BxTxNxH = jnp.einsum('btnh,nhg->btng', k_BxTxNxH, kernel_NxHxH.astype(self.dtype))
    return checkpoint_name(y_BxTxNxH, 'projected')

  def _rotate_and_scale(self, projected: dict[str, jax.Array], context: Context) -> full.Heads:
    """Rotates queries and keys, scales queries and encodes distances."""
    positions = context.positions
    query_BxTxNxH = projected['query'][..., : self.context_heads, :]
    query_BxTxNxH = rotate_last(query_BxTxNxH, positions.rotation)
    key_BxSxCxH = rotate_last(projected['key'], positions.rotation)
    N, H = query_BxTxNxH.shape[-2:]
    scale_H = self._query_scale(H).astype(self.dtype)
    if self.position is None:
      distance = None
      query_BxTxNxH = query_BxTxNxH * scale_H
    else:
      encode = self.position(dtype=self.dtype, name='relative')
      u_NxH, v_NxH = self._position_biases(encode.biases, positions.params, (N, H))
      distance_query_BxTxNxH = (query_BxTxNxH + v_NxH) * scale_H
      encoding, bias = encode(context, N, H, self.logit_cap is not None)
      distance = relative.DistanceTerm(distance_query_BxTxNxH, encoding, bias)
      query_BxTxNxH = (query_BxTxNxH + u_NxH) * scale_H
    query, key, value = checkpoint_name((query_BxTxNxH, key_BxSxCxH, projected['value']), 'heads')
    return full.Heads(query, key, value, distance, self.logit_cap)

  def _position_biases(
    self, names: tuple[str, ...], shared: tuple[jax.Array, ...] | None, shape: tuple[int, int]
  ) -> tuple[jax.Array | int, jax.Array | int]:
    """Returns u and v of `relative`, 0 for those without a name; layers may share them."""
    if names and shared is not None:
      biases = shared
    else:
      init = axis_names.with_axis_names(nn.initializers.normal(0.02), ('heads', 'kv'))
      biases = [self.param(name, init, shape, self._param_dtype()) for name in names]
    biases = [bias.astype(self.dtype) for bias in biases]
    u = biases[0] if biases else 0
    v = biases[1] if len(biases) > 1 else 0
    return u, v

  def _query_scale(self, H: int) -> jax.Array:
    if not self.projections.per_dim_scale:
      scale = self.scale
      if scale is None:
        scale = H**-0.5
      return jnp.asarray(scale)
    init = axis_names.with_axis_names(nn.initializers.zeros, ('kv',))
    scale_H = self.param('per_dim_scale', init, (H,), self._param_dtype())
    log2_e = 1.442695041  # with the digits of praxis
    return log2_e * H**-0.5 * jax.nn.softplus(scale_H)

  def _param_dtype(self) -> jnp.dtype:
    return jnp.promote_types(self.dtype, jnp.float32)

  def _with_persistent(
    self,
    context_part: full.PartialAttention,
    query_BxTxNxH: jax.Array,
    span_mask: full.SpanMask | None,
    drop: Dropout,
  ) -> jax.Array:
    """Combines attention to the context and to the persistent vectors, [B, T, N, H]."""
    if self.persistent is None or not self.persistent.vectors:
      self._sow_probs(context_part.weights_BxNxTxS)
      return context_part.values_BxTxNxH
    kind = self.persistent.kind
    B, T, N, H = query_BxTxNxH.shape
    if kind == 'head_split':
      query_BxTxNxH = query_BxTxNxH[:, :, self.context_heads :]
    elif kind == 'single_head':
      query_BxTxNxH = query_BxTxNxH.reshape(B, T, 1, N * H)
    vectors = persistent.PersistentVectors(
      self.persistent.vectors, self.dtype, self.persistent.has_zero_gate, name='persistent'
    )
    scores_BxNxTxP, values_NxPxH = vectors(query_BxTxNxH)
    scores_BxNxTxP = softmax.cap_logits(scores_BxNxTxP, self.logit_cap)
    persistent_part = persistent.attend(scores_BxNxTxP, values_NxPxH, drop.fold_in(1))
    if kind == 'all_attention':
      is_renormalized = span_mask is not None and span_mask.renormalize
      epsilon = span.EPSILON if is_renormalized else 0.0
      joint = full.joint_softmax(context_part, persistent_part, epsilon)
      self._sow_probs(joint.weights_BxNxTxS)
      return joint.values_BxTxNxH
    self._sow_probs(context_part.weights_BxNxTxS)
    context_values, persistent_values = context_part.values_BxTxNxH, persistent_part.values_BxTxNxH
    if kind == 'head_split':
      return jnp.concatenate([context_values, persistent_values], axis=2)
    return context_values + persistent_values.reshape(B, T, N, H)

  def _sow_probs(self, probs_BxNxTxS: jax.Array | None) -> None:
    if probs_BxNxTxS is not None:
      self.sow('intermediates', 'probs', probs_BxNxTxS)

  def _project_output(self, y_BxTxNxH: jax.Array, D: int) -> jax.Array:
    """Projects the attended values of all heads to [B, T, D]."""
    bias = self.projections.output_bias
    if bias is None:
      bias = self.projections.bias
    project = dense.dense_general(
      y_BxTxNxH.shape[2:],
      (D,),
      ('heads', 'kv', 'embed'),
      use_bias=bias,
      dtype=self.dtype,
      name='out',
    )
    return checkpoint_name(project(y_BxTxNxH), 'attention_output')


def _last_rows(array_BxRx: jax.Array, count: int) -> jax.Array:
  """Returns the last rows of an array."""
  return array_BxRx[:, array_BxRx.shape[1] - count :]
