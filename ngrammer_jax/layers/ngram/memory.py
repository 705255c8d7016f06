"""N-gram memories: keys, a hash, tables and a join.

  keys   ids of the present and earlier tokens: tokens, classes of tokens, bytes, clusters
  hash   for every order and head, the row of the n-gram in a table (see `hashing`)
  table  one parameter for all orders and heads, looked up by gather
  join   how the looked-up vectors e enter the model: a gate, a sum, or per head as in N-Grammer

| memory | key | hash | join |
|---|---|---|---|
| Engram (Cheng et al. 2026) | compressed | engram | gate |
| PLE of Qwen3.8-Flash-Next | tokens | ple | gate |
| Over-Encoding (Huang et al. 2025), LongCat | tokens | polynomial | mean |
| BLT (Pagnoni et al. 2024) | bytes | blt | sum |
| N-Grammer (Roy et al. 2022) | clusters | praxis | concat |
| per-layer embeddings (Gemma 3n) | tokens, 1-grams | id | product |
| STEM (2026) | tokens, 1-grams | id | replace, in the feed-forward |
| DeepEmbed (RWKV-8) | tokens, 1-grams | id | multiply, after the feed-forward |
| value embeddings (modded-nanogpt, nanochat) | tokens, 1-grams | id | in values |

In the feed-forward the input x is the up projection or the output, and E its features:

  y = x + sum_i e_i   ('sum'),   y = x prod_i e_i   ('multiply'),   y = sum_i e_i   ('replace')

With `start='neutral'` the memory does not change the model at step 0. The values of a gate (see
`gate`) and the norm of a product (see `product`) start at 0. Every other join m becomes y = x + g
(m(x) - x) with a learned vector g from 0. A gate or a sum over a table of zeros is already neutral,
and would learn nothing with a gate of 0 too. Multiplying rows that start at 1 are neutral as well.
In the values of attention (see `value_join`) the table, or the weight of an interpolation, starts
at 0.

A shared table (`table='name'`) is a module of its own, with `is_table`: it is looked up once per
segment, and memories read its rows from the context.

In the values of attention, earlier tokens with recomputed values read their rows again. The table,
shared or not, remembers the rows looked up by the last M tokens.

B batch, T segment length, D model width, G branches of the residual stream, N places of the longest
n-gram, K heads of an order, I = orders x K, E width of a looked-up vector, R earlier tokens, M
earlier tokens whose values are computed again, P = M + T.
"""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.config.ngram import hashes
from ngrammer_jax.config.ngram import sizes as ngram_sizes
from ngrammer_jax.config.ngram.memory import CLUSTER_KEYS, PER_HEAD_JOINS, NGramMemoryConfig
from ngrammer_jax.layers import axis_names, document_masks, token_classes, token_ids
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram import (
  gate,
  hashing,
  host_rows,
  initial_tables,
  pairs,
  per_head,
  product,
  quantizer,
  signs,
  table,
  token_sum,
  uint64,
  value_join,
  windows,
)
from ngrammer_jax.layers.state import State

# Ids of BLT: a byte plus 4, and 1 before a document.
BYTE_OFFSET = 4
DOCUMENT_START = 1
NO_ROW = -1  # of a token that does not exist


