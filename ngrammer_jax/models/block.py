"""One Transformer block: attention, its memories, feed-forward.

B batch, T segment length, D model width, N heads, H head width.
"""

from collections.abc import Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import axis_names, dropout, feed_forward, mesh_axes, normalization
from ngrammer_jax.layers.attention import attention, cache, persistent, relative, span
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.state import Memory
from ngrammer_jax.models import memories, precision, spans
from ngrammer_jax.models.memories import PlacedMemory


def empty_memory(
  config: model_config.ModelConfig,
  own_memories: Sequence[PlacedMemory],
  batch: int,
  cache_slots: int,
) -> Memory:
  """Returns the memory of a block before the first segment.

  Keys: `hidden`, inputs of the layer [B, M + R, D], or `cache`, its `cache.KeyValues`; and the
  states of the memories in the block, by name.
  """
  c, slots, memory = config, None, {}
  lookback = (c.convolution or 1) - 1
  if cache_slots:
    slots = cache_slots
    names = projections(c).names if c.convolution is not None else ()
    heads = {'query': c.heads}
    rows = {name: (lookback, heads.get(name, c.context_key_heads)) for name in names}
    shape = batch, c.context_key_heads, slots, c.head_features
    dtype = precision.compute_dtype(c)
    memory['cache'] = cache.empty_layer(shape, dtype, rows)
  elif c.memory is not None:
    slots, rows = c.memory.length, c.memory.length + lookback
    memory['hidden'] = jnp.zeros((batch, rows, c.width), precision.compute_dtype(c))
  return memory | memories.empty_states(own_memories, batch, slots)


class Block(nn.Module):
  """Attention and feed-forward, each with a residual connection and the norms of the config.

  Attributes:
    config: model config.
    dtype: dtype of the activations.
    own_memories: memories in this block (see `models.memories`).
    score_divisor: see `config.attention.LayerKind`.
  """

  config: model_config.ModelConfig
  dtype: jnp.dtype
  own_memories: tuple[PlacedMemory, ...] = ()
  score_divisor: int = 1

  @nn.compact
  def __call__(
    self, x_BxTxD: jax.Array, context: Context, memory: Memory, dropout_key: jax.Array | None = None
  ) -> tuple[jax.Array, Memory, span.Spans]:
    """Returns [B, T, D], the memory of this layer for the next segment, and its spans.

    The spans are 0 if none are learned.
    """
    c, keys = self.config, (None,) * 4
    if dropout_key is not None:
      keys = jax.random.split(dropout_key, 4)
    x_BxTxD = self._add_position(x_BxTxD)
    before = self._make_memories('before_attention')
    x_BxTxD, next_memory = _apply_memories(before, x_BxTxD, context, memory)
    if 'hidden' in memory:
      hidden_BxTxD = jax.lax.stop_gradient(x_BxTxD)
      next_memory['hidden'] = cache.keep_last(memory['hidden'], hidden_BxTxD, context.valid_BxT)
    norm, input_BxTxD = self._norm('attention'), x_BxTxD
    y_BxTxD = x_BxTxD if norm is None else norm(x_BxTxD)
    y_BxTxD, projected, states = self._attend(y_BxTxD, context, memory, norm, keys[2])
    x_BxTxD = self._residual('attention', x_BxTxD, y_BxTxD, keys[0])
    if 'cache' in memory:
      next_memory['cache'] = _update_cache(memory['cache'], projected, context, after_BxTxD=x_BxTxD)
    layer_spans = projected.spans
    if layer_spans is None:
      layer_spans = span.Spans(jnp.zeros(()), jnp.zeros((len(x_BxTxD), c.context_heads)))
    if c.feed_forward_width:
      norm = self._norm('feed_forward')
      y_BxTxD = input_BxTxD if c.parallel_residual else x_BxTxD
      y_BxTxD = y_BxTxD if norm is None else norm(y_BxTxD)
      y_BxTxD = self._feed_forward(y_BxTxD, context.valid_BxT, keys[3])
      x_BxTxD = self._residual('feed_forward', x_BxTxD, y_BxTxD, keys[1])
    return x_BxTxD, next_memory | states, layer_spans

  def _attend(self, x_BxTxD, context, memory, norm, dropout_key):
    """Returns the output of attention, its projections, and the next states of the memories."""
    earlier, states = memory.get('cache'), {}
    if 'hidden' in memory:
      earlier = attention.LayerInputs(memory['hidden'], norm)
    after = self._make_memories('after_attention')

    def apply_memories(values_BxTxNxH, pair_BxNxT):
      shape, y_BxTxD = values_BxTxNxH.shape, values_BxTxNxH.reshape(*x_BxTxD.shape[:2], -1)
      paired = context.replace(pair_BxNxT=pair_BxNxT)
      y_BxTxD, next_states = _apply_memories(after, y_BxTxD, paired, memory)
      states.update(next_states)
      return y_BxTxD.reshape(shape)

    post_attention_fn = apply_memories if after else None
    return_pairs = any(placed.needs_pairs for placed in self.own_memories)
    attend = make_attention(self.config, self.dtype, self.score_divisor)
    y_BxTxD, projected = attend(
      x_BxTxD, context, earlier, post_attention_fn, return_pairs, dropout_key
    )
    return y_BxTxD, projected, states

  def _make_memories(self, point):
    """Returns the memories at a point of the block, with their modules."""
    at_point = [placed for placed in self.own_memories if placed.place.point == point]
    return [(placed, placed.make(name=placed.name)) for placed in at_point]

  def _feed_forward(self, x_BxTxD, valid_BxT, dropout_key):
    c = self.config
    bias = c.bias if c.feed_forward_bias is None else c.feed_forward_bias
    layer = feed_forward.FeedForward(
      *(c.feed_forward_width, c.activation, c.gated, bias, c.inner_dropout, self.dtype),
      name='feed_forward',
    )
    return layer(x_BxTxD, valid_BxT, dropout_key)

  def _add_position(self, x_BxTxD):
    """Adds the position embedding of this layer, if every layer has one."""
    c, T = self.config, x_BxTxD.shape[1]
    if c.position != 'learned':
      return x_BxTxD
    init = axis_names.with_axis_names(nn.initializers.normal(0.02), (None, 'embed'))
    max_length = c.positions().max_length
    if T > max_length:
      raise ValueError(f'a segment of {T} tokens exceeds model.positional.max_length={max_length}')
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    table = self.param('position', init, (max_length, c.width), param_dtype)
    return x_BxTxD + table[max_length - T :].astype(self.dtype)

  def _norm_policy(self, name):
    """Returns the placement of the norms of a sub-layer."""
    if self.config.norm == 'primer':
      return 'pre' if name == 'attention' else 'post'
    return self.config.norm

  def _make_norm(self, name):
    return make_norm(self.config, self.dtype, name)

  def _norm(self, name):
    """Returns the norm of the input of a sub-layer, None if it has none."""
    return self._make_norm(f'{name}_norm') if self._norm_policy(name) in ('pre', 'hybrid') else None

  def _residual(self, name, x_BxTxD, y_BxTxD, dropout_key):
    """Adds the output y of a sub-layer to its input x, with the norms after it."""
    policy, post_norm = self._norm_policy(name), f'{name}_post_norm'
    if policy in ('post', 'hybrid'):
      y_BxTxD = self._make_norm(post_norm)(y_BxTxD)
    y_BxTxD = dropout.drop(y_BxTxD, self.config.dropout, dropout_key)
    x_BxTxD = mesh_axes.shard_rows(x_BxTxD + y_BxTxD)
    return self._make_norm(post_norm)(x_BxTxD) if policy == 'post_skip' else x_BxTxD


