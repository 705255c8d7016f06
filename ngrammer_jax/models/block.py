"""One Transformer block: attention, its memories, feed-forward.

B batch, T segment length, D model width, N heads, H head width.
"""

from collections.abc import Callable, Collection, Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.place import AT_FEED_FORWARD
from ngrammer_jax.layers import axis_names, dropout, feed_forward, mesh_axes, normalization
from ngrammer_jax.layers.attention import attention, cache, persistent, relative, span
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.state import Memory
from ngrammer_jax.models import precision, spans
from ngrammer_jax.models.memories import PlacedMemory


def empty_memory(
  config: model_config.ModelConfig,
  placed_memories: Sequence[PlacedMemory],
  batch: int,
  cache_slots: int,
) -> Memory:
  """Returns the memory of a block before the first segment.

  Keys: `hidden`, inputs of the layer (or of attention, if memories change them) [B, M + R, D], or
  `cache`, its `cache.KeyValues`; and the states of the memories in the block, by name.
  """
  c = config
  dtype = precision.compute_dtype(c)
  lookback = projections(c).lookback
  memory = {}
  slots = None
  if cache_slots:
    slots = cache_slots
    convolution_rows = {}
    if c.convolution is not None:
      for name in projections(c).names:
        num_heads = c.heads if name == 'query' else c.context_key_heads
        convolution_rows[name] = lookback, num_heads
    shape = batch, c.context_key_heads, slots, c.head_features
    memory['cache'] = cache.empty_layer(shape, dtype, convolution_rows)
  elif c.memory is not None:
    slots = c.memory.length
    rows = c.memory.length + lookback
    memory['hidden'] = jnp.zeros((batch, rows, c.width), dtype)
  for placed in placed_memories:
    memory_slots = slots
    if placed.place.point == 'values' and cache_slots > 0:
      memory_slots = None  # the cache has finished values
    memory |= placed.empty_state(batch, memory_slots)
  return memory


