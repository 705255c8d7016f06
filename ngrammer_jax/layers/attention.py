"""Causal multi-head attention over the tokens of a document, with a memory of earlier segments.

  softmax((q k^T + distance scores) / sqrt(H)) v, projected back to the width

The softmax may share its mass with persistent vectors, and be masked by learned spans. Three ways
compute it: all scores at once (`layers.whole_attention`), blocks (`layers.blocked_attention`), or a
kernel of the device (`layers.flash`).

B batch, T segment length, M memory, S = M + T keys, P inputs of keys, D model width, N heads,
H head width, C persistent vectors.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import (
  blocked_attention,
  convolution,
  dense,
  dropout,
  flash,
  local,
  persistent,
  position,
  relative,
  span,
  whole_attention,
)
from ngrammer_jax.layers.cache import KeyValues
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.persistent import Persistent

# Changes the attended values [B, T, N, H], which pairs [B, N, T] come with if they are asked for.
PostAttention = Callable[[jax.Array, jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True)
class Projections:
  """How queries, keys and values are made of the inputs.

  Attributes:
    bias: projections have biases.
    per_dim_scale: learn the query scale of each feature (praxis), shared by the heads:
      log2(e) / sqrt(H) * softplus(s), which is 1 / sqrt(H) at the initial s = 0.
    taps: of the causal convolutions on the projected q, k and v (Primer). None: none.
    shared_query_key: q is a linear map, head by head, of the convolved k (full Primer).
  """

  bias: bool = False
  per_dim_scale: bool = False
  taps: int | None = None
  shared_query_key: bool = False

  @property
  def names(self) -> tuple[str, ...]:
    """What is projected from the input, and convolved if there are convolutions."""
    return ('key', 'value') if self.shared_query_key else ('query', 'key', 'value')

  @property
  def lookback(self) -> int:
    """How many earlier inputs a projection depends on."""
    return (self.taps or 1) - 1


class LayerInputs(NamedTuple):
  """A memory of the inputs of the layer, whose keys and values are projected again.

  rows_BxRxD: the M inputs before the segment, and `Projections.lookback` more before these.
  norm: what the inputs of the segment were normalised with. None: nothing.
  """

  rows_BxRxD: jax.Array
  norm: nn.Module | None = None


class Projected(NamedTuple):
  """What attention made of a segment.

  Attributes:
    keys_BxTxNxH, values_BxTxNxH: as they are attended to.
    convolved: `query`, `key` and `value` before their convolutions, [B, T, N, H]; else empty.
    spans: how far heads look. None: no spans are learned.
  """

  keys_BxTxNxH: jax.Array
  values_BxTxNxH: jax.Array
  convolved: dict[str, jax.Array]
  spans: span.Spans | None


class Attention(nn.Module):
  """Attention of the tokens of a segment to the memory, to the segment and to learned vectors.

  Attributes:
    heads: N.
    projections: how queries, keys and values are made.
    position: makes the module that encodes distances (see `layers.relative`). None: no such scores.
    span: makes the module that learns how far heads look (see `layers.span`). None: no limit.
    persistent: learned keys and values of each head. None: there are none.
    dropout: rate of the probabilities.
    kernel: one of the kernels in `layers.flash`. None: chosen for the device.
    dtype: of the projections; scores and softmax take at least float32.
  """

  heads: int
  projections: Projections = Projections()
  position: Callable[..., nn.Module] | None = None
  span: Callable[..., nn.Module] | None = None
  persistent: Persistent | None = None
  dropout: float = 0.0
  kernel: str | None = None
  dtype: jnp.dtype = jnp.float32

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
    """Returns [B, T, D], and what a memory may keep of this segment.

    Args:
      x_BxTxD: inputs.
      context: of the segment.
      memory: inputs of earlier tokens, or their keys and values (see `layers.cache`).
      post_attention_fn: changes the attended values before they are projected back.
      return_pairs: it is given the earlier key that each query attends to most.
      dropout_key: to drop probabilities. None: none are dropped.
    """
    D, drop = x_BxTxD.shape[-1], dropout.Dropout(self.dropout, dropout_key)
    rows, convolved = self._project(x_BxTxD, context, memory)
    query_BxTxNxH, heads = rows['query'], self._heads(rows, context)
    kernel, reach = 'xla', None
    is_plain = context.is_plain_causal and memory is None and post_attention_fn is None
    if is_plain and not drop.is_active:
      kernel = self._kernel(heads)
    if kernel != 'xla':
      y_BxTxNxH = flash.attend(kernel, *heads[:3], context.query_documents_BxT)
    else:
      spans = None
      if self.span is not None:
        learned = self.span(heads=self.context_heads, name='span')
        z_BxTxN, reach = learned.spans(x_BxTxD, context.valid_BxT)
        spans = whole_attention.Spans(z_BxTxN, learned.ramp, learned.renormalize)
      if context.in_blocks:
        attend, source = blocked_attention.attend, self._source(memory, context)
      else:
        # The probabilities of all keys exist together only for those who look into them.
        is_local = local.applies(context) and not self.is_mutable_collection('intermediates')
        attend = local.attend if is_local else whole_attention.attend
        source = memory if isinstance(memory, KeyValues) else None
      part = attend(heads, spans, context, source, return_pairs, drop)
      y_BxTxNxH = self._with_persistent(part, query_BxTxNxH, spans, drop).astype(self.dtype)
      if post_attention_fn is not None:
        y_BxTxNxH = post_attention_fn(y_BxTxNxH, part.pair_BxNxT)
    names, how = ('heads', 'kv', 'embed'), {'use_bias': self.projections.bias, 'dtype': self.dtype}
    project = dense.dense_general(y_BxTxNxH.shape[2:], (D,), names, **how, name='out')
    return project(y_BxTxNxH), Projected(heads.key_BxSxNxH, heads.value_BxSxNxH, convolved, reach)

  @property
  def context_heads(self) -> int:
    """Heads that look at the context."""
    return self.heads // 2 if self._has_persistent('head_split') else self.heads

  def _has_persistent(self, kind):
    vectors = self.persistent
    return vectors is not None and vectors.vectors > 0 and vectors.kind == kind

  def _project(self, x_BxTxD, context, memory):
    """Queries of the segment; its keys and values, for whole scores also those of inputs before.

    And what of these was convolved, which a cache keeps.
    """
    lookback, keys = self.projections.lookback, x_BxTxD.shape[1]
    x_BxPxD, (T, D) = x_BxTxD, x_BxTxD.shape[1:]
    if isinstance(memory, LayerInputs):
      rows_BxRxD, norm = memory
      if context.in_blocks:  # the blocks project the rest
        rows_BxRxD = rows_BxRxD[:, rows_BxRxD.shape[1] - lookback :]
      keys += rows_BxRxD.shape[1] - lookback
      x_BxPxD = jnp.concatenate([rows_BxRxD if norm is None else norm(rows_BxRxD), x_BxTxD], axis=1)
    before = x_BxPxD.shape[1] - keys  # inputs that only the convolutions look at
    rows, convolved = {}, {}
    for name in self.projections.names:
      count, heads = (T, self.heads) if name == 'query' else (keys, self.context_heads)
      y_BxPxNxH = self._linear(D, (heads, D // self.heads), name=name)(
        _last(x_BxPxD, before + count)
      )
      if self.projections.taps is not None:
        earlier = memory.rows[name] if isinstance(memory, KeyValues) else None
        earlier = y_BxPxNxH[:, :before] if before else earlier
        convolved[name] = y_BxPxNxH[:, before:]
        convolve = self._convolution(name=f'{name}_convolution')
        position_BxP = _last(context.position_BxP, count)
        y_BxPxNxH = convolve(convolved[name], position_BxP, earlier)
      rows[name] = y_BxPxNxH
    if self.projections.shared_query_key:
      rows['query'] = self._query_of_key(_last(rows['key'], T))
    return rows, convolved

  def _linear(self, D, features, **module):
    """A projection to heads of a width."""
    module |= {'use_bias': self.projections.bias, 'dtype': self.dtype}
    return dense.dense_general((D,), features, ('embed', 'heads', 'kv'), **module)

  def _convolution(self, **module):
    """A convolution of queries, keys or values."""
    return convolution.CausalConvolution(self.projections.taps, self.dtype, **module)

  def _query_of_key(self, k_BxTxNxH):
    N, H = k_BxTxNxH.shape[-2:]
    init = nn.with_logical_partitioning(nn.initializers.normal(H**-0.5), ('heads', 'kv', None))
    kernel_NxHxH = self.param('query_kernel', init, (N, H, H), self._param_dtype())
    return jnp.einsum('btnh,nhg->btng', k_BxTxNxH, kernel_NxHxH.astype(self.dtype))

  def _heads(self, rows, context):
    """The projections by head: queries and keys rotated, queries scaled, distances encoded."""
    query_BxTxNxH, key_BxSxNxH = rows['query'][..., : self.context_heads, :], rows['key']
    if context.rotation is not None:
      rotation_of = lambda x: tuple(part[..., -x.shape[1] :, :, :] for part in context.rotation)
      query_BxTxNxH = position.rotate(query_BxTxNxH, rotation_of(query_BxTxNxH))
      key_BxSxNxH = position.rotate(key_BxSxNxH, rotation_of(key_BxSxNxH))
    N, H = query_BxTxNxH.shape[-2:]
    scale_H, distance = self._query_scale(H).astype(self.dtype), None
    if self.position is None:
      query_BxTxNxH = query_BxTxNxH * scale_H
    else:
      encode = self.position(dtype=self.dtype, name='relative')
      u_NxH, v_NxH = self._position_biases(encode.biases, context.position_params, (N, H))
      distance_query_BxTxNxH = (query_BxTxNxH + v_NxH) * scale_H
      distance = relative.DistanceTerm(distance_query_BxTxNxH, *encode(context, N, H))
      query_BxTxNxH = (query_BxTxNxH + u_NxH) * scale_H
    return whole_attention.Heads(query_BxTxNxH, key_BxSxNxH, rows['value'], distance)

  def _position_biases(self, names, shared, shape):
    """u and v of `layers.relative`, 0 where no name is given; the parameters may be shared."""
    if names and shared is not None:
      biases = shared
    else:
      init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ('heads', 'kv'))
      biases = [self.param(name, init, shape, self._param_dtype()) for name in names]
    return (*(bias.astype(self.dtype) for bias in biases), 0, 0)[:2]

  def _query_scale(self, H):
    if not self.projections.per_dim_scale:
      return jnp.asarray(H**-0.5)
    init = nn.with_logical_partitioning(nn.initializers.zeros, ('kv',))
    scale_H = self.param('per_dim_scale', init, (H,), self._param_dtype())
    log2_e = 1.442695041  # to the digits of praxis
    return log2_e * H**-0.5 * jax.nn.softplus(scale_H)

  def _param_dtype(self):
    return jnp.promote_types(self.dtype, jnp.float32)

  def _kernel(self, heads):
    """Which kernel attends where all that counts is causality and documents."""
    if self.is_mutable_collection('intermediates') or self.is_initializing():
      return 'xla'  # all probabilities, or all parameters, are asked for
    if any(part is not None for part in (self.position, self.span, self.persistent)):
      return 'xla'
    return flash.choose(self.kernel, heads.query_BxTxNxH.shape, self.dtype)

  def _with_persistent(self, part, query_BxTxNxH, spans, drop):
    """The values of the context and of the persistent vectors, [B, T, N, H]."""
    if self.persistent is None or not self.persistent.vectors:
      self._sow_probs(part.weights_BxNxTxS)
      return part.values_BxTxNxH
    kind, shape = self.persistent.kind, query_BxTxNxH.shape
    if kind == 'head_split':
      query_BxTxNxH = query_BxTxNxH[:, :, self.context_heads :]
    elif kind == 'single_head':
      query_BxTxNxH = query_BxTxNxH.reshape(*shape[:2], 1, -1)
    vectors = persistent.PersistentVectors(self.persistent.vectors, self.dtype, name='persistent')
    persistent_part = persistent.attend(*vectors(query_BxTxNxH), drop.fold_in(1))
    if kind == 'all_attention':
      epsilon = span.EPSILON if spans is not None and spans.renormalize else 0.0
      part = whole_attention.joint_softmax(part, persistent_part, epsilon)
    self._sow_probs(part.weights_BxNxTxS)
    if kind == 'all_attention':
      return part.values_BxTxNxH
    if kind == 'head_split':
      return jnp.concatenate([part.values_BxTxNxH, persistent_part.values_BxTxNxH], axis=2)
    return part.values_BxTxNxH + persistent_part.values_BxTxNxH.reshape(shape)

  def _sow_probs(self, probs_BxNxTxS):
    if probs_BxNxTxS is not None:
      self.sow('intermediates', 'probs', probs_BxNxTxS)

  def _source(self, memory, context):
    """Where blocks read the keys and values of the memory."""
    if memory is None:
      return blocked_attention.Source()
    if isinstance(memory, KeyValues):
      return blocked_attention.cache_source(memory, context.order_BxM)
    M = memory.rows_BxRxD.shape[1] - self.projections.lookback
    rotation = None
    if context.rotation is not None:
      rotation = tuple(part[:, :M] for part in context.rotation)
    rows = memory.rows_BxRxD, context.position_BxP[:, :M], rotation
    names = [n for name in ('key', 'value') for n in (name, f'{name}_convolution')]
    params = nn.unbox(self.variables['params'])
    by_head = lambda leaf: jnp.moveaxis(leaf, -2, 0)  # heads are the last axis but one
    weights = {name: jax.tree.map(by_head, params[name]) for name in names if name in params}
    norm = memory.norm
    if norm is not None:
      repeat = lambda leaf: jnp.broadcast_to(leaf, (self.context_heads, *leaf.shape))
      weights['norm'] = jax.tree.map(repeat, nn.unbox(norm.variables['params']))
      norm = norm.clone(parent=None, name=None)

    def project(weights, rows, cache, head):
      del cache, head
      rows_BxRxD, position_BxK, rotation = rows
      with nn.logical_axis_rules(()):  # each device projects for itself
        if norm is not None:
          rows_BxRxD = norm.apply({'params': weights['norm']}, rows_BxRxD)
        key_BxKx1xH, value_BxKx1xH = (
          self._project_one_head(name, weights, rows_BxRxD, position_BxK)
          for name in ('key', 'value')
        )
      if rotation is not None:
        key_BxKx1xH = position.rotate(key_BxKx1xH, rotation)
      return key_BxKx1xH[:, :, 0], value_BxKx1xH[:, :, 0]

    return blocked_attention.Source(project, weights, rows)

  def _project_one_head(self, name, weights, x_BxRxD, position_BxK):
    """Keys or values [B, K, 1, H] of one head, with its weights."""
    params = lambda name: jax.tree.map(lambda leaf: jnp.expand_dims(leaf, -2), weights[name])
    D, H = weights[name]['kernel'].shape
    y_BxRx1xH = self._linear(D, (1, H), parent=None).apply({'params': params(name)}, x_BxRxD)
    if self.projections.taps is None:
      return y_BxRx1xH
    lookback = self.projections.lookback
    rows = y_BxRx1xH[:, lookback:], position_BxK, y_BxRx1xH[:, :lookback]
    convolve = self._convolution(parent=None)
    return convolve.apply({'params': params(f'{name}_convolution')}, *rows)


def _last(array_BxRx, count):
  """The last rows of an array."""
  return array_BxRx[:, array_BxRx.shape[1] - count :]
