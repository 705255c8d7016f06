"""The Transformer language model: embed, memories, blocks, head.

  hidden, memory, aux = model.apply(variables, tokens, memory, starts_BxT=..., train=...)
  scores = model.apply(variables, hidden, targets, method='scores')

B batch, T segment length, S keys, D model width, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config import kernels
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.attention import LayerKind
from ngrammer_jax.config.place import Place
from ngrammer_jax.layers import axis_names, document_masks, dropout, mesh_axes
from ngrammer_jax.layers import context as contexts
from ngrammer_jax.layers.attention import cache, fused, position
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.layers.state import Memory
from ngrammer_jax.models import block, embedding_and_head, layer_runs, memories, precision, spans

LayerResult = Sequence[Any]  # of one layer: its next memory and its spans

# Arrays that `minimal` saves for the backward pass: the results of all products but those of whole
# scores, and what splash attention and blocks need. Scores, norms, convolutions, rotations and sums
# are computed again.
SAVED_NAMES = 'attended', 'attention_output', 'inner_features', 'feed_forward_output', 'memory'


def _saved_names(config):
  """Returns the names of the arrays that `minimal` saves."""
  c = config
  # The gradients of norms, convolutions, learned scales and biases need what these are applied to.
  is_changed = c.convolution is not None or c.attention_options().query_key_norm is not None
  is_changed |= c.per_dim_scale or 'distances' in c.attention_needs()
  return *SAVED_NAMES, 'projected' if is_changed else 'heads'


def _as_zero_tokens(tokens, count):
  """Turns the last empty slots into tokens of the first document, with zeros as keys and values."""
  index_M = jnp.arange(-tokens.documents.shape[1], 0)
  tokens = tokens.replace(documents=jnp.where(index_M >= -count, 0, tokens.documents))
  if isinstance(tokens, cache.CacheSlots):
    tokens = tokens.replace(index=tokens.index + index_M)
  return tokens


def empty_memory(config: model_config.ModelConfig, batch: int, cache_slots: int = 0) -> Memory:
  """Returns `TransformerLM.empty_memory`; scripts for version 0.2 call it so."""
  return TransformerLM(config, None).empty_memory(batch, cache_slots)


class TransformerLM(embedding_and_head.VocabularyModel):
  """A decoder-only language model.

  There is one subtree of parameters per layer, `layer_0`, `layer_1`, ..., also when the
  layers are scanned: scanned and unrolled runs share checkpoints.

  Attributes:
    config, vocabulary_size: see `embedding_and_head.VocabularyModel`.
    jit_layers: whether layers of one kind are traced once, so that programs of many layers start
      sooner; `nn.intercept_methods` then sees only one of them. Not for layers with memories, nor
      where intermediates are asked for.
  """

  jit_layers: bool = False

  def setup(self):
    c, V = self.config, self.vocabulary_size
    dtype = self.dtype = precision.compute_dtype(c)
    param_dtype = jnp.promote_types(dtype, jnp.float32)
    super().setup()  # first: initial values depend on the order of the parameters
    own = memories.make(c, V)
    self.between_blocks = own.between_blocks
    for memory in own.between_blocks:
      setattr(self, memory.name, memory.make())
    self.kinds = c.layer_kinds()
    self.layers_in_a_scan = layer_runs.layers_in_a_scan(c.scan_layers, c.layers)
    self.layer = [
      self._block(scanned=False)(c, dtype, in_block, kind.score_divisor)
      for in_block, kind in zip(own.in_blocks, self.kinds, strict=True)
    ]
    if c.final_norm:
      self.final_norm = block.make_norm(c, dtype, None)
    self.position_params = self._position_params(param_dtype)
    if c.position == 'absolute':
      init = axis_names.with_axis_names(nn.initializers.normal(0.02), (None, 'embed'))
      shape = c.positions().max_length, c.width
      self.absolute_position = self.param('absolute_position', init, shape, param_dtype)

  def empty_memory(self, batch: int, cache_slots: int = 0) -> Memory:
    """Returns the memory before the first segment of `batch` streams.

    Args:
      batch: B.
      cache_slots: number of slots of the KV cache, for evaluation and decoding. 0 for training,
        where a segment memory stores the inputs of the layers.

    Keys: `document` int32 [B], document number of the last token; the states of the memories
    between blocks (see `models.memories`); the earlier tokens, `cache` (`CacheSlots`) or `recent`
    (`layers.context.RecentTokens`); `layers`, the memory of each block (see
    `block.empty_memory`); and in training with dynamic spans, `spans`, those of the last segment by
    layer (`layers.attention.span.Spans`).
    """
    c, memory = self.config, {'document': jnp.zeros((batch,), jnp.int32)}
    own = memories.make(c)
    memory |= memories.empty_states(own.between_blocks, batch)
    if cache_slots:
      sinks = 0 if c.memory is None else c.memory.sinks
      memory['cache'] = cache.empty_slots(batch, cache_slots, sinks)
    else:
      memory |= spans.empty_state(c, batch)
    if c.memory is not None and not cache_slots:
      memory['recent'] = contexts.empty_tokens(batch, c.memory.length)
    if c.memory is not None and c.memory.zeros():
      names = memory.keys() & {'cache', 'recent'}
      memory |= {name: _as_zero_tokens(memory[name], c.memory.zeros()) for name in names}
    layers = tuple(block.empty_memory(c, each, batch, cache_slots) for each in own.in_blocks)
    return memory | ({'layers': layers} if any(layers) else {})

  def _position_params(self, param_dtype):
    """Creates the position parameters that all layers share."""
    c, H = self.config, self.config.head_features
    if c.position == 'table':
      init = axis_names.with_axis_names(nn.initializers.normal(1.0), (None, 'kv'))
      return (self.param('distance_embedding', init, (c.positions().max_length, H), param_dtype),)
    if c.position != 'relative' or not c.positions().shared_biases:
      return None
    init = axis_names.with_axis_names(nn.initializers.normal(0.02), ('heads', 'kv'))
    shape, names = (c.context_heads, H), ('content_bias', 'position_bias')
    return tuple(self.param(name, init, shape, param_dtype) for name in names)

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
      memory: the memory that the previous segment returned, or `empty_memory`.
      starts_BxT: true at the first token of a document. None: all rows continue their documents.
      valid_BxT: 0 at padding, which is at the end of a row. None: no padding.
      prefix_BxT: true where attention is bidirectional. None: nowhere. Relative positions do not
        support it, as they have no encoding of later tokens.
      train: whether to apply dropout, with the rng `dropout`.
    """
    c = self.config
    if prefix_BxT is not None and not c.sees_later_tokens:
      raise ValueError(
        f'a prefix attends to later tokens, which model.position={c.position!r} does not support'
      )
    if starts_BxT is None:
      starts_BxT = jnp.zeros(tokens_BxT.shape, bool)
    documents_BxT = document_masks.numbers(starts_BxT, memory['document'])
    # The next segment continues the document of the last token that is not padding.
    counted_BxT = starts_BxT if valid_BxT is None else starts_BxT & (valid_BxT > 0)
    next_memory = {'document': document_masks.numbers(counted_BxT, memory['document'])[:, -1]}
    segment = contexts.Segment(documents_BxT, starts_BxT, valid_BxT, prefix_BxT, tokens_BxT)
    context, tokens_memory = self._context(segment, memory)
    next_memory |= tokens_memory
    x_BxTxD, vocabulary = self.embed(tokens_BxT)
    context = context.replace(vocabulary=vocabulary)
    x_BxTxD, states = self._apply_memories(Place('input'), x_BxTxD, context, memory)
    next_memory |= states
    x_BxTxD = self._add_positions(x_BxTxD, context.positions.position_BxP)
    before, keys, after, distance_key = self._dropout_keys(train)
    x_BxTxD = mesh_axes.shard_rows(dropout.drop(x_BxTxD, c.outer_dropout, before))
    # All layers have the same dropout of distance encodings.
    positions = context.positions.replace(distance_key=distance_key)
    context = context.replace(positions=positions)
    kind_contexts = self._kind_contexts(context, prefix_BxT)
    x_BxTxD, states, layer_spans = self._layers(x_BxTxD, context, kind_contexts, memory, keys)
    next_memory |= states
    if 'spans' in memory:
      next_memory['spans'] = jax.lax.stop_gradient(spans.stack(layer_spans))
    aux = (
      {} if c.span is None else {'span': c.span.penalty * sum(each.mean for each in layer_spans)}
    )
    return self._finalize(x_BxTxD, after), next_memory, aux

  def _context(self, segment, memory):
    """Returns the context of a segment for memories, and the earlier tokens of the next one."""
    c, name = self.config, 'cache' if 'cache' in memory else 'recent'
    tokens = memory.get(name)
    visibility = contexts.Visibility()
    if c.memory is not None:
      m = c.memory
      visibility = contexts.Visibility(m.window(), m.sees_itself(), m.across_documents)
    in_blocks = self._uses_blocks(segment, 0 if tokens is None else tokens.documents.shape[1])
    context, tokens = contexts.make(segment, visibility, tokens, in_blocks)
    positions = context.positions.replace(params=self.position_params)
    return context.replace(positions=positions), {} if tokens is None else {name: tokens}

  def _kind_contexts(self, context, prefix_BxT):
    """Returns the context of each kind of layers: its window and its rotation."""
    c, p = self.config, self.config.positions()
    wide = jnp.promote_types(self.dtype, jnp.float32)

    def context_of(kind):
      result, max_timescale, scaling = context, p.max_timescale, p.scaling
      if kind.has_window:
        result = contexts.with_window(result, c.attention.window, prefix_BxT)
        if p.window_max_timescale is not None:
          max_timescale, scaling = p.window_max_timescale, None
      if c.position != 'rope' or not kind.is_rotated:
        return result
      features, timescales = p.rotated_features(c.head_features), (p.min_timescale, max_timescale)
      options = features, *timescales, wide, scaling, p.interleaved
      rotation = position.rotation(context.positions.position_BxP, *options)
      positions = context.positions.replace(rotation=rotation)
      if positions.sink_shift_BxS is not None:
        shift = position.rotation(positions.sink_shift_BxS, *options)
        positions = positions.replace(sink_rotation=shift.without_factor())
      return result.replace(positions=positions)

    return {kind: context_of(kind) for kind in dict.fromkeys(self.kinds)}

  def _uses_blocks(self, segment, M):
    """Whether attention works in blocks (see `config.kernels`)."""
    c, (B, T) = self.config, segment.documents_BxT.shape
    if c.memory is not None and c.memory.sinks and c.attention_options().window:
      return False  # blocks count the distance to a sink in slots
    needs = {
      **c.attention_needs(),
      'prefix': segment.prefix_BxT is not None,
      'probabilities': self.is_initializing() or self.is_mutable_collection('intermediates'),
    }
    query = jax.ShapeDtypeStruct((B, T, c.heads, c.head_features), self.dtype)
    needs = frozenset(name for name, is_needed in needs.items() if is_needed)
    return kernels.uses_blocks(c.kernel, needs, fused.workload(query, M, c.context_key_heads))

  def _layers(self, x_BxTxD, context, kind_contexts, memory, keys):
    """Applies all layers, in runs of repeated kinds, and the memories between them.

    Returns [B, T, D], their next memory, and the spans of the layers.
    """
    layer_memories = memory.get('layers', ({},) * len(self.layer))
    next_memory, results = {}, []
    for run in self._find_runs():
      run_keys = None if keys is None else keys[run.layers]
      run_memories = layer_memories[run.layers]
      x_BxTxD, rest = self._apply_run(run, x_BxTxD, kind_contexts, run_memories, run_keys)
      results += rest
      place = Place('after_block', run.end - 1)
      x_BxTxD, states = self._apply_memories(place, x_BxTxD, context, memory)
      next_memory |= states
    layers, layer_spans = zip(*results, strict=True)
    next_memory |= {'layers': layers} if 'layers' in memory else {}
    return x_BxTxD, next_memory, layer_spans

  def _apply_memories(self, place, x_BxTxD, context, memory):
    """Applies the memories at a place; returns [B, T, D] and their next states by name."""
    next_states = {}
    for placed in self.between_blocks:
      if placed.place == place:
        x_BxTxD, state = placed.apply(getattr(self, placed.name), x_BxTxD, context, memory)
        x_BxTxD, next_states = mesh_axes.shard_rows(x_BxTxD), next_states | state
    return x_BxTxD, next_states

  def _finalize(self, x_BxTxD, dropout_key):
    """Applies the final norm or, as in the official code of models without one, dropout."""
    if self.config.final_norm:
      return self.final_norm(x_BxTxD)
    return dropout.drop(x_BxTxD, self.config.outer_dropout, dropout_key)

  def _dropout_keys(self, train):
    """Returns the keys of the embeddings, the layers, the output and the distances; or Nones."""
    c = self.config
    if not train or not max(c.dropout, c.attention_dropout, c.inner_dropout, c.outer_dropout):
      return (None,) * 4
    keys = jax.random.split(self.make_rng('dropout'), c.layers + 2)
    return keys[0], keys[1:-1], keys[-1], jax.random.fold_in(keys[0], 1)

  def _add_positions(self, x_BxTxD, position_BxP):
    """Adds absolute position encodings to the inputs, if the config has them."""
    c, wide = self.config, jnp.promote_types(self.dtype, jnp.float32)
    T = x_BxTxD.shape[1]
    if c.position == 'segment_sinusoid':
      distance_T = jnp.arange(T - 1, -1, -1)
      encoding_BxTxD = position.distance_sinusoid(distance_T, c.width, wide)
    elif c.position == 'sinusoid':
      encoding_BxTxD = position.sinusoid(position_BxP[:, -T:], c.width, wide)
    elif c.position == 'absolute':
      rows_BxT = position_BxP[:, -T:] % self.absolute_position.shape[0]
      encoding_BxTxD = self.absolute_position[rows_BxT]
    else:
      return x_BxTxD
    return x_BxTxD + encoding_BxTxD.astype(self.dtype)

  def _find_runs(self) -> list[layer_runs.LayerRun]:
    """Returns the runs of layers. Memories of layers and memories between layers split them."""
    splits = set()
    for number, (before, layer) in enumerate(itertools.pairwise(self.layer), 1):
      if layer.own_memories != before.own_memories:
        splits.add(number)
    for placed in self.between_blocks:
      if placed.place.point == 'after_block':
        splits.add(placed.place.block + 1)
    return layer_runs.find(self.kinds, splits, min_period=max(1, self.layers_in_a_scan))

  def _block(self, scanned):
    """Returns the block class, with the rematerialisation of the config."""
    if self.config.remat == 'none':
      return block.Block
    # Rows from the memory of the host, which cannot be read again.
    names = table.VALUES, *(_saved_names(self.config) if self.config.remat == 'minimal' else ())
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return nn.remat(block.Block, policy=policy, prevent_cse=not scanned)

  def _apply_run(
    self,
    run: layer_runs.LayerRun,
    x_BxTxD: jax.Array,
    kind_contexts: Mapping[LayerKind, contexts.Context],
    memory: Sequence[Any],
    dropout_keys: jax.Array | None,
  ) -> tuple[jax.Array, list[LayerResult]]:
    """Applies a run of layers: one after the other, or in one scan over their parameters.

    Args:
      run: the layers.
      x_BxTxD: their input.
      kind_contexts: context of each kind of layers.
      memory: memory of each layer of the run.
      dropout_keys: key of each layer of the run. None: no dropout.

    Returns:
      [B, T, D], and of each layer the next memory and the spans.
    """
    kinds = self.kinds[run.layers]
    is_scanned = self.layers_in_a_scan > 0 and run.can_scan
    is_jitted = self.jit_layers and not self.is_mutable_collection('intermediates')
    # Memories may have codebooks.
    has_variables = bool(self.layer[run.first].own_memories) or self.is_initializing()
    if has_variables or not (is_scanned or is_jitted):
      layers = []
      for layer, kind in zip(self.layer[run.layers], kinds, strict=True):
        layers.append(functools.partial(_apply_bound, layer, kind_contexts[kind]))
      return _apply_in_a_row(layers, x_BxTxD, memory, dropout_keys)

    params = [
      nn.unbox(self.variables['params'][f'layer_{number}']) for number in range(run.first, run.end)
    ]
    make_block = self._block(is_scanned)

    def make_apply(kind):
      block_of_kind = make_block(self.config, self.dtype, (), kind.score_divisor, parent=None)
      return functools.partial(_apply_unbound, block_of_kind, kind_contexts[kind])

    if is_scanned:
      period = [make_apply(kind) for kind in kinds[: run.period]]
      return _scan_layers(period, params, x_BxTxD, memory, dropout_keys)
    apply_by_kind = {kind: jax.jit(make_apply(kind)) for kind in set(kinds)}
    layers = [
      functools.partial(apply_by_kind[kind], params_of_layer)
      for kind, params_of_layer in zip(kinds, params, strict=True)
    ]
    return _apply_in_a_row(layers, x_BxTxD, memory, dropout_keys)