class Block(nn.Module):
  """Attention and feed-forward, each with a residual connection and the norms of the config.

  Attributes:
    config: model config.
    dtype: dtype of the activations.
    placed_memories: memories in this block (see `models.memories`).
    score_divisor: see `config.attention.LayerType`.
    number: number of the layer; for layers traced as one, number of the first.
  """

  config: model_config.ModelConfig
  dtype: jnp.dtype
  placed_memories: tuple[PlacedMemory, ...] = ()
  score_divisor: int = 1
  number: int = 0

  @nn.compact
  def __call__(
    self, x_BxTxD: jax.Array, context: Context, memory: Memory, dropout_key: jax.Array | None = None
  ) -> tuple[jax.Array, Memory, span.Spans]:
    """Returns [B, T, D], the memory of this layer for the next segment, and its spans.

    Without learned spans, the spans are 0.
    """
    c = self.config
    attention_residual_key = feed_forward_residual_key = attention_key = feed_forward_key = None
    if dropout_key is not None:
      (attention_residual_key, feed_forward_residual_key, attention_key, feed_forward_key) = (
        jax.random.split(dropout_key, 4)
      )
    x_BxTxD = self._add_position(x_BxTxD)
    before = self._make_memories('before_attention')
    x_BxTxD, next_memory = _apply_memories(before, x_BxTxD, context, memory)

    # Attention.
    input_BxTxD = x_BxTxD
    norm = self._norm('attention')
    y_BxTxD = x_BxTxD
    if norm is not None:
      y_BxTxD = norm(x_BxTxD)
    hidden_BxTxD = x_BxTxD
    at_input = self._make_memories('attention_input')
    if at_input:
      y_BxTxD, states = _apply_memories(at_input, y_BxTxD, context, memory)
      next_memory |= states
      # A segment memory stores their outputs, because they cannot be applied to it again.
      hidden_BxTxD = y_BxTxD
      norm = None
    if 'hidden' in memory:
      hidden_BxTxD = jax.lax.stop_gradient(hidden_BxTxD)
      next_memory['hidden'] = cache.keep_last(memory['hidden'], hidden_BxTxD, context.valid_BxT)
    y_BxTxD, projected, states = self._attend(y_BxTxD, context, memory, norm, attention_key)
    next_memory |= states
    x_BxTxD = self._residual('attention', x_BxTxD, y_BxTxD, attention_residual_key)
    if 'cache' in memory:
      next_memory['cache'] = _update_cache(memory['cache'], projected, context, after_BxTxD=x_BxTxD)
    layer_spans = projected.spans
    if layer_spans is None:
      layer_spans = span.Spans(jnp.zeros(()), jnp.zeros((len(x_BxTxD), c.context_heads)))

    # Feed-forward, and memories beside it or in place of it.
    if c.feed_forward_width or self._memories_at(AT_FEED_FORWARD):
      norm = self._norm('feed_forward')
      y_BxTxD = input_BxTxD if c.parallel_residual else x_BxTxD
      if norm is not None:
        y_BxTxD = norm(y_BxTxD)
      before = self._make_memories('before_feed_forward')
      y_BxTxD, states = _apply_memories(before, y_BxTxD, context, memory)
      next_memory |= states
      y_BxTxD, states = self._feed_forward_and_memories(y_BxTxD, context, memory, feed_forward_key)
      next_memory |= states
      x_BxTxD = self._residual('feed_forward', x_BxTxD, y_BxTxD, feed_forward_residual_key)

    end = self._make_memories('block_end')
    x_BxTxD, states = _apply_memories(end, x_BxTxD, context, memory)
    next_memory |= states
    return x_BxTxD, next_memory, layer_spans

  def _attend(
    self,
    x_BxTxD: jax.Array,
    context: Context,
    memory: Memory,
    norm: nn.Module | None,
    dropout_key: jax.Array | None,
  ) -> tuple[jax.Array, attention.Projected, Memory]:
    """Returns the output of attention, its projections, and the next states of the memories."""
    earlier = memory.get('cache')
    if 'hidden' in memory:
      earlier = attention.LayerInputs(memory['hidden'], norm)
    in_values = self._make_memories('values')
    after = self._make_memories('after_attention')
    states = {}

    def apply_to_heads(
      at_point: list[tuple[PlacedMemory, nn.Module]],
      values_BxPxNxH: jax.Array,
      point_context: Context,
    ) -> jax.Array:
      B, P, N, H = values_BxPxNxH.shape
      y_BxPxF = values_BxPxNxH.reshape(B, P, N * H)
      y_BxPxF, next_states = _apply_memories(at_point, y_BxPxF, point_context, memory)
      states.update(next_states)
      return y_BxPxF.reshape(B, P, N, H)

    def apply_in_values(values_BxPxCxH: jax.Array, inputs_BxPxD: jax.Array) -> jax.Array:
      values_context = context.replace(inputs_BxPxD=inputs_BxPxD)
      return apply_to_heads(in_values, values_BxPxCxH, values_context)

    def apply_after(values_BxTxNxH: jax.Array, pair_BxNxT: jax.Array | None) -> jax.Array:
      return apply_to_heads(after, values_BxTxNxH, context.replace(pair_BxNxT=pair_BxNxT))

    value_fn = None
    if in_values:
      value_fn = apply_in_values
    post_attention_fn = None
    if after:
      post_attention_fn = apply_after
    return_pairs = any(placed.needs_pairs for placed in self.placed_memories)
    attend = make_attention(self.config, self.dtype, self.score_divisor, self.number)
    y_BxTxD, projected = attend(
      x_BxTxD, context, earlier, post_attention_fn, return_pairs, dropout_key, value_fn
    )
    return y_BxTxD, projected, states

  def _memories_at(self, points: Collection[str]) -> list[PlacedMemory]:
    """Returns the memories at some points of the block."""
    return [placed for placed in self.placed_memories if placed.place.point in points]

  def _make_memories(self, *points: str) -> list[tuple[PlacedMemory, nn.Module]]:
    """Returns the memories at some points of the block, with their modules."""
    return [(placed, placed.make(name=placed.name)) for placed in self._memories_at(points)]

  def _feed_forward_and_memories(
    self,
    x_BxTxD: jax.Array,
    context: Context,
    memory: Memory,
    dropout_key: jax.Array | None,
  ) -> tuple[jax.Array, Memory]:
    """Returns the sum of feed-forward and memories beside it, and their next states."""
    outputs = []
    states = {}
    if self.config.feed_forward_width and not self._memories_at(('in_place_of_feed_forward',)):
      y_BxTxD, states = self._feed_forward(x_BxTxD, context, memory, dropout_key)
      outputs.append(y_BxTxD)
    for placed, module in self._make_memories(*AT_FEED_FORWARD):
      y_BxTxD, state = placed.apply(module, x_BxTxD, context, memory)
      outputs.append(y_BxTxD)
      states |= state
    return sum(outputs), states

  def _feed_forward(
    self,
    x_BxTxD: jax.Array,
    context: Context,
    memory: Memory,
    dropout_key: jax.Array | None,
  ) -> tuple[jax.Array, Memory]:
    """Returns the output of the feed-forward, and the next states of the memories."""
    c = self.config
    inside = self._make_memories('feed_forward')
    states = {}

    def apply_memories(up_BxTxF: jax.Array) -> jax.Array:
      up_BxTxF, next_states = _apply_memories(inside, up_BxTxF, context, memory)
      states.update(next_states)
      return up_BxTxF

    bias = c.feed_forward_bias
    if bias is None:
      bias = c.bias
    layer = feed_forward.FeedForward(
      width=c.feed_forward_width,
      activation=c.activation,
      gated=c.gated,
      bias=bias,
      dropout=c.inner_dropout,
      dtype=self.dtype,
      change_up=apply_memories if inside else None,
      has_up=not any(placed.replaces_input for placed, _ in inside),
      name='feed_forward',
    )
    y_BxTxD = layer(x_BxTxD, context.valid_BxT, dropout_key)
    after = self._make_memories('after_feed_forward')
    y_BxTxD, next_states = _apply_memories(after, y_BxTxD, context, memory)
    return y_BxTxD, states | next_states

  def _add_position(self, x_BxTxD: jax.Array) -> jax.Array:
    """Adds the position embedding of this layer, if every layer has one."""
    c = self.config
    T = x_BxTxD.shape[1]
    if c.position != 'learned':
      return x_BxTxD
    init = axis_names.with_axis_names(nn.initializers.normal(0.02), ('position', 'embed'))
    max_length = c.positions().max_length
    if T > max_length:
      raise ValueError(
        f'a segment of {T} tokens exceeds model.positional.max_length={max_length}: use '
        f'shorter segments'
      )
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    table = self.param('position', init, (max_length, c.width), param_dtype)
    return x_BxTxD + table[max_length - T :].astype(self.dtype)

  def _norm_policy(self, name: str) -> str:
    """Returns the placement of the norms of a sub-layer."""
    if self.config.norm != 'primer':
      return self.config.norm
    if name == 'attention':
      return 'pre'
    return 'post'

  def _norm(self, name: str) -> nn.Module | None:
    """Returns the input norm of a sub-layer; None without one."""
    if self._norm_policy(name) not in ('pre', 'hybrid'):
      return None
    return make_norm(self.config, self.dtype, f'{name}_norm')

  def _residual(
    self, name: str, x_BxTxD: jax.Array, y_BxTxD: jax.Array, dropout_key: jax.Array | None
  ) -> jax.Array:
    """Adds the output y of a sub-layer to its input x, with the norms after it."""
    policy = self._norm_policy(name)
    if policy in ('post', 'hybrid'):
      post_norm = make_norm(self.config, self.dtype, f'{name}_post_norm')
      y_BxTxD = post_norm(y_BxTxD)
    y_BxTxD = dropout.drop(y_BxTxD, self.config.dropout, dropout_key)
    x_BxTxD = mesh_axes.shard_rows(x_BxTxD + y_BxTxD)
    if policy == 'post_skip':
      post_norm = make_norm(self.config, self.dtype, f'{name}_post_norm')
      x_BxTxD = post_norm(x_BxTxD)
    return x_BxTxD


