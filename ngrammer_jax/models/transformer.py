"""The Transformer language model: embed, memories, blocks, head.

  hidden, memory, aux = model.apply(variables, tokens, memory, starts_BxT=..., train=...)
  scores = model.apply(variables, hidden, targets, method='scores')

B batch, T segment length, S keys, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import itertools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config import kernels
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.attention import LayerType
from ngrammer_jax.config.place import Place
from ngrammer_jax.layers import axis_names, document_masks, dropout, mesh_axes, row_sums
from ngrammer_jax.layers import context as contexts
from ngrammer_jax.layers.attention import cache, fused, position, span
from ngrammer_jax.layers.state import Memory
from ngrammer_jax.models import (
  apply_layers,
  block,
  embedding_and_head,
  layer_runs,
  memories,
  precision,
  rematerialization,
  spans,
)
from ngrammer_jax.models.apply_layers import LayerResult
from ngrammer_jax.models.layer_runs import LayerRun


def _as_zero_tokens(
  tokens: contexts.RecentTokens | cache.CacheSlots, count: int
) -> contexts.RecentTokens | cache.CacheSlots:
  """Turns the last empty slots into tokens of the first document, with zeros as keys and values."""
  index_M = jnp.arange(-tokens.documents.shape[1], 0)
  tokens = tokens.replace(documents=jnp.where(index_M >= -count, 0, tokens.documents))
  if isinstance(tokens, cache.CacheSlots):
    tokens = tokens.replace(index=tokens.index + index_M)
  return tokens


class _LayerInputs(NamedTuple):
  """The inputs of layers besides the activations.

  Attributes:
    contexts: context of each type of layers.
    memory: memory of each layer.
    dropout_keys: key of each layer. None: no dropout.
  """

  contexts: Mapping[LayerType, contexts.Context]
  memory: Sequence[Any]
  dropout_keys: jax.Array | None

  def of(self, layers: slice) -> '_LayerInputs':
    """Returns the inputs of some of the layers."""
    keys = apply_layers.select_keys(self.dropout_keys, layers)
    return _LayerInputs(self.contexts, self.memory[layers], keys)


def empty_memory(config: model_config.ModelConfig, batch: int, cache_slots: int = 0) -> Memory:
  """Returns `TransformerLM.empty_memory` (name of version 0.2)."""
  return TransformerLM(config, None).empty_memory(batch, cache_slots)


class TransformerLM(embedding_and_head.VocabularyModel):
  """A decoder-only language model.

  There is one subtree of parameters per layer, `layer_0`, `layer_1`, ..., even for scanned layers:
  scanned and unrolled runs share checkpoints.

  Attributes:
    config, vocabulary_size: see `embedding_and_head.VocabularyModel`.
    jit_layers: whether layers of one type are traced once, to start programs of many layers sooner;
      `nn.intercept_methods` then sees only one of them. No effect for layers with memories, or with
      mutable intermediates.
  """

  jit_layers: bool = False

  def setup(self):
    c = self.config
    self.dtype = precision.compute_dtype(c)
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    super().setup()  # first: initial values depend on the order of the parameters
    placed = memories.make(c, self.vocabulary_size)
    self.shared_memories = placed.shared
    self.between_blocks = placed.between_blocks
    for memory in (*self.shared_memories, *self.between_blocks):
      setattr(self, memory.name, memory.make())
    self.layer_types = c.layer_types()
    make_block = rematerialization.block_class(c, is_scanned=False)
    layers = []
    for number, layer_type in enumerate(self.layer_types):
      in_block = placed.in_blocks[number]
      layers.append(make_block(c, self.dtype, in_block, layer_type.score_divisor, number))
    self.layer = layers
    if c.final_norm:
      self.final_norm = block.make_norm(c, self.dtype, None)
    self.position_params = self._position_params(param_dtype)
    if c.position == 'absolute':
      init = axis_names.with_axis_names(nn.initializers.normal(0.02), ('position', 'embed'))
      shape = c.positions().max_length, c.width
      self.absolute_position = self.param('absolute_position', init, shape, param_dtype)

  def empty_memory(self, batch: int, cache_slots: int = 0) -> Memory:
    """Returns the memory before the first segment of `batch` streams.

    Args:
      batch: B.
      cache_slots: number of slots of the KV cache, for evaluation and decoding. 0 for training: a
        segment memory then stores the inputs of the layers.

    Keys: `document` int32 [B], document number of the last token; the states of the shared tables
    and of the memories between blocks (see `models.memories`); the earlier tokens, `cache`
    (`CacheSlots`) or `recent` (`layers.context.RecentTokens`); `layers`, the memory of each block
    (see `block.empty_memory`); and in training with dynamic spans, `spans` of the last segment by
    layer (`layers.attention.span.Spans`).
    """
    c = self.config
    placed = memories.make(c)
    memory: Memory = {'document': jnp.zeros((batch,), jnp.int32)}
    memory |= memories.empty_states(placed.between_blocks, batch)
    for table_memory in placed.shared:
      slots = None
      if table_memory.keeps_rows and c.memory is not None and not cache_slots:
        slots = c.memory.length
      memory |= table_memory.empty_state(batch, slots)
    if cache_slots:
      name = 'cache'
      sinks = 0 if c.memory is None else c.memory.sinks
      memory[name] = cache.empty_slots(batch, cache_slots, sinks)
    else:
      name = 'recent'
      memory |= spans.empty_state(c, batch)
      if c.memory is not None:
        memory[name] = contexts.empty_tokens(batch, c.memory.length)
    if c.memory is not None and c.memory.zeros():
      memory[name] = _as_zero_tokens(memory[name], c.memory.zeros())
    layers = tuple(
      block.empty_memory(c, in_block, batch, cache_slots) for in_block in placed.in_blocks
    )
    if any(layers):
      memory['layers'] = layers
    return memory

  def _position_params(self, param_dtype: jnp.dtype) -> tuple[jax.Array, ...] | None:
    """Creates the position parameters shared by all layers. None: no shared parameters."""
    c = self.config
    H = c.head_features
    if c.position == 'table':
      init = axis_names.with_axis_names(nn.initializers.normal(1.0), ('position', 'kv'))
      return (self.param('distance_embedding', init, (c.positions().max_length, H), param_dtype),)
    if c.position != 'relative' or not c.positions().shared_biases:
      return None
    init = axis_names.with_axis_names(nn.initializers.normal(0.02), ('heads', 'kv'))
    shape = c.context_heads, H
    content_bias = self.param('content_bias', init, shape, param_dtype)
    position_bias = self.param('position_bias', init, shape, param_dtype)
    return content_bias, position_bias

  def __call__(
    self,
    tokens_BxT: jax.Array,
    memory: Memory,
    *,
    starts_BxT: jax.Array | None = None,
    valid_BxT: jax.Array | None = None,
    prefix_BxT: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, Memory, dict[str, jax.Array]]:
    """Returns hidden states [B, T, D], the memory for the next segment, auxiliary losses by name.

    Args:
      tokens_BxT: int32 ids.
      memory: the memory returned by the previous segment, or `empty_memory`.
      starts_BxT: true at the first token of a document. None: all rows continue their documents.
      valid_BxT: 0 at padding, only at the end of a row. None: no padding.
      prefix_BxT: true where attention is bidirectional. None: nowhere. Not for relative positions,
        as they have no encoding of later tokens.
      train: whether to apply dropout, with the rng `dropout`.
    """
    c = self.config
    if prefix_BxT is not None and not c.sees_later_tokens:
      raise ValueError(
        f'prefix_BxT attends to later tokens: model.position={c.position!r} only supports None'
      )
    if starts_BxT is None:
      starts_BxT = jnp.zeros(tokens_BxT.shape, bool)
    documents_BxT = document_masks.numbers(starts_BxT, memory['document'])
    last_document_B = document_masks.last_number(starts_BxT, valid_BxT, memory['document'])
    next_memory = {'document': last_document_B}
    segment = contexts.Segment(documents_BxT, starts_BxT, valid_BxT, prefix_BxT, tokens_BxT)
    context, earlier_tokens = self._context(segment, memory)
    next_memory |= earlier_tokens

    # Inputs.
    x_BxTxD, context, states = self._embed_inputs(tokens_BxT, context, memory)
    next_memory |= states
    input_key, layer_keys, output_key, distance_key = self._dropout_keys(train)
    x_BxTxD = mesh_axes.shard_rows(dropout.drop(x_BxTxD, c.outer_dropout, input_key))

    # Layers. All have the same dropout of distance encodings.
    positions = context.positions.replace(distance_key=distance_key)
    context = context.replace(positions=positions)
    layer_memories = memory.get('layers', ({},) * len(self.layer))
    inputs = _LayerInputs(self._type_contexts(context, prefix_BxT), layer_memories, layer_keys)
    x_BxTxD, states, layer_spans = self._apply_layers(x_BxTxD, context, inputs, memory)
    next_memory |= states

    # Outputs.
    x_BxTxD, states = self._apply_memories(Place('before_head'), x_BxTxD, context, memory)
    next_memory |= states
    if 'spans' in memory:
      next_memory['spans'] = jax.lax.stop_gradient(spans.stack(layer_spans))
    aux = {}
    if c.span is not None:
      aux['span'] = c.span.penalty * sum(of_layer.mean for of_layer in layer_spans)
    return self._finalize(x_BxTxD, output_key), next_memory, aux

  def _context(
    self, segment: contexts.Segment, memory: Memory
  ) -> tuple[contexts.Context, dict[str, Any]]:
    """Returns the context of a segment for memories, and the earlier tokens for the next one."""
    name = 'cache' if 'cache' in memory else 'recent'
    tokens = memory.get(name)
    if name == 'cache' and self._needs_pairs():
      tokens = tokens.replace(is_empty=False)  # pairs count from the first slot
    visibility = contexts.Visibility()
    if self.config.memory is not None:
      m = self.config.memory
      visibility = contexts.Visibility(m.window(), m.sees_itself(), m.across_documents)
    num_earlier = 0
    if tokens is not None and not (name == 'cache' and tokens.is_empty):
      num_earlier = tokens.documents.shape[1]
    in_blocks = self._uses_blocks(segment, num_earlier, is_cached=name == 'cache')
    context, tokens = contexts.make(segment, visibility, tokens, in_blocks)
    positions = context.positions.replace(params=self.position_params)
    context = context.replace(positions=positions)
    if tokens is None:
      return context, {}
    return context, {name: tokens}

  def _needs_pairs(self) -> bool:
    """Whether a memory reads the most attended key of each token."""
    return any(placed.needs_pairs for layer in self.layer for placed in layer.placed_memories)

  def _embed_inputs(
    self, tokens_BxT: jax.Array, context: contexts.Context, memory: Memory
  ) -> tuple[jax.Array, contexts.Context, Memory]:
    """Embeds tokens, applies the memories at the input and adds absolute positions.

    Returns [B, T, D], the context with all lookups, and the next states of tables and memories.
    """
    x_BxTxD, vocabulary = self.embed(tokens_BxT)
    context = context.replace(vocabulary=vocabulary)
    shared = {}
    shared_states = {}
    for placed in self.shared_memories:
      module = getattr(self, placed.name)
      shared[placed.shared_name], state = placed.apply(module, x_BxTxD, context, memory)
      shared_states |= state
    context = context.replace(shared=shared)
    x_BxTxD, states = self._apply_memories(Place('input'), x_BxTxD, context, memory)
    x_BxTxD = self._add_positions(x_BxTxD, context.positions.position_BxP)
    return x_BxTxD, context, shared_states | states

  def _type_contexts(
    self, context: contexts.Context, prefix_BxT: jax.Array | None
  ) -> dict[LayerType, contexts.Context]:
    """Returns the context of each type of layers."""
    type_contexts = {}
    for layer_type in self.layer_types:
      if layer_type not in type_contexts:
        type_contexts[layer_type] = self._type_context(layer_type, context, prefix_BxT)
    return type_contexts

  def _type_context(
    self, layer_type: LayerType, context: contexts.Context, prefix_BxT: jax.Array | None
  ) -> contexts.Context:
    """Returns the context of the layers of a type, with its window and its rotation."""
    c = self.config
    p = c.positions()
    max_timescale, scaling = p.max_timescale, p.scaling
    if layer_type.has_window:
      context = contexts.with_window(context, c.attention.window, prefix_BxT)
      if p.window_max_timescale is not None:
        max_timescale, scaling = p.window_max_timescale, None
    if c.position != 'rope' or not layer_type.is_rotated:
      return context
    rotation_of = functools.partial(
      position.rotation,
      features=p.rotated_features(c.head_features),
      min_timescale=p.min_timescale,
      max_timescale=max_timescale,
      dtype=jnp.promote_types(self.dtype, jnp.float32),
      scaling=scaling,
      interleaved=p.interleaved,
    )
    positions = context.positions
    positions = positions.replace(rotation=rotation_of(positions.position_BxP))
    if positions.sink_shift_BxS is not None:
      shift = rotation_of(positions.sink_shift_BxS)
      positions = positions.replace(sink_rotation=shift.without_factor())
    return context.replace(positions=positions)

  def _uses_blocks(self, segment: contexts.Segment, M: int, is_cached: bool) -> bool:
    """Whether attention works in blocks (see `config.kernels`), after M earlier tokens.

    Cached keys and values are not projected by blocks.
    """
    c = self.config
    if c.memory is not None and c.memory.sinks and c.attention_options().window:
      return False  # blocks count the distance to a sink in slots
    needs = {'prefix'} if segment.prefix_BxT is not None else set()
    needs = self._attention_needs(needs)
    if is_cached:
      needs -= kernels.OF_PROJECTED_MEMORY
    return kernels.uses_blocks(c.kernel, needs, self._workload(segment.documents_BxT.shape, M))

  def _attention_needs(self, of_inputs: Iterable[str]) -> frozenset[str]:
    """Returns the required attention features of config and inputs (see `config.kernels`)."""
    needs = frozenset(self.config.attention_needs()) | frozenset(of_inputs)
    if self.is_initializing() or self.is_mutable_collection('intermediates'):
      needs |= {'probabilities'}
    return needs

  def _workload(
    self, shape: tuple[int, int], M: int = 0, asks_for_cudnn: bool = False
  ) -> kernels.Workload:
    """Returns the workload of attention to B rows of T tokens, after M earlier ones."""
    c = self.config
    query = jax.ShapeDtypeStruct((*shape, c.heads, c.head_features), self.dtype)
    return fused.workload(query, M, c.context_key_heads, asks_for_cudnn)

  def _repeats_calls(self, context: contexts.Context) -> bool:
    """Whether layers must not have equal attention calls, see `kernels.repeats_calls`."""
    keys = context.keys
    of_inputs = {
      'mask': not keys.is_plain_causal,
      'window': keys.window is not None,
      'short_prompt': keys.is_short_prompt,
    }
    needs = self._attention_needs(name for name, is_needed in of_inputs.items() if is_needed)
    if keys.is_plain_causal:  # only keys of the segment
      needs -= {'mask', *kernels.OF_PROJECTED_MEMORY}
    kernel = self.config.kernel
    asks_for_cudnn = kernels.asks_for_cudnn(kernel, needs)
    workload = self._workload(context.documents_BxT.shape, asks_for_cudnn=asks_for_cudnn)
    # Layers with a window and layers without one may have different kernels.
    types_needs = needs, needs - {'window'}
    return any(kernels.repeats_calls(kernel, own, workload) for own in types_needs)

  def _apply_layers(
    self,
    x_BxTxD: jax.Array,
    context: contexts.Context,
    inputs: _LayerInputs,
    memory: Memory,
  ) -> tuple[jax.Array, Memory, tuple[span.Spans, ...]]:
    """Applies all layers, in runs of repeated types, and the memories between them.

    Returns [B, T, D], their next memory, and the spans of the layers.
    """
    next_memory, results = {}, []
    must_differ = self._repeats_calls(context)
    layers_in_a_scan = layer_runs.layers_in_a_scan(
      self.config.scan_layers, self.config.layers, must_differ
    )
    for run in self._find_runs(layers_in_a_scan):
      is_scanned = layers_in_a_scan > 0 and run.can_scan
      run_inputs = inputs.of(run.layers)
      x_BxTxD, run_results = self._apply_run(run, x_BxTxD, run_inputs, is_scanned, must_differ)
      results += run_results
      place = Place('after_block', run.end - 1)
      x_BxTxD, states = self._apply_memories(place, x_BxTxD, context, memory)
      next_memory |= states
    layers, layer_spans = zip(*results, strict=True)
    if 'layers' in memory:
      next_memory['layers'] = layers
    return x_BxTxD, next_memory, layer_spans

  def _apply_memories(
    self, place: Place, x_BxTxD: jax.Array, context: contexts.Context, memory: Memory
  ) -> tuple[jax.Array, Memory]:
    """Applies the memories at a place; returns [B, T, D] and their next states by name."""
    next_states = {}
    for placed in self.between_blocks:
      if placed.place == place:
        x_BxTxD, state = placed.apply(getattr(self, placed.name), x_BxTxD, context, memory)
        x_BxTxD = mesh_axes.shard_rows(x_BxTxD)
        next_states |= state
    return x_BxTxD, next_states

  def _finalize(self, x_BxTxD: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
    """Applies the final norm, or dropout without one (as in the official code)."""
    if self.config.final_norm:
      return self.final_norm(x_BxTxD)
    return dropout.drop(x_BxTxD, self.config.outer_dropout, dropout_key)

  def _dropout_keys(
    self, train: bool
  ) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns the keys of the embeddings, the layers, the output and the distances; or Nones."""
    c = self.config
    has_dropout = max(c.dropout, c.attention_dropout, c.inner_dropout, c.outer_dropout) > 0
    if not train or not has_dropout:
      return None, None, None, None
    keys = jax.random.split(self.make_rng('dropout'), c.layers + 2)
    return keys[0], keys[1:-1], keys[-1], jax.random.fold_in(keys[0], 1)

  def _add_positions(self, x_BxTxD: jax.Array, position_BxP: jax.Array | None) -> jax.Array:
    """Adds absolute position encodings to the inputs, if configured."""
    c = self.config
    wide = jnp.promote_types(self.dtype, jnp.float32)
    T = x_BxTxD.shape[1]
    if c.position == 'segment_sinusoid':
      distance_T = jnp.arange(T - 1, -1, -1)
      encoding_BxTxD = position.distance_sinusoid(distance_T, c.width, wide)
    elif c.position == 'sinusoid':
      encoding_BxTxD = position.sinusoid(position_BxP[:, -T:], c.width, wide)
    elif c.position == 'absolute':
      rows_BxT = position_BxP[:, -T:] % self.absolute_position.shape[0]
      encoding_BxTxD = row_sums.take(self.absolute_position, rows_BxT)
    else:
      return x_BxTxD
    return x_BxTxD + encoding_BxTxD.astype(self.dtype)

  def _find_runs(self, layers_in_a_scan: int) -> list[LayerRun]:
    """Returns the runs of layers. Memories of layers and memories between layers split them."""
    splits = set()
    for number, (before, layer) in enumerate(itertools.pairwise(self.layer), 1):
      if not memories.are_alike(layer.placed_memories, before.placed_memories):
        splits.add(number)
    for placed in self.between_blocks:
      if placed.place.point == 'after_block':
        splits.add(placed.place.block + 1)
    return layer_runs.find(self.layer_types, splits, min_period=max(1, layers_in_a_scan))

  def _apply_run(
    self,
    run: LayerRun,
    x_BxTxD: jax.Array,
    inputs: _LayerInputs,
    is_scanned: bool,
    must_differ: bool,
  ) -> tuple[jax.Array, list[LayerResult]]:
    """Applies a run of layers: one after the other, or in one scan over their parameters.

    Args:
      run: the layers.
      x_BxTxD: the input of the first.
      inputs: what these layers read besides.
      is_scanned: whether they are scanned, if memories do not prevent it.
      must_differ: whether layers are traced one by one, see `kernels.repeats_calls`.

    Returns:
      [B, T, D], and the next memory and spans of each layer.
    """
    layer_types = self.layer_types[run.layers]
    is_jitted = self.jit_layers and not self.is_mutable_collection('intermediates')
    placed_memories = self.layer[run.first].placed_memories
    has_parameters_only = memories.are_alike(placed_memories, placed_memories)
    has_variables = not has_parameters_only or self.is_initializing()
    if has_variables or not (is_scanned or is_jitted):
      layers = []
      for layer, layer_type in zip(self.layer[run.layers], layer_types, strict=True):
        layers.append(functools.partial(_apply_bound, layer, inputs.contexts[layer_type]))
      return apply_layers.in_a_row(layers, x_BxTxD, inputs.memory, inputs.dropout_keys)

    params = [
      nn.unbox(self.variables['params'][f'layer_{number}']) for number in range(run.first, run.end)
    ]
    make_block = rematerialization.block_class(self.config, is_scanned)

    def make_apply(number: int) -> Callable[..., tuple[jax.Array, LayerResult]]:
      layer_type = layer_types[number - run.first]
      divisor = layer_type.score_divisor
      layer = make_block(self.config, self.dtype, placed_memories, divisor, number, parent=None)
      return functools.partial(_apply_unbound, layer, inputs.contexts[layer_type])

    if is_scanned:
      period = [make_apply(number) for number in range(run.first, run.first + run.period)]
      return apply_layers.in_a_scan(period, params, x_BxTxD, inputs.memory, inputs.dropout_keys)
    apply_type = {}
    layers = []
    for number, params_of_layer in enumerate(params, run.first):
      layer_type = layer_types[number - run.first]
      key = number if must_differ else layer_type
      if key not in apply_type:
        apply_type[key] = jax.jit(make_apply(number))
      layers.append(functools.partial(apply_type[key], params_of_layer))
    return apply_layers.in_a_row(layers, x_BxTxD, inputs.memory, inputs.dropout_keys)


def _apply_bound(
  layer: nn.Module,
  context: contexts.Context,
  x_BxTxD: jax.Array,
  memory: Memory,
  dropout_key: jax.Array | None,
) -> tuple[jax.Array, LayerResult]:
  """Applies a layer bound to its parameters. Returns [B, T, D] and its result."""
  x_BxTxD, *result = layer(x_BxTxD, context, memory, dropout_key)
  return x_BxTxD, result


def _apply_unbound(
  layer: nn.Module,
  context: contexts.Context,
  params: Any,
  x_BxTxD: jax.Array,
  memory: Memory,
  dropout_key: jax.Array | None,
) -> tuple[jax.Array, LayerResult]:
  """Applies a layer with the parameters. Returns [B, T, D] and its result."""
  variables = {'params': params}
  x_BxTxD, *result = layer.apply(variables, x_BxTxD, context, memory, dropout_key)
  return x_BxTxD, result