def _apply_bound(layer, context, x_BxTxD, memory, dropout_key):
  """Applies a layer that is bound to its parameters. Returns [B, T, D] and its result."""
  x_BxTxD, *result = layer(x_BxTxD, context, memory, dropout_key)
  return x_BxTxD, result


def _apply_unbound(layer, context, params, x_BxTxD, memory, dropout_key):
  """Applies a layer with the parameters. Returns [B, T, D] and its result."""
  variables = {'params': params}
  x_BxTxD, *result = layer.apply(variables, x_BxTxD, context, memory, dropout_key)
  return x_BxTxD, result


def _apply_in_a_row(
  layers: Sequence[Callable[..., tuple[jax.Array, LayerResult]]],
  x_BxTxD: jax.Array,
  memory: Sequence[Any],
  dropout_keys: jax.Array | None,
) -> tuple[jax.Array, list[LayerResult]]:
  """Applies layers one after the other. Returns [B, T, D] and the result of each."""
  results = []
  for index, layer in enumerate(layers):
    dropout_key = None if dropout_keys is None else dropout_keys[index]
    x_BxTxD, result = layer(x_BxTxD, memory[index], dropout_key)
    results.append(result)
  return x_BxTxD, results


def _scan_layers(
  period: Sequence[Callable[..., tuple[jax.Array, LayerResult]]],
  params: Sequence[Any],
  x_BxTxD: jax.Array,
  memory: Sequence[Any],
  dropout_keys: jax.Array | None,
) -> tuple[jax.Array, list[LayerResult]]:
  """Applies layers in a scan over repetitions of a period.

  Args:
    period: applies one layer, for each layer of a period.
    params: parameters of each layer of all repetitions.
    x_BxTxD: input of the first layer.
    memory: memory of each layer.
    dropout_keys: key of each layer. None: no dropout.

  Returns:
    [B, T, D], and the result of each layer.
  """
  stacked_layers = []
  for index in range(len(period)):
    repetitions = slice(index, None, len(period))
    keys = None if dropout_keys is None else dropout_keys[repetitions]
    stacked_layers.append((_stack(params[repetitions]), _stack(memory[repetitions]), keys))

  def apply_period(x_BxTxD, layers):
    results = []
    for apply, (params, memory, dropout_key) in zip(period, layers, strict=True):
      x_BxTxD, result = apply(params, x_BxTxD, memory, dropout_key)
      results.append(result)
    return x_BxTxD, results

  x_BxTxD, stacked_results = jax.lax.scan(apply_period, x_BxTxD, stacked_layers)
  results = []
  for number in range(len(params)):
    repetition, index = divmod(number, len(period))
    results.append(_take(stacked_results[index], repetition))
  return x_BxTxD, results


def _stack(trees: Sequence[Any]) -> Any:
  """Stacks the corresponding arrays of trees along a new first axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _take(tree: Any, index: int) -> Any:
  """Takes one entry along the first axis of all arrays of a tree."""
  return jax.tree.map(lambda leaf: leaf[index], tree)