def projections(config: model_config.ModelConfig) -> attention.Projections:
  """Returns the projection options of a config."""
  c = config
  options = c.attention_options()
  bias = options.query_key_value_bias
  if bias is None:
    bias = c.bias
  output_bias = options.output_bias
  if output_bias is None:
    output_bias = c.bias
  return attention.Projections(
    bias=bias,
    output_bias=output_bias,
    per_dim_scale=c.per_dim_scale,
    taps=c.convolution,
    shared_query_key=c.shared_query_key,
    norm=options.query_key_norm,
    norm_epsilon=c.norm_epsilon,
    norm_offset=c.norm_offset,
  )


def make_norm(config: model_config.ModelConfig, dtype: jnp.dtype, name: str | None) -> nn.Module:
  """Returns a norm of a config."""
  epsilon = config.norm_epsilon
  if config.norm_kind == 'rms':
    is_offset = config.norm_offset
    return normalization.RMSNorm(epsilon=epsilon, is_offset=is_offset, dtype=dtype, name=name)
  return normalization.LayerNorm(epsilon=epsilon, dtype=dtype, name=name)


def make_attention(
  config: model_config.ModelConfig, dtype: jnp.dtype, score_divisor: int = 1, number: int = 0
) -> attention.Attention:
  """Returns the attention layer of a config; for the other arguments see `Block`."""
  c = config
  options = c.attention_options()
  scale = options.scale
  if score_divisor != 1:
    if scale is None:
      scale = c.head_features**-0.5
    scale /= score_divisor
  learned_span = None
  if c.span is not None:
    learned_span = spans.module_of(c, dtype)
  vectors = None
  if c.persistent is not None:
    p = c.persistent
    vectors = persistent.Persistent(p.vectors, p.kind, p.start == 'neutral')
  return attention.Attention(
    heads=c.heads,
    projections=projections(c),
    position=_position_module(c),
    span=learned_span,
    persistent=vectors,
    dropout=c.attention_dropout,
    logit_cap=options.logit_cap,
    key_heads=c.context_key_heads,
    head_width=c.head_width,
    scale=scale,
    kernel=c.kernel,
    number=number,
    dtype=dtype,
    name='attention',
  )