def projections(config: model_config.ModelConfig) -> attention.Projections:
  """Returns the projection options of a config."""
  c, options = config, config.attention_options()
  bias = lambda own: c.bias if own is None else own
  return attention.Projections(
    bias=bias(options.query_key_value_bias),
    output_bias=bias(options.output_bias),
    per_dim_scale=c.per_dim_scale,
    taps=c.convolution,
    shared_query_key=c.shared_query_key,
    norm=options.query_key_norm,
    norm_epsilon=c.norm_epsilon,
    norm_offset=c.norm_offset,
  )


def make_norm(config: model_config.ModelConfig, dtype: jnp.dtype, name: str | None) -> nn.Module:
  """Returns a norm of a config."""
  c, fields = config, {'epsilon': config.norm_epsilon, 'dtype': dtype, 'name': name}
  if c.norm_kind == 'rms':
    return normalization.RMSNorm(is_offset=c.norm_offset, **fields)
  return normalization.LayerNorm(**fields)


def make_attention(
  config: model_config.ModelConfig, dtype: jnp.dtype, score_divisor: int = 1
) -> attention.Attention:
  """Returns the attention layer of a config, whose scores are divided by a number."""
  c, options, scale = config, config.attention_options(), config.attention_options().scale
  p = c.persistent
  if score_divisor != 1:
    scale = (c.head_features**-0.5 if scale is None else scale) / score_divisor
  return attention.Attention(
    heads=c.heads,
    projections=projections(c),
    position=_position(c),
    span=None if c.span is None else spans.module_of(c, dtype),
    persistent=p and persistent.Persistent(p.vectors, p.kind, p.start == 'neutral'),
    dropout=c.attention_dropout,
    logit_cap=options.logit_cap,
    key_heads=c.context_key_heads,
    head_width=c.head_width,
    scale=scale,
    kernel=c.kernel,
    dtype=dtype,
    name='attention',
  )


def _position(config):
  """Returns a function that makes the module for distances, None if there is no such module."""
  c, p = config, config.positions()
  if c.position == 'table':
    return relative.TablePosition
  if c.position == 'shaw':
    return functools.partial(
      relative.ShawPosition, max_length=p.max_length, clamp_length=p.clamp_length
    )
  if c.position != 'relative':
    return None
  has_vectors = c.persistent is not None and c.persistent.vectors > 0
  return functools.partial(
    relative.RelativePosition,
    width=c.width,
    clamp_length=p.clamp_length,
    shares_softmax=has_vectors and c.persistent.kind == 'all_attention',
    dropout=c.dropout,
  )


def _apply_memories(placed_modules, x_BxTxD, context, memory):
  """Applies memories in turn; returns [B, T, D] and their next states by name."""
  states = {}
  for placed, module in placed_modules:
    x_BxTxD, state = placed.apply(module, x_BxTxD, context, memory)
    states |= state
  return x_BxTxD, states


def _update_cache(key_values, projected, context, after_BxTxD):
  """Returns the KV cache of a layer after a segment."""
  write = lambda old, new: cache.write(old, context.slots_BxT, new, after_BxTxD)
  keep_last = lambda before, new: cache.keep_last(before, new, context.valid_BxT)
  return cache.KeyValues(
    keys=write(key_values.keys, projected.keys_BxTxCxH),
    values=write(key_values.values, projected.values_BxTxCxH),
    rows=jax.tree.map(keep_last, key_values.rows, projected.convolved),
  )