class NGramMemory(nn.Module):
  """Adds looked-up vectors of n-grams to the input [B, T, D] or [B, T, G, D].

  In the values of attention, the input is the values [B, P, D] of all key heads.

  The table is one parameter [I x rows, E] with the logical axes `table.AXES`. With the key
  `compressed`, the collection `codebook` has `token_classes` [V] and, for hashes whose multipliers
  depend on the number of classes, `multipliers` [N, 2]; `init` gives every token its own class.
  Random signs are in `codebook` too, `signs` int8 [R, E].

  Attributes:
    options: the config of the memory, maybe from a preset.
    vocabulary_size: V, number of token ids.
    width: D, number of features of the input.
    block: number of the block with the memory, one of `options.layers`; 0 at the input. The hash
      depends on it.
    branches: G, number of branches of the residual stream; 1 unless the memory has a gate.
    dtype: dtype of the output.
    id_columns: K if the state stores the ids of earlier tokens for each head, 1 if all heads share
      the same (token) ids. None: K with clusters, else 1. The N-Grammer layer always stores K.
    is_at_embedding: whether the input is the embedding; the quantiser may then read the embedding.
    is_table: whether it is a shared table. It then returns the looked-up rows, [B, P, I, E],
      instead of y.
    key_heads: number of key heads of values of attention.
    model_width: width of the inputs of attention, for initial values. None: D.
  """

  options: NGramMemoryConfig
  vocabulary_size: int | None
  width: int
  block: int = 0
  branches: int = 1
  dtype: jnp.dtype = jnp.float32
  id_columns: int | None = None
  is_at_embedding: bool = False
  is_table: bool = False
  key_heads: int = 1
  model_width: int | None = None

  def empty_state(self, batch: int, slots: int | None = None) -> State | None:
    """Returns the state before the first segment; None for a memory without state.

    Keys: `window`, see `windows.Windows`, or `ids`, see `pairs.AttendedPairs`; with a convolution,
    its last inputs `rows` [B, R', G, D] and the `position` of the next token, int32 [B]; for a
    shared table, or in the values of attention, `looked_up`, the lookups of the last M = slots
    tokens (see `_lookups`).
    """
    if self._is_paired:
      return self._pairs().empty_state(batch, self.options.heads, slots)
    state = {}
    if self.has_table:
      columns = self.options.heads if self.has_clusters else 1
      window = self.windows().empty_state(batch, self.id_columns or columns)
      if window is not None:
        state['window'] = window
    if self._may_lack_rows and slots:
      shape = (batch, slots, len(self.options.orders) * self.options.heads)
      state['looked_up'] = {'rows': jnp.full(shape, NO_ROW, jnp.int32)}
      if self.options.signs:
        state['looked_up']['signs'] = jnp.zeros(shape, jnp.int32)
    convolution = self._convolution()
    if convolution is not None:
      shape = (batch, convolution.rows, self.branches, self.width)
      state['rows'] = jnp.zeros(shape, self.dtype)
      state['position'] = jnp.zeros((batch,), jnp.int32)
    return state or None

  def __call__(
    self, x: jax.Array, context: Context, state: State | None = None
  ) -> tuple[jax.Array, State | None]:
    """Returns x with the memory, and the next state.

    Args:
      x: [B, T, D], or [B, T, G, D] for a gate of a residual stream with several branches, or
        [B, P, D] for values of attention.
      context: of the segment; `tokens_BxT` is required unless n-grams are of clusters, and
        `inputs_BxPxD` in the values of attention; documents and padding are optional.
      state: returned by the previous segment. None: the start of a stream.

    Ids must be below `vocabulary_size`. Outside of `jit`, other ids are an error. In `jit`, their
    values are not known, and other ids look up some row: check them before.

    Raises:
      ValueError: x does not have D features or G branches, there are no tokens or another number of
        them, or the state belongs to another number of rows or to other options.
      TypeError: the context is an array of tokens, or the options are not an `NGramMemoryConfig`.
      BadInput: an option has an invalid value, the mesh has explicit axes, or ids are known to be
        beyond the vocabulary.
    """
    y, next_state, _ = self.join_with_ids(x, context, state)
    return y, next_state

  @nn.compact
  def join_with_ids(
    self, x: jax.Array, context: Context, state: State | None = None
  ) -> tuple[jax.Array, State | None, jax.Array | None]:
    """Returns the result of `__call__`, and the ids in the n-grams of this segment.

    They are the key of each token, int32 [B, T, K], or [B, T, 1] if all heads have the same (see
    `id_columns`): cluster ids, token ids, classes of tokens or bytes. None without a table.
    """
    self._check_inputs(x, context)
    self._check_state(state, len(x))
    if state is None:
      state = self.empty_state(len(x))
    ids_BxTxK = None
    if self.has_table:
      ids_BxTxK = self._ids(x, context)
      e_BxTxIxE, next_state = self._look_up(ids_BxTxK, context, state)
    else:
      e_BxTxIxE = self._shared_rows(x.shape[1], context)
      next_state = {}
    if self._records_rows:  # nothing else is asked for
      return x, next_state or None, ids_BxTxK
    if self.is_table:
      return e_BxTxIxE, next_state or None, ids_BxTxK
    if self._is_in_values:
      y = self._add_to_values(x, e_BxTxIxE, context)
      return y, next_state or None, ids_BxTxK
    if self.options.join in PER_HEAD_JOINS:
      heads_BxTxKxH = x.reshape(*x.shape[:2], self.options.heads, -1)
      y = per_head.combine(heads_BxTxKxH, e_BxTxIxE, self.options.join, self.dtype)
      y = y.reshape(x.shape)
      y = self._without_padding(y, context)
    else:
      e_BxTxIxE = self._without_padding(e_BxTxIxE.astype(self.dtype), context)
      y, convolution_state = self._join(x, e_BxTxIxE, context, state)
      next_state |= convolution_state
    if self.options.start == 'neutral' and not self._is_neutral():
      zeros = axis_names.with_axis_names(nn.initializers.zeros, (None,))
      g_D = self.param('mix', zeros, (self.width,), self._wide_dtype)
      y = x + g_D.astype(self.dtype) * (y - x)
    if self._is_paired:
      next_state = self._pairs().advance(ids_BxTxK, context, state, after_BxTxD=y)
    return y, next_state or None, ids_BxTxK

  def _is_neutral(self) -> bool:
    """Whether the join starts as the identity without a vector g."""
    o = self.options
    if o.join in ('gate', 'product'):
      return True
    if o.join == 'multiply':
      return o.starts_with_equal_rows
    return o.join == 'sum' and o.amplification == 'none' and o.starts_with_equal_rows

  def _check_inputs(self, x: jax.Array, context: Context) -> None:
    """Raises the errors of `__call__`."""
    if not isinstance(self.options, NGramMemoryConfig):
      raise TypeError(
        f'the options of an n-gram memory are of type {type(self.options).__name__}: pass '
        f"NGramMemoryConfig(preset='engram', ...), from ngrammer_jax.config"
      )
    fields.check_each_value(self.options)
    if not isinstance(context, Context):
      raise TypeError(
        f'the context of an n-gram memory is of type {type(context).__name__}: pass '
        f'context.Context(tokens_BxT=tokens), with `from ngrammer_jax.layers import context`'
      )
    axes = jax.typeof(x).sharding.mesh.explicit_axes
    if axes:
      raise errors.BadInput(
        f'an n-gram memory does not support the explicit mesh axes {", ".join(axes)}, since XLA '
        f'shards the look-ups: make the mesh with axis_types=(AxisType.Auto,), '
        f'or call the layer in jax.sharding.auto_axes'
      )
    if self.branches != 1 and self.options.join != 'gate':
      raise ValueError(
        f'an n-gram memory with branches={self.branches} needs join="gate", not '
        f'join={self.options.join!r}: use branches=1, or a gate'
      )
    shapes = []
    if self.branches == 1:
      shapes.append((self.width,))
    if self.options.join == 'gate':
      shapes.append((self.branches, self.width))
    if x.shape[2:] not in shapes:
      features = ', '.join(map(str, shapes[0]))
      raise ValueError(
        f'the input of an n-gram memory has the shape {list(x.shape)}: expected hidden states '
        f'[B, T, {features}] for branches={self.branches} and width={self.width}'
      )
    needs_tokens = not self.has_clusters or self.options.boundary == 'eos_id'
    needs_tokens &= self.has_table
    if needs_tokens and context.tokens_BxT is None:
      raise ValueError('an n-gram memory needs the tokens: set context.tokens_BxT')
    if needs_tokens:
      token_ids.check_range('context.tokens_BxT', context.tokens_BxT, self.vocabulary_size)
      shape = jnp.shape(context.tokens_BxT)
      # The values of attention may include earlier tokens.
      if shape[:2] != x.shape[:2] and not self._is_in_values:
        raise ValueError(
          f'context.tokens_BxT has the shape {list(shape)}, but the input has the shape '
          f'{list(x.shape)}: pass the token ids {list(x.shape[:2])} of the same segment'
        )

  def _check_state(self, state: State | None, batch: int) -> None:
    """Raises ValueError for a state of another number of rows, or of other options."""
    if state is None:
      return
    remedy = (
      f'pass the state that the previous segment of the same rows returned, or empty_state({batch})'
    )
    for leaf in jax.tree.leaves(state):
      if jnp.shape(leaf)[:1] != (batch,):
        raise ValueError(
          f'the state of an n-gram memory has arrays of the shape {list(jnp.shape(leaf))}, but the '
          f'input has {batch} rows: {remedy}'
        )
    expected = jax.eval_shape(lambda: self.empty_state(batch)) or {}
    for name in ('window', 'rows', 'position'):
      shapes = jax.tree.map(jnp.shape, state.get(name))
      expected_shapes = jax.tree.map(jnp.shape, expected.get(name))
      if shapes != expected_shapes:
        raise ValueError(
          f'the state of an n-gram memory has {name!r} of the shape {shapes}, but its options '
          f'need {expected_shapes}: {remedy}'
        )

  def _window_ngrams(
    self, ids_BxTxK: jax.Array, context: Context, state: State | None
  ) -> tuple[list[jax.Array], State]:
    """Returns the ids at each place of the n-grams [B, T, K], and the next state."""
    documents_BxT = context.documents_BxT
    if self.options.boundary == 'none':
      documents_BxT = None
    window = None
    if state is not None:
      window = state.get('window')
    ngrams, window = self.windows()(
      ids_BxTxK,
      documents_BxT,
      window,
      valid_BxT=context.valid_BxT,
      tokens_BxT=context.tokens_BxT,
    )
    if window is None:
      return ngrams, {}
    return ngrams, {'window': window}

  def _look_up(
    self, ids_BxTxK: jax.Array, context: Context, state: State | None
  ) -> tuple[jax.Array, State]:
    """Returns the vectors of all n-grams [B, T, I, E], and the next state.

    Remembered rows of earlier tokens come first, [B, P, I, E].
    """
    if self._is_paired:
      ngrams = self._pairs()(ids_BxTxK, context, state)
      next_state = {}
    else:
      ngrams, next_state = self._window_ngrams(ids_BxTxK, context, state)
    lookups = self._lookups(ngrams)
    if self._may_lack_rows and context.valid_BxT is not None:
      is_valid_BxTx1 = context.valid_BxT[..., None] > 0
      lookups['rows'] = jnp.where(is_valid_BxTx1, lookups['rows'], NO_ROW)
    if state is not None and 'looked_up' in state:

      def keep_last(before, new):
        return cache.keep_last(before, new, context.valid_BxT)

      def concatenate(before, new):
        return jnp.concatenate([before, new], axis=1)

      next_state['looked_up'] = jax.tree.map(keep_last, state['looked_up'], lookups)
      lookups = jax.tree.map(concatenate, state['looked_up'], lookups)
    return self._vectors(lookups), next_state

  def _lookups(self, ngrams: list[jax.Array]) -> dict[str, jax.Array]:
    """Returns `rows` of n-grams in their heads, int32 [B, T, I], and rows of their `signs`.

    The intermediate `lookup` has the `ids` [B, T, 1 or K] at each place and the `rows` [B, T, I].
    """
    keys, multipliers = self._keys(ngrams)
    rows_BxTxI = checkpoint_name(self.ngram_hash()(keys, multipliers), 'memory')
    self.sow('intermediates', 'lookup', {'ids': keys, 'rows': rows_BxTxI})
    lookups = {'rows': rows_BxTxI}
    o = self.options
    if o.signs:
      by_order = []
      for order in o.orders:
        row_BxTxK = signs.rows(keys[:order], o.sign_hash, o.signs)
        shape = (*row_BxTxK.shape[:2], o.heads)
        by_order.append(jnp.broadcast_to(row_BxTxK, shape))
      lookups['signs'] = jnp.concatenate(by_order, axis=-1)
    return lookups

  def _vectors(self, lookups: dict[str, jax.Array]) -> jax.Array:
    """Returns the vectors of `_lookups`, [B, T, I, E]; zeros for NO_ROW."""
    rows_BxTxI = lookups['rows']
    *first, _ = ngram_sizes.first_rows(self.options.row_rule, self.ngram_hash().sizes)
    first_I = np.array(first, np.int32)
    e_BxTxIxE = self._table_rows(jnp.maximum(rows_BxTxI, 0) + first_I)
    if self._may_lack_rows:
      e_BxTxIxE = jnp.where((rows_BxTxI == NO_ROW)[..., None], 0, e_BxTxIxE)
    if self.options.signs:
      e_BxTxIxE *= self._signs()[lookups['signs']].astype(e_BxTxIxE.dtype)
    if self.options.untrained_row is None:
      return e_BxTxIxE
    is_trained_BxTxIx1 = (rows_BxTxI != self.options.untrained_row)[..., None]
    return jnp.where(is_trained_BxTxIx1, e_BxTxIxE, jax.lax.stop_gradient(e_BxTxIxE))

  def _signs(self) -> jax.Array:
    """Returns the (untrained) random signs, int8 [R, E]."""
    shape = (self.options.signs, self.table_shape()[1])

    def draw():
      return jax.random.rademacher(self.make_rng('params'), shape, jnp.int8)

    init = axis_names.with_axis_names(draw, (None, None))
    return self.variable('codebook', 'signs', init).value

  def _shared_rows(self, count: int, context: Context) -> jax.Array:
    """Returns the last vectors of the shared table, or its slice of them, [B, count, I, E].

    Raises:
      ValueError: they are not in the context.
    """
    name = self.options.table
    if name not in context.shared:
      raise ValueError(f'the shared table {name!r} has no rows: set context.shared[{name!r}]')
    e_BxTxIxE = context.shared[name][:, -count:]
    if not self.options.sliced:
      return e_BxTxIxE
    E = self.options.width
    first = E * self.options.index(self.block)
    return e_BxTxIxE[..., first : first + E]

  def _add_to_values(self, v_BxPxD: jax.Array, e_BxPxIxE: jax.Array, context: Context) -> jax.Array:
    """Returns the values of attention with the rows of their tokens."""
    o = self.options
    inputs_BxPxD = context.inputs_BxPxD
    if inputs_BxPxD is None or not v_BxPxD.shape[1] == inputs_BxPxD.shape[1] == e_BxPxIxE.shape[1]:
      raise ValueError(
        f'a memory in the values of {v_BxPxD.shape[1]} tokens needs context.inputs_BxPxD of all '
        f'tokens, and a state from `empty_state(batch, slots)` for the slots before the segment'
      )
    head = None
    if o.one_head:
      head = o.index(self.block) % self.key_heads
    join = value_join.ValueJoin(
      heads=self.key_heads,
      kind=o.join,
      gate=o.value_gate,
      is_projected=o.projection,
      head=head,
      is_neutral=o.start == 'neutral',
      dtype=self.dtype,
      name='values',
    )
    e_BxPxM = e_BxPxIxE.reshape(*e_BxPxIxE.shape[:2], -1).astype(self.dtype)
    return join(v_BxPxD, inputs_BxPxD, e_BxPxM)

  def _without_padding(self, array_BxTx: jax.Array, context: Context) -> jax.Array:
    """Returns an array with zeros at padding."""
    if context.valid_BxT is None or self.options.padding_trains:
      return array_BxTx
    is_valid_BxTx = jnp.expand_dims(context.valid_BxT > 0, range(2, array_BxTx.ndim))
    return jnp.where(is_valid_BxTx, array_BxTx, 0)

  def _join(
    self, x: jax.Array, e_BxTxIxE: jax.Array, context: Context, state: State | None
  ) -> tuple[jax.Array, State]:
    """Returns x with the gate or the sum of the vectors, and the next state of the convolution."""
    o = self.options
    if o.join == 'gate':
      y, convolution_state = self._gate(x, e_BxTxIxE, context, state)
      return x + y, convolution_state
    if o.join == 'multiply':
      return x * e_BxTxIxE.prod(axis=-2), {}
    if o.join == 'replace':
      return e_BxTxIxE.sum(axis=-2), {}
    if o.join == 'product':
      return self._product(x, e_BxTxIxE, context), {}
    join = token_sum.TokenSum(
      is_mean=self.options.join == 'mean',
      is_projected=self.options.projection,
      factor=self.options.factor,
      amplification=self.options.amplification,
      dtype=self.dtype,
      name='sum',
    )
    return join(x, e_BxTxIxE), {}

  def _product(self, x_BxTxD: jax.Array, e_BxTxIxE: jax.Array, context: Context) -> jax.Array:
    """Returns the hidden states with the products."""
    o = self.options
    join = product.Product(
      activation=o.activation,
      has_embedding_part=o.embedding_part,
      epsilon=o.norm_epsilon,
      is_offset=o.norm_offset,
      is_neutral=o.start == 'neutral' and (o.embedding_part or not o.starts_with_equal_rows),
      dtype=self.dtype,
      name='product',
    )
    e_BxTxP = e_BxTxIxE.reshape(*e_BxTxIxE.shape[:2], -1)
    embedding_BxTxD = None
    if o.embedding_part:
      embedding_BxTxD = context.vocabulary.x_BxTxD
    return join(x_BxTxD, e_BxTxP, embedding_BxTxD)

  def _ids(self, x: jax.Array, context: Context) -> jax.Array:
    """Returns the ids of the tokens [B, T, 1 or K]: tokens, bytes, or clusters of each head."""
    o = self.options
    if not self.has_clusters:
      ids = context.tokens_BxT.astype(jnp.int32)
      if ids.ndim == 2:
        ids = ids[..., None]
      if o.key == 'bytes':
        ids = jnp.where(ids < 256, ids + BYTE_OFFSET, DOCUMENT_START)
      return jnp.broadcast_to(ids, (*ids.shape[:2], self.id_columns or ids.shape[2]))
    vocabulary = None
    if o.key == 'embedding_clusters' or self.is_at_embedding:
      vocabulary = context.vocabulary
    if o.key == 'embedding_clusters':
      x = vocabulary.rows_VxD[vocabulary.tokens_BxT]
    quantize = self.make_quantizer(name='quantizer')
    heads_BxTxKxH = x.reshape(*x.shape[:2], o.heads, -1)
    valid_BxT = None if o.padding_trains else context.valid_BxT
    return quantize(heads_BxTxKxH, valid_BxT, vocabulary)

  def make_quantizer(self, **fields: Any) -> quantizer.ProductQuantizer:
    """Returns the quantiser of a memory with clusters; unbound with `parent=None`."""
    return quantizer.make(self.options, **fields)

  def _keys(self, ids: list[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
    """Returns the hash inputs for the ids at each place, and any run-time multipliers."""
    if self.options.key != 'compressed':
      return ids, None
    classes_V = token_classes.variable(self, self.vocabulary_size)
    # A negative id is not text, and is its own class.
    classes = [jnp.where(id < 0, id, classes_V[id]) for id in ids]
    if not self.ngram_hash().is_xor:
      return classes, None
    words_Nx2 = uint64.split_words(self.ngram_hash().multipliers())
    init = functools.partial(jnp.asarray, words_Nx2)
    init = axis_names.with_axis_names(init, (None, None))
    return classes, self.variable('codebook', 'multipliers', init).value

  def _gate(
    self, x: jax.Array, e_BxTxIxE: jax.Array, context: Context, state: State | None
  ) -> tuple[jax.Array, State]:
    """Returns the gated vectors to add, and the next state of the convolution."""
    o = self.options
    convolution = self._convolution()
    h_BxTxGxD = x
    if x.ndim == 3:
      h_BxTxGxD = x[:, :, None]
    layer = gate.Gate(
      convolution=convolution,
      bias=o.bias,
      epsilon=o.norm_epsilon,
      is_offset=o.norm_offset,
      kind=o.gate,
      zero_score=o.zero_score,
      dtype=self.dtype,
      is_neutral=o.start == 'neutral' and not o.starts_with_equal_rows,
      name='gate',
    )
    e_BxTxM = e_BxTxIxE.reshape(*e_BxTxIxE.shape[:2], -1)
    if convolution is None:
      y_BxTxGxD, _ = layer(h_BxTxGxD, e_BxTxM, None)
      return y_BxTxGxD.reshape(x.shape), {}
    position_BxT = self._positions(context, state, len(x), x.shape[1])
    y_BxTxGxD, c_BxTxGxD = layer(h_BxTxGxD, e_BxTxM, position_BxT, state['rows'])
    c_BxTxGxD = jax.lax.stop_gradient(c_BxTxGxD)
    rows = cache.keep_last(state['rows'], c_BxTxGxD, context.valid_BxT)
    before_Bx1 = state['position'][:, None]
    position_Bx1 = cache.keep_last(before_Bx1, position_BxT + 1, context.valid_BxT)
    return y_BxTxGxD.reshape(x.shape), {'rows': rows, 'position': position_Bx1[:, 0]}

  def _positions(self, context: Context, state: State, B: int, T: int) -> jax.Array:
    """Returns the position of each token in its document, in the stream without boundaries."""
    starts_BxT = context.starts_BxT
    if starts_BxT is None or self.options.boundary == 'none':
      starts_BxT = jnp.zeros((B, T), bool)
    return document_masks.positions(starts_BxT, state['position'])

  def _table_rows(self, rows_BxTxI: jax.Array) -> jax.Array:
    """Returns rows of the table, [B, T, I, E]; of a table in host memory, from `host_rows`.

    If the collection `host_rows.ROWS` is mutable, records the row numbers there and returns zeros.
    """
    E = self.table_shape()[1]
    exchange = self.options.exchange
    if self._records_rows:
      self.sow(host_rows.ROWS, 'table', rows_BxTxI)
      return jnp.zeros((*rows_BxTxI.shape, E), self._wide_dtype)
    values_BxTxIxE = host_rows.read(self, 'table', exchange)
    if values_BxTxIxE is None:
      values_BxTxIxE = table.lookup_parameter(
        self, 'table', self._table(), rows_BxTxI, exchange, width=E
      )
    return checkpoint_name(values_BxTxIxE, 'memory')

  def _table(self) -> jax.Array:
    """Returns the table parameter [rows, E], or packed (see `table`)."""
    stored = nn.unbox(self.get_variable('params', 'table'))
    if stored is not None and stored.shape == table.packed_shape(*self.table_shape()):
      return stored
    init = self.table_initializer()
    axes = table.AXES
    if self.options.table_memory == 'host':
      init = host_rows.keep_key(self, 'table', init)
      axes = host_rows.AXES
    init = axis_names.with_axis_names(init, axes)
    return self.param('table', init, self.table_shape(), self.table_dtype)

  @property
  def table_dtype(self) -> jnp.dtype:
    """The dtype of the table."""
    if self.options.table_dtype == 'float32':
      return self._wide_dtype
    return jnp.dtype(self.options.table_dtype)

  def table_initializer(self) -> nn.initializers.Initializer:
    """Returns the initializer of the table, see `initial_tables`."""
    return initial_tables.initializer(
      self.options,
      width=self.table_shape()[1],
      head_rows=self.ngram_hash().sizes[0][0],
      model_width=self.model_width or self.width,
      dtype=self._wide_dtype,
    )

  @property
  def _wide_dtype(self) -> jnp.dtype:
    return jnp.promote_types(self.dtype, jnp.float32)

  def ngram_hash(self) -> hashing.NGramHash:
    """Returns the hash of this layer, with the rows of each head."""
    numpy_hash = self.options.hashes(self.vocabulary_size)[self.options.table_index(self.block)]
    return hashing.NGramHash(**vars(numpy_hash))

  def class_hash(self, classes_V: np.ndarray) -> hashing.NGramHash:
    """Returns the hash of compressed ids, with the number of token classes."""
    return dataclasses.replace(self.ngram_hash(), vocabulary=int(classes_V.max()) + 1)

  def table_shape(self) -> tuple[int, int]:
    """Returns the rows and the width of the table of this layer."""
    rows = self.options.table_rows(self.vocabulary_size)
    return rows[self.options.table_index(self.block)], self.options.table_width(self.width)

  @property
  def has_table(self) -> bool:
    """Whether it owns its table instead of reading a shared one."""
    return self.options.table is None or self.is_table

  @property
  def _records_rows(self) -> bool:
    """Whether the looked-up rows are only recorded."""
    return self.is_mutable_collection(host_rows.ROWS) and not self.is_initializing()

  @property
  def has_clusters(self) -> bool:
    """Whether the n-grams are of clusters."""
    return self.options.key in CLUSTER_KEYS

  @property
  def clusters_depend_on_token(self) -> bool:
    """Whether clusters are of embedding rows, one for each token."""
    return self.has_clusters and (self.is_at_embedding or self.options.key == 'embedding_clusters')

  @property
  def _is_in_values(self) -> bool:
    """Whether the input is the values of attention."""
    return self.options.point == 'values' and self.options.is_in_blocks and not self.is_table

  @property
  def _may_lack_rows(self) -> bool:
    """Whether lookups may include padding or slots before the stream."""
    return self.is_table or (self._is_in_values and self.has_table)

  @property
  def _is_paired(self) -> bool:
    """Whether n-grams pair each token with its most attended token."""
    return self.options.pairing == 'attended'

  def _pairs(self) -> pairs.AttendedPairs:
    return pairs.AttendedPairs(self.options.start_id(self.vocabulary_size))

  def windows(self) -> windows.Windows:
    """Returns the windows of ids for n-grams of consecutive tokens."""
    o = self.options
    return windows.Windows(
      places=hashes.num_places(o.hash, o.orders),
      boundary=o.boundary,
      eos_id=o.eos_id,
      fill_id=o.start_id(self.vocabulary_size),
      displacement=o.displacement,
    )

  def _convolution(self) -> gate.Convolution | None:
    """Returns the options of the convolution of a gate; None without one."""
    o = self.options
    if self.is_table or o.join != 'gate' or not o.convolution:
      return None
    return gate.Convolution(
      taps=o.convolution, dilation=max(o.orders), epsilon=o.convolution_epsilon
    )
