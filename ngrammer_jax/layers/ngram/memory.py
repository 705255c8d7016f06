"""Memories of n-grams: keys, a hash, tables and a join.

  keys   ids of the present token and of those before it: tokens, classes of tokens, bytes, clusters
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

B batch, T segment length, D model width, G branches of the residual stream, N places of the longest
n-gram, K heads of an order, I = orders x K, E width of a looked-up vector, R earlier tokens.
"""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.config.ngram.memory import CLUSTER_KEYS, NGramMemoryConfig
from ngrammer_jax.layers import axis_names, documents
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram import (
  gate,
  hashing,
  host_memory,
  per_head,
  quantizer,
  table,
  token_sum,
  uint64,
  windows,
)

BYTE_OFFSET, DOCUMENT_START = 4, 1  # ids of BLT: a byte plus 4, and 1 before a document
State = dict[str, Any]


class NGramMemory(nn.Module):
  """Adds what is remembered about the last tokens to the input [B, T, D] or [B, T, G, D].

  The table is one parameter [I x rows, E] with the logical axes `table.AXES`. With the key
  `compressed`, the collection `codebook` has `token_classes` [V] and, for hashes whose multipliers
  depend on the number of classes, `multipliers` [N, 2]; `init` gives every token its own class.

  Attributes:
    options: the config of the memory.
    vocabulary_size: V.
    width: D.
    block: number of the block that it is in, 0 at the input.
    branches: G.
    dtype: dtype of the output.
  """

  options: NGramMemoryConfig
  vocabulary_size: int | None
  width: int
  block: int = 0
  branches: int = 1
  dtype: jnp.dtype = jnp.float32

  def empty_state(self, batch: int, slots: int | None = None) -> State | None:
    """Returns the state before the first segment, None for 1-grams without a convolution.

    Keys: `window`, see `windows.Windows`; with a convolution, its last inputs `rows` [B, R', G, D]
    and the `position` of the next token, int32 [B].
    """
    del slots
    window = self._windows().empty_state(batch, self.options.heads if self._has_clusters else 1)
    state = {} if window is None else {'window': window}
    if self._convolution() is not None:
      shape = batch, self._convolution().rows, self.branches, self.width
      state |= {'rows': jnp.zeros(shape, self.dtype), 'position': jnp.zeros((batch,), jnp.int32)}
    return state or None

  @nn.compact
  def __call__(
    self, x: jax.Array, context: Context, state: State | None = None
  ) -> tuple[jax.Array, State | None]:
    """Returns x with the memory, and the next state.

    Args:
      x: [B, T, D], or [B, T, G, D] for a gate of a residual stream with several branches.
      context: of the segment; `tokens_BxT` is required, documents and padding are optional.
      state: that the previous segment returned. None: the start of a stream.

    Raises:
      ValueError: x does not have D features or G branches, or there are no tokens.
    """
    shapes = {(self.width,)} if self.branches == 1 else set()
    shapes |= {(self.branches, self.width)} if self.options.join == 'gate' else set()
    if x.shape[2:] not in shapes:
      raise ValueError(
        f'the input [B, T, ...] has features {list(x.shape[2:])}, but the memory has '
        f'branches={self.branches} of width={self.width}'
      )
    if context.tokens_BxT is None:
      raise ValueError('a memory of n-grams needs context.tokens_BxT')
    state = self.empty_state(len(x)) if state is None else state
    e_BxTxIxE, window = self._look_up(x, context, None if state is None else state.get('window'))
    next_state = {} if window is None else {'window': window}
    if self._records_values:  # nothing else is asked for
      return x, next_state or None
    if self.options.join == 'gate':
      y, rows = self._gate(x, e_BxTxIxE, context, state)
      y, next_state = x + y, next_state | rows
    elif self.options.join in ('sum', 'mean'):
      join = token_sum.TokenSum(
        is_mean=self.options.join == 'mean',
        is_projected=self.options.projection,
        amplification=self.options.amplification,
        dtype=self.dtype,
        name='sum',
      )
      y = join(x, e_BxTxIxE)
    else:
      heads = x.reshape(*x.shape[:2], self.options.heads, -1)
      y = per_head.combine(heads, e_BxTxIxE, self.options.join, self.dtype).reshape(x.shape)
    return y, next_state or None

  def _look_up(self, x, context, window):
    """Returns the vectors of all n-grams [B, T, I, E], zeros at padding, and the next window.

    The intermediate `lookup` has the `ids` [B, T, 1 or K] at each place and the `rows` [B, T, I].
    """
    ids, window = self._windows()(
      self._ids(x, context),
      None if self.options.boundary == 'none' else context.documents_BxT,
      window,
      valid_BxT=context.valid_BxT,
      tokens_BxT=context.tokens_BxT,
    )
    keys, multipliers = self._keys(ids)
    rows_BxTxI = self.ngram_hash()(keys, multipliers)
    self.sow('intermediates', 'lookup', {'ids': keys, 'rows': rows_BxTxI})
    sizes_I = np.array(self.ngram_hash().sizes, np.int32).ravel()
    first_I = np.cumsum(sizes_I) - sizes_I
    e_BxTxIxE = self._table_rows(rows_BxTxI + first_I).astype(self.dtype)
    if self.options.untrained_row is not None:
      is_trained_BxTxIx1 = (rows_BxTxI != self.options.untrained_row)[..., None]
      e_BxTxIxE = jnp.where(is_trained_BxTxIx1, e_BxTxIxE, jax.lax.stop_gradient(e_BxTxIxE))
    if context.valid_BxT is not None:
      e_BxTxIxE = jnp.where(context.valid_BxT[..., None, None] > 0, e_BxTxIxE, 0)
    return e_BxTxIxE, window

  def _ids(self, x, context):
    """Returns the ids in a window [B, T, 1 or K]: tokens, bytes, or clusters of each head."""
    o = self.options
    if not self._has_clusters:
      ids_BxTx1 = context.tokens_BxT[..., None].astype(jnp.int32)
      if o.key != 'bytes':
        return ids_BxTx1
      return jnp.where(ids_BxTx1 < 256, ids_BxTx1 + BYTE_OFFSET, DOCUMENT_START)
    vocabulary = None
    if o.key == 'embedding_clusters':
      vocabulary = context.vocabulary
      x = vocabulary.rows_VxD[vocabulary.tokens_BxT]
    quantize = self.make_quantizer(name='quantizer')
    heads_BxTxKxH = x.reshape(*x.shape[:2], o.heads, -1)
    return quantize(heads_BxTxKxH, context.valid_BxT, vocabulary)

  def make_quantizer(self, **fields: Any) -> quantizer.ProductQuantizer:
    """Returns the quantiser of a memory with clusters; unbound with `parent=None`."""
    return quantizer.make(self.options, **fields)

  def _keys(self, ids):
    """Returns what is hashed for the ids at each place, and multipliers known at run time only."""
    if self.options.key != 'compressed':
      return ids, None
    V, replicated = self.vocabulary_size, axis_names.with_axis_names
    each_token = replicated(lambda: jnp.arange(V, dtype=jnp.int32), (None,))
    classes_V = self.variable('codebook', 'token_classes', each_token).value
    # A negative id stands for what is not text, and is its own class.
    classes = [jnp.where(id < 0, id, classes_V[id]) for id in ids]
    if not self.ngram_hash().is_xor:
      return classes, None
    words_Nx2 = uint64.split_words(self.ngram_hash().multipliers())
    initial = replicated(lambda: jnp.asarray(words_Nx2), (None, None))
    return classes, self.variable('codebook', 'multipliers', initial).value

  def _gate(self, x, e_BxTxIxE, context, state):
    """Returns what is added to the residual stream, and the next state of the convolution."""
    o, convolution = self.options, self._convolution()
    h_BxTxGxD = x if x.ndim == 4 else x[:, :, None]
    layer = gate.Gate(
      convolution=convolution,
      bias=o.bias,
      epsilon=o.norm_epsilon,
      is_offset=o.norm_offset,
      kind=o.gate,
      zero_score=o.zero_score,
      dtype=self.dtype,
      name='gate',
    )
    e_BxTxM = e_BxTxIxE.reshape(*e_BxTxIxE.shape[:2], -1)
    if convolution is None:
      y_BxTxGxD, _ = layer(h_BxTxGxD, e_BxTxM, None)
      return y_BxTxGxD.reshape(x.shape), {}
    position_BxT = self._positions(context, state, len(x), x.shape[1])
    y_BxTxGxD, c_BxTxGxD = layer(h_BxTxGxD, e_BxTxM, position_BxT, state['rows'])
    keep_last = lambda before, new: cache.keep_last(before, new, context.valid_BxT)
    rows = keep_last(state['rows'], jax.lax.stop_gradient(c_BxTxGxD))
    position = keep_last(state['position'][:, None], position_BxT + 1)[:, 0]
    return y_BxTxGxD.reshape(x.shape), {'rows': rows, 'position': position}

  def _positions(self, context, state, B, T):
    """Returns the position of each token in its document, in the stream without boundaries."""
    starts_BxT = context.starts_BxT
    if starts_BxT is None or self.options.boundary == 'none':
      starts_BxT = jnp.zeros((B, T), bool)
    return documents.positions(starts_BxT, state['position'])

  def _table_rows(self, rows_BxTxI):
    """Returns rows of the table [B, T, I, E].

    Those of a table in host memory may be looked up before (see `models.host_tables`): then they
    are in the collection `table.VALUES`. If it is mutable, they are recorded there instead.
    """
    if self.options.table_memory == 'device':
      return table.lookup_parameter(self, 'table', self._table(), rows_BxTxI)
    if self.has_variable(table.VALUES, 'table') and not self._records_values:
      return self.get_variable(table.VALUES, 'table')
    values_BxTxIxE = table.lookup_parameter(self, 'table', self._table(), rows_BxTxI, 'rows')
    # Rematerialisation keeps them: to look them up again would take longer than to store them.
    values_BxTxIxE = checkpoint_name(values_BxTxIxE, table.VALUES)
    if self._records_values:
      self.sow(table.VALUES, 'table', values_BxTxIxE)
    return values_BxTxIxE

  def _table(self):
    """Returns the table parameter [rows, E]."""
    o = self.options
    truncated = nn.initializers.truncated_normal(o.width**-0.5, lower=-3, upper=3)
    init = truncated if o.deviation is None else nn.initializers.normal(o.deviation)
    axes = table.AXES
    if o.table_memory == 'host':
      init, axes = host_memory.initializer(init), table.HOST_AXES
    init = axis_names.with_axis_names(init, axes)
    wide = jnp.promote_types(self.dtype, jnp.float32)
    dtype = wide if o.table_dtype == 'float32' else jnp.dtype(o.table_dtype)
    return self.param('table', init, self.table_shape(), dtype)

  def ngram_hash(self) -> hashing.NGramHash:
    """Returns the hash of this layer, with the rows of each head."""
    numpy_hash = self.options.hashes(self.vocabulary_size)[self.options.index(self.block)]
    return hashing.NGramHash(**vars(numpy_hash))

  def class_hash(self, classes_V: np.ndarray) -> hashing.NGramHash:
    """Returns the hash of compressed ids: their number is that of the classes of the tokens."""
    return dataclasses.replace(self.ngram_hash(), vocabulary=int(classes_V.max()) + 1)

  def table_shape(self) -> tuple[int, int]:
    """Returns the rows and the width of the table of this layer."""
    rows = self.options.table_rows(self.vocabulary_size)
    return rows[self.options.index(self.block)], self.options.width

  @property
  def _records_values(self):
    return self.is_mutable_collection(table.VALUES) and not self.is_initializing()

  @property
  def _has_clusters(self):
    return self.options.key in CLUSTER_KEYS

  def _windows(self):
    o = self.options
    return windows.Windows(max(o.orders), o.boundary, o.eos_id, o.start_id, o.displacement)

  def _convolution(self):
    o = self.options
    if o.join != 'gate' or not o.convolution:
      return None
    return gate.Convolution(o.convolution, max(o.orders), o.convolution_epsilon)