def _position_module(config: model_config.ModelConfig) -> Callable[..., nn.Module] | None:
  """Returns the constructor of the distance encoding, or None."""
  c = config
  p = c.positions()
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


def _apply_memories(
  placed_modules: Sequence[tuple[PlacedMemory, nn.Module]],
  x_BxTxD: jax.Array,
  context: Context,
  memory: Memory,
) -> tuple[jax.Array, Memory]:
  """Applies memories in turn; returns [B, T, D] and their next states by name."""
  states = {}
  for placed, module in placed_modules:
    x_BxTxD, state = placed.apply(module, x_BxTxD, context, memory)
    states |= state
  return x_BxTxD, states


def _update_cache(
  key_values: cache.KeyValues,
  projected: attention.Projected,
  context: Context,
  after_BxTxD: jax.Array,
) -> cache.KeyValues:
  """Returns the KV cache of a layer after a segment. For `after_BxTxD` see `cache.write`."""
  slots_BxT = context.slots_BxT
  keys = cache.write(key_values.keys, slots_BxT, projected.keys_BxTxCxH, after_BxTxD)
  values = cache.write(key_values.values, slots_BxT, projected.values_BxTxCxH, after_BxTxD)
  rows = {}
  for name in sorted(key_values.rows):
    before = key_values.rows[name]
    rows[name] = cache.keep_last(before, projected.convolved[name], context.valid_BxT)
  return cache.KeyValues(keys, values, rows)
