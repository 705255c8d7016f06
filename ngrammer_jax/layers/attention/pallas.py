"""Attention of a segment to itself and to a memory, as Pallas kernels for TPUs.

The kernels compute what `layers.attention.blocks` does: a running softmax over blocks of keys
(Dao et al. 2022), with documents, a memory, distance scores and learned spans, and skip the blocks
that no query sees. The score matrix exists only as one block in the memory of a core.

The score of query a of block i and key c of block j, d tokens apart, has a term that depends on d
alone. The products of a block of queries with the 2 K distances of the pair of blocks are one
matrix [K, 2 K], of which row a is rotated by K - 1 - a (see `_skew`).

The gradient recomputes the scores in three kernels: for queries and spans, for keys and values, and
for the encodings of distances. Each adds up its results along the inner axes of its grid.

B batch, T queries, M memory, S = M + T keys, N heads, H head width, K queries or keys of a block,
I, J and M' blocks of queries, of keys and of the memory, J = M' + I; R = J + 1 blocks of distances.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from ngrammer_jax.layers import documents, dropout, mesh_axes, softmax
from ngrammer_jax.layers.attention import span
from ngrammer_jax.layers.attention.block_layout import NO_LIMIT, QUERY_PADDING, pad
from ngrammer_jax.layers.attention.full import Heads, PartialAttention, SpanMask
from ngrammer_jax.layers.context import Keys

BLOCK = 128  # queries and keys of a block: the lanes of a TPU
LANES = 128


class Operands(NamedTuple):
  """The inputs with a gradient, padded to full blocks. None: no such term.

  Attributes:
    query_NxBxTxH: scaled queries, with the content bias.
    distance_query_NxBxTxH: scaled queries of the distance term.
    span_NxBxIx1xK: learned spans in tokens.
    key_NxBxSxH, value_NxBxSxH: keys and values of the memory and the segment.
    encoding_NxRKxH: encodings of the distances J K - 1 down to 0, then K rows of padding; N may
      be 1.
    bias_NxRx1xK: biases of the same distances, by block.
  """

  query_NxBxTxH: jax.Array
  distance_query_NxBxTxH: jax.Array | None
  span_NxBxIx1xK: jax.Array | None
  key_NxBxSxH: jax.Array
  value_NxBxSxH: jax.Array
  encoding_NxRKxH: jax.Array | None
  bias_NxRx1xK: jax.Array | None


class Masks(NamedTuple):
  """The inputs without a gradient.

  Attributes:
    first_NxBxI: the first block of keys that any query of a block sees.
    query_documents_BxIx1xK, key_documents_BxJx1xK: document numbers, as floats.
  """

  first_NxBxI: jax.Array
  query_documents_BxIx1xK: jax.Array
  key_documents_BxJx1xK: jax.Array


@dataclasses.dataclass(frozen=True)
class Options:
  """What the program depends on.

  Attributes:
    block: K.
    memory_blocks: M'.
    window: the distance to a key is less than this number. None: no limit.
    sees_itself: whether a token attends to itself.
    ramp, renormalize: see `full.SpanMask`.
    logit_cap: cap of the scores. None: not capped.
  """

  block: int
  memory_blocks: int
  window: int | None
  sees_itself: bool
  ramp: int
  renormalize: bool
  logit_cap: float | None


def attend(
  heads: Heads,
  span_mask: SpanMask | None,
  keys: Keys,
  cached: None = None,
  return_pairs: bool = False,
  drop: dropout.Dropout | None = None,
) -> PartialAttention:
  """Attends to the keys that each query sees, see `full.attend`.

  Args:
    heads: queries; keys and values of the memory and the segment.
    span_mask: mask of the learned spans. None: no spans.
    keys: the keys of the segment.
    cached, return_pairs, drop: not supported, see `config.kernels`.
  """
  del cached, return_pairs, drop
  T, K = heads.query_BxTxNxH.shape[1], BLOCK
  ramp, renormalize = (1, True) if span_mask is None else (span_mask.ramp, span_mask.renormalize)
  M = heads.key_BxSxCxH.shape[1] - T
  options = Options(
    block=K,
    memory_blocks=-(-M // K),
    window=keys.window,
    sees_itself=keys.sees_itself,
    ramp=ramp,
    renormalize=renormalize,
    logit_cap=heads.logit_cap,
  )
  operands = _operands(heads, span_mask, M, K)
  masks = _masks(keys, operands, options)
  values_NxBxTxH, log_mass_NxBxIx1xK = _attend_sharded(options, operands, masks)
  N, B = values_NxBxTxH.shape[:2]
  log_mass_NxBxT = log_mass_NxBxIx1xK.reshape(N, B, -1)[:, :, :T]
  values_BxTxNxH = jnp.moveaxis(values_NxBxTxH[:, :, :T], 0, 2)
  return PartialAttention(values_BxTxNxH, log_mass_NxBxT.swapaxes(0, 1))


def _operands(heads, span_mask, M, K):
  """Returns the operands of all heads, padded to full blocks."""
  B, T, N, H = heads.query_BxTxNxH.shape
  before, after = -M % K, -T % K
  by_head = lambda x_BxTxNx, before: pad(jnp.moveaxis(x_BxTxNx, 2, 0), 2, (before, after))
  distance_query = encoding = bias = span_NxBxIx1xK = None
  if heads.distance is not None:
    query_BxTxNxH, encoding_SxNxH, bias_SxN = heads.distance
    distance_query = by_head(query_BxTxNxH, 0)
    widths = before + after, K  # the farthest distances, and those that the last block leaves out
    encoding = pad(encoding_SxNxH.swapaxes(0, 1), 1, widths)
    if bias_SxN is not None:
      bias = pad(bias_SxN.T, 1, widths).reshape(N, -1, 1, K)
  if span_mask is not None:
    span_NxBxT = by_head(jnp.broadcast_to(span_mask.z_BxTxN, (B, T, N)), 0)
    span_NxBxIx1xK = span_NxBxT.reshape(N, B, -1, 1, K)
  keys = by_head(heads.key_BxSxCxH, before), by_head(heads.value_BxSxCxH, before)
  query = by_head(heads.query_BxTxNxH, 0)
  return Operands(query, distance_query, span_NxBxIx1xK, *keys, encoding, bias)


def _masks(keys, operands, options):
  """Returns the masks: documents, and the first block of keys that each block of queries sees."""
  K, (N, B) = options.block, operands.query_NxBxTxH.shape[:2]
  (_, T), S = keys.query_documents_BxT.shape, keys.key_documents_BxS.shape[1]
  after, before = -T % K, (T - S) % K
  query_BxIxK = pad(keys.query_documents_BxT, 1, (0, after), QUERY_PADDING).reshape(B, -1, K)
  key_BxJxK = pad(keys.key_documents_BxS, 1, (before, after), documents.NONE).reshape(B, -1, K)
  # Documents increase: the first blocks whose last document is an earlier one are not seen.
  first_document_BxI = jnp.where(query_BxIxK < 0, NO_LIMIT, query_BxIxK).min(axis=2)
  is_earlier_BxIxJ = key_BxJxK.max(axis=2)[:, None] < first_document_BxI[..., None]
  by_document_BxI = jnp.cumprod(is_earlier_BxIxJ, axis=2).sum(axis=2)
  # Padding sees padding, wherever it is in the segment.
  has_padding_BxI = (query_BxIxK == documents.PADDING).any(axis=2)
  limit = jnp.where(has_padding_BxI, options.memory_blocks, NO_LIMIT)
  by_document_BxI = jnp.minimum(by_document_BxI, limit)
  limit_NxBxI = jnp.full((N, *by_document_BxI.shape), NO_LIMIT)
  if options.window is not None:
    limit_NxBxI = jnp.minimum(limit_NxBxI, options.window - 1)
  if operands.span_NxBxIx1xK is not None and options.renormalize:  # else all keys have a mass
    longest = jax.lax.stop_gradient(operands.span_NxBxIx1xK).max(axis=(3, 4)) + options.ramp
    longest = jnp.nan_to_num(longest).astype(jnp.int32) + (not options.sees_itself)
    limit_NxBxI = jnp.minimum(limit_NxBxI, longest)
  i_I = jnp.arange(by_document_BxI.shape[1])
  by_distance_NxBxI = (i_I * K - limit_NxBxI) // K + options.memory_blocks
  first_NxBxI = jnp.maximum(by_distance_NxBxI, by_document_BxI).astype(jnp.int32)
  to_float = lambda x_BxIxK: x_BxIxK[:, :, None].astype(jnp.float32)
  return Masks(first_NxBxI, to_float(query_BxIxK), to_float(key_BxJxK))


def _attend_sharded(options, operands, masks):
  """Each device attends for its own rows and heads."""
  run, (N, B) = functools.partial(_attend, options), operands.query_NxBxTxH.shape[:2]
  rows, heads = mesh_axes.axes('batch', B), mesh_axes.axes('heads', N)
  if not rows and not heads:
    return run(operands, masks)
  both, by_head = jax.P(heads, rows), jax.P(heads)
  encoding_heads = by_head if _has_heads(operands) else jax.P()
  specs = Operands(both, both, both, both, both, encoding_heads, by_head)
  specs = Operands(*(None if x is None else s for x, s in zip(operands, specs, strict=True)))
  specs = specs, Masks(both, jax.P(rows), jax.P(rows))
  return jax.shard_map(run, in_specs=specs, out_specs=(both, both), check_vma=False)(
    operands, masks
  )


def _has_heads(operands):
  encoding = operands.encoding_NxRKxH
  return encoding is not None and len(encoding) > 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, operands, masks):
  """Returns values [N, B, T, H] and log masses [N, B, I, 1, K]."""
  return _Kernels(options, operands, masks).attend()


def _attend_forward(options, operands, masks):
  result = _attend(options, operands, masks)
  return result, (operands, masks, result)


def _attend_backward(options, residuals, cotangents):
  operands, masks, result = residuals
  gradient = _Kernels(options, operands, masks).gradient(*result, *cotangents)
  return gradient, jax.tree.map(lambda _: None, masks)


_attend.defvjp(_attend_forward, _attend_backward)


class _Place(NamedTuple):
  """Where a program of a grid stands: head, row, block of queries, block of keys."""

  n: Any
  b: Any
  i: Any
  j: Any


class _Block(NamedTuple):
  """The block of an array that a program reads or writes.

  Attributes:
    shape: its shape; an axis of None is left out.
    index: returns the index of the block from the place of the program.
  """

  shape: tuple[int | None, ...]
  index: Callable[[_Place], tuple[Any, ...]]


class _Grid(NamedTuple):
  """The programs of a kernel.

  Attributes:
    sizes: sizes of the axes.
    place: returns the place of a program from its indices.
    inner: number of inner axes, along which results are added up.
    clamp: maps a place that is not visited to one with the same outer axes that is.
  """

  sizes: tuple[int, ...]
  place: Callable[..., _Place]
  inner: int
  clamp: Callable[[_Place, Any], _Place]


class _Kernels:
  """The kernels for operands of given shapes.

  Args:
    options, operands, masks: see these classes.
  """

  def __init__(self, options: Options, operands: Operands, masks: Masks):
    self.options, self.operands, self.masks = options, operands, masks
    (self.N, self.B, T, self.H), self.K = operands.query_NxBxTxH.shape, options.block
    self.I, self.J = T // self.K, operands.key_NxBxSxH.shape[2] // self.K
    self.dtype = operands.query_NxBxTxH.dtype
    self.wide = jnp.promote_types(self.dtype, jnp.float32)
    rows, row = (None, None, self.K, self.H), (None, None, None, 1, self.K)
    self.query_block = _Block(rows, lambda at: (at.n, at.b, at.i, 0))
    self.query_row = _Block(row, lambda at: (at.n, at.b, at.i, 0, 0))  # a number for each query
    self.key_block = _Block(rows, lambda at: (at.n, at.b, at.j, 0))
    self.inputs = self._inputs()

  def _inputs(self) -> dict[str, tuple[jax.Array, _Block]]:
    """Returns the inputs of all kernels by name."""
    operands, masks, row = self.operands, self.masks, (None, None, 1, self.K)
    query_documents = _Block(row, lambda at: (at.b, at.i, 0, 0))
    key_documents = _Block(row, lambda at: (at.b, at.j, 0, 0))
    inputs = {
      'query': (operands.query_NxBxTxH, self.query_block),
      'distance_query': (operands.distance_query_NxBxTxH, self.query_block),
      'span': (operands.span_NxBxIx1xK, self.query_row),
      'key': (operands.key_NxBxSxH, self.key_block),
      'value': (operands.value_NxBxSxH, self.key_block),
      'query_documents': (masks.query_documents_BxIx1xK, query_documents),
      'key_documents': (masks.key_documents_BxJx1xK, key_documents),
    }
    has_heads = _has_heads(operands)
    for half in (0, 1):
      inputs[f'encoding_{half}'] = operands.encoding_NxRKxH, self._encoding_block(half, has_heads)
      inputs[f'bias_{half}'] = operands.bias_NxRx1xK, self._bias_block(half)
    return {name: pair for name, pair in inputs.items() if pair[0] is not None}

  # A pair of blocks has 2 K distances: those of two blocks, which differ by 1.

  def _first_distance_block(self, at):
    return self.I - 1 - at.i + at.j

  def _encoding_block(self, half, has_heads=True):
    index = lambda at: (at.n if has_heads else 0, self._first_distance_block(at) + half, 0)
    return _Block((None, self.K, self.H), index)

  def _bias_block(self, half):
    index = lambda at: (at.n, self._first_distance_block(at) + half, 0, 0)
    return _Block((None, None, 1, self.K), index)

  def _is_visited(self, at, first_ref):
    return (first_ref[at.n, at.b, at.i] <= at.j) & (at.j <= at.i + self.options.memory_blocks)

  def _call(
    self,
    name: str,
    body: Callable[..., None],
    grid: _Grid,
    extra: dict[str, tuple[jax.Array, _Block]],
    outputs: dict[str, tuple[jax.ShapeDtypeStruct, _Block]],
    scratch: dict[str, tuple[int, ...]],
  ) -> dict[str, jax.Array]:
    """Runs a kernel for every place of a grid.

    Args:
      name: name of the kernel.
      body: called with the place, whether it is visited, and references by name.
      grid: the programs.
      extra: further inputs.
      outputs: shapes, dtypes and blocks of the results.
      scratch: shapes of the arrays that the programs along the inner axes share.
    """
    inputs = self.inputs | extra
    names = [*inputs, *outputs, *scratch]

    # No other blocks are copied than those of visited places; results are written by place.
    copied = lambda index: lambda *ids: index(grid.clamp(grid.place(*ids[:-1]), ids[-1]))
    written = lambda index: lambda *ids: index(grid.place(*ids[:-1]))

    def kernel(first_ref, *refs):
      at = grid.place(*map(pl.program_id, range(len(grid.sizes))))
      body(at, self._is_visited(at, first_ref), dict(zip(names, refs, strict=True)))

    outer = ('parallel',) * (len(grid.sizes) - grid.inner)
    results = pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=grid.sizes,
        in_specs=[pl.BlockSpec(block.shape, copied(block.index)) for _, block in inputs.values()],
        out_specs=[
          pl.BlockSpec(block.shape, written(block.index)) for _, block in outputs.values()
        ],
        scratch_shapes=[pltpu.VMEM(shape, self.wide) for shape in scratch.values()],
      ),
      out_shape=[array for array, _ in outputs.values()],
      compiler_params=pltpu.CompilerParams(dimension_semantics=outer + ('arbitrary',) * grid.inner),
      interpret=mesh_axes.device()[0] == 'cpu',
      name=f'attention_{name}',
    )(self.masks.first_NxBxI, *(array for array, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))

  def _array(self, *shape):
    """Returns the shape and the dtype of a result [N, ...]."""
    return jax.ShapeDtypeStruct((self.N, *shape), self.wide)

  def _grid_of_queries(self):
    """Returns the grid that adds up over the blocks of keys."""
    return _Grid((self.N, self.B, self.I, self.J), _Place, 1, self._clamp_keys)

  def _clamp_keys(self, at, first_ref):
    """Returns the nearest place with the same queries that is visited."""
    last = at.i + self.options.memory_blocks
    first = jnp.clip(first_ref[at.n, at.b, at.i], 0, last)
    return at._replace(j=jnp.clip(at.j, first, last))

  def _clamp_queries(self, at, first_ref):
    """Returns the nearest place with the same keys whose queries are not before them."""
    del first_ref
    return at._replace(i=jnp.maximum(at.i, at.j - self.options.memory_blocks))

  # The forward pass.

  def attend(self):
    """Returns values [N, B, T, H] and log masses [N, B, I, 1, K]."""
    K, H, wide = self.K, self.H, self.wide
    outputs = {
      'values': (self._array(self.B, self.I * K, H), self.query_block),
      'log_mass': (self._array(self.B, self.I, 1, K), self.query_row),
    }

    def body(at, is_visited, refs):
      numerator, mass, maximum = refs['numerator'], refs['mass'], refs['maximum']

      @pl.when(at.j == 0)
      def _():
        numerator[...] = jnp.zeros((K, H), wide)
        mass[...] = jnp.zeros((K, LANES), wide)
        # Finite, so that the difference of two maxima is not NaN.
        maximum[...] = jnp.full((K, LANES), jnp.finfo(wide).min / 2, wide)

      @pl.when(is_visited)
      def _():
        scores_KxK, visible_KxK, unclipped_KxK = self._scores(at, refs)
        masked_KxK = jnp.where(visible_KxK, scores_KxK, -jnp.inf)
        before_Kx1 = maximum[:, :1]
        max_Kx1 = jnp.maximum(before_Kx1, masked_KxK.max(axis=1, keepdims=True))
        exp_KxK = jnp.exp(masked_KxK - max_Kx1)
        weights_KxK, terms_KxK = span.masked_weights(
          exp_KxK, unclipped_KxK, self.options.renormalize
        )
        rescale_Kx1 = jnp.exp(before_Kx1 - max_Kx1)
        product_KxH = self._dot(weights_KxK.astype(self.dtype), refs['value'][...])
        numerator[...] = numerator[...] * rescale_Kx1 + product_KxH
        mass[...] = mass[...] * rescale_Kx1 + terms_KxK.sum(axis=1, keepdims=True)
        maximum[...] = jnp.broadcast_to(max_Kx1, (K, LANES))

      @pl.when(at.j == self.J - 1)
      def _():
        mass_Kx1 = mass[:, :1]
        mass_Kx1 = jnp.where(mass_Kx1 > 0, mass_Kx1, 1)
        refs['values'][...] = numerator[...] / mass_Kx1
        refs['log_mass'][...] = _to_row(maximum[:, :1] + jnp.log(mass_Kx1))

    scratch = {'numerator': (K, H), 'mass': (K, LANES), 'maximum': (K, LANES)}
    result = self._call('forward', body, self._grid_of_queries(), {}, outputs, scratch)
    return result['values'], result['log_mass']

  def _scores(self, at, refs):
    """Returns the scores of a pair of blocks, which of them are visible, and the span's mask."""
    K, options = self.K, self.options
    scores_KxK = self._dot(refs['query'][...], refs['key'][...], transpose=True)
    if 'distance_query' in refs:
      parts = []
      for half in (0, 1):
        part = self._dot(refs['distance_query'][...], refs[f'encoding_{half}'][...], transpose=True)
        if 'bias_0' in refs:
          part += refs[f'bias_{half}'][...]
        parts.append(part)
      scores_KxK += _skew(jnp.concatenate(parts, axis=1))
    scores_KxK = softmax.cap_logits(scores_KxK, options.logit_cap)
    row_KxK, column_KxK = (jax.lax.broadcasted_iota(jnp.int32, (K, K), axis) for axis in (0, 1))
    distance_KxK = (at.i + options.memory_blocks - at.j) * K + row_KxK - column_KxK
    nearest_KxK = distance_KxK - (not options.sees_itself)
    query_documents_KxK = jnp.broadcast_to(refs['query_documents'][...], (K, K)).T
    visible_KxK = (nearest_KxK >= 0) & (query_documents_KxK == refs['key_documents'][...])
    if options.window is not None:
      visible_KxK &= distance_KxK < options.window
    unclipped_KxK = None
    if 'span' in refs:
      span_KxK = jnp.broadcast_to(refs['span'][...], (K, K)).T
      unclipped_KxK = span.unclipped_mask(
        span_KxK, nearest_KxK.astype(span_KxK.dtype), options.ramp
      )
      if options.renormalize:
        visible_KxK &= unclipped_KxK >= 0
    return scores_KxK, visible_KxK, unclipped_KxK

  def _dot(self, a, b, transpose: bool = False):
    """Returns a b or a b^T in at least float32."""
    numbers = (((1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=self.wide)

  # The gradient.

  def gradient(self, values, log_mass, d_values, d_log_mass):
    """Returns the gradient of the operands."""
    d_mass = d_log_mass - (values * d_values).sum(axis=-1).reshape(log_mass.shape)
    extra = {
      'd_values': (d_values.astype(self.dtype), self.query_block),
      'log_mass': (log_mass, self.query_row),
      'd_mass': (d_mass, self.query_row),
    }
    gradient = self._query_gradient(extra) | self._key_gradient(extra)
    if self.operands.encoding_NxRKxH is not None:
      gradient |= self._distance_gradient(extra)
    operands = self.operands._asdict()
    return Operands(
      **{
        name: None if array is None else gradient[name].astype(array.dtype)
        for name, array in operands.items()
      }
    )

  def _block_gradient(self, at, refs):
    """Returns weights [K, K], the gradient of the scores before the cap, and that of the spans."""
    scores_KxK, visible_KxK, unclipped_KxK = self._scores(at, refs)
    log_mass_Kx1, d_mass_Kx1 = _to_column(refs['log_mass'][...]), _to_column(refs['d_mass'][...])
    exp_KxK = jnp.exp(jnp.where(visible_KxK, scores_KxK, -jnp.inf) - log_mass_Kx1)
    d_weights_KxK = self._dot(refs['d_values'][...], refs['value'][...], transpose=True)
    weigh = functools.partial(span.masked_weights, renormalize=self.options.renormalize)
    (weights_KxK, terms_KxK), pullback = jax.vjp(weigh, exp_KxK, unclipped_KxK)
    d_terms_KxK = jnp.broadcast_to(d_mass_Kx1, terms_KxK.shape)
    d_exp_KxK, d_unclipped_KxK = pullback((d_weights_KxK, d_terms_KxK))
    d_span_Kx1 = None
    if d_unclipped_KxK is not None:
      d_span_Kx1 = d_unclipped_KxK.sum(axis=1, keepdims=True) / self.options.ramp
    d_scores_KxK = exp_KxK * d_exp_KxK
    if self.options.logit_cap is not None:
      d_scores_KxK *= 1 - jnp.square(scores_KxK / self.options.logit_cap)
    return weights_KxK, d_scores_KxK, d_span_Kx1

  def _query_gradient(self, extra):
    """Returns the gradients of queries and spans."""
    K, H = self.K, self.H
    query = self._array(self.B, self.I * K, H), self.query_block
    outputs, scratch = {'query_NxBxTxH': query}, {'d_query': (K, H)}
    if 'distance_query' in self.inputs:
      outputs['distance_query_NxBxTxH'] = query
      scratch['d_distance_query'] = (K, H)
    if 'span' in self.inputs:
      outputs['span_NxBxIx1xK'] = self._array(self.B, self.I, 1, K), self.query_row
      scratch['d_span'] = (K, LANES)

    def body(at, is_visited, refs):
      pl.when(at.j == 0)(lambda: self._clear(refs, scratch))

      @pl.when(is_visited)
      def _():
        _, d_scores_KxK, d_span_Kx1 = self._block_gradient(at, refs)
        d_scores_KxK = d_scores_KxK.astype(self.dtype)
        refs['d_query'][...] += self._dot(d_scores_KxK, refs['key'][...])
        if 'd_distance_query' in refs:
          d_distances_Kx2K = _unskew(d_scores_KxK)
          for half in (0, 1):
            part_KxK = d_distances_Kx2K[:, half * K : (half + 1) * K]
            refs['d_distance_query'][...] += self._dot(part_KxK, refs[f'encoding_{half}'][...])
        if d_span_Kx1 is not None:
          refs['d_span'][...] += d_span_Kx1

      @pl.when(at.j == self.J - 1)
      def _():
        for output, total in zip(outputs, scratch, strict=True):
          is_row = total == 'd_span'
          refs[output][...] = _to_row(refs[total][:, :1]) if is_row else refs[total][...]

    return self._call('queries', body, self._grid_of_queries(), extra, outputs, scratch)

  def _key_gradient(self, extra):
    """Returns the gradients of keys and values."""
    K, H = self.K, self.H
    key = self._array(self.B, self.J * K, H), self.key_block
    outputs = {'key_NxBxSxH': key, 'value_NxBxSxH': key}
    scratch = {'d_key': (K, H), 'd_value': (K, H)}

    def body(at, is_visited, refs):
      pl.when(at.i == 0)(lambda: self._clear(refs, scratch))

      @pl.when(is_visited)
      def _():
        weights_KxK, d_scores_KxK, _ = self._block_gradient(at, refs)
        transposed = lambda x_KxK: x_KxK.T.astype(self.dtype)
        refs['d_key'][...] += self._dot(transposed(d_scores_KxK), refs['query'][...])
        refs['d_value'][...] += self._dot(transposed(weights_KxK), refs['d_values'][...])

      @pl.when(at.i == self.I - 1)
      def _():
        for output, total in zip(outputs, scratch, strict=True):
          refs[output][...] = refs[total][...]

    place = lambda n, b, j, i: _Place(n, b, i, j)
    grid = _Grid((self.N, self.B, self.J, self.I), place, 1, self._clamp_queries)
    return self._call('keys', body, grid, extra, outputs, scratch)

  def _distance_gradient(self, extra):
    """Returns the gradients of the encodings and biases of distances.

    Pairs of blocks with the same distance share two blocks of encodings: the gradients of the first
    and of the second are added up apart, each [N, J K, H], and together afterwards.
    """
    K, H, N, J = self.K, self.H, self.N, self.J
    has_bias = self.operands.bias_NxRx1xK is not None
    outputs, scratch = {}, {}
    for half in (0, 1):
      outputs[f'encoding_half_{half}'] = self._array(J * K, H), self._encoding_block(0)
      scratch[f'd_encoding_{half}'] = (K, H)
    for half in (0, 1) if has_bias else ():
      outputs[f'bias_half_{half}'] = self._array(J, 1, K), self._bias_block(0)
      scratch[f'd_bias_{half}'] = (1, K)

    def body(at, is_visited, refs):
      is_first = (at.b == 0) & (at.i == 0)
      is_last = (at.b == self.B - 1) & (at.i == self.I - 1)
      pl.when(is_first)(lambda: self._clear(refs, scratch))

      @pl.when(is_visited & (at.j >= 0))
      def _():
        _, d_scores_KxK, _ = self._block_gradient(at, refs)
        d_distances_Kx2K = _unskew(d_scores_KxK)
        for half in (0, 1):
          part_KxK = d_distances_Kx2K[:, half * K : (half + 1) * K]
          transposed_KxK = part_KxK.T.astype(self.dtype)
          refs[f'd_encoding_{half}'][...] += self._dot(transposed_KxK, refs['distance_query'][...])
          if has_bias:
            refs[f'd_bias_{half}'][...] += part_KxK.sum(axis=0, keepdims=True)

      @pl.when(is_last)
      def _():
        for output, total in zip(outputs, scratch, strict=True):
          refs[output][...] = refs[total][...]

    # r is the index of the first block of distances.
    place = lambda n, r, b, i: _Place(n, b, i, r + 1 + i - self.I)
    grid = _Grid((N, J, self.B, self.I), place, 2, self._clamp_keys)
    halves = self._call('distances', body, grid, extra, outputs, scratch)
    add = lambda name, size: (  # both halves, the second one block later
      pad(halves[f'{name}_half_0'], 1, (0, size)) + pad(halves[f'{name}_half_1'], 1, (size, 0))
    )
    d_encoding = add('encoding', K)
    if not _has_heads(self.operands):
      d_encoding = d_encoding.sum(axis=0, keepdims=True)
    d_bias = {'bias_NxRx1xK': add('bias', 1)} if has_bias else {}
    return {'encoding_NxRKxH': d_encoding} | d_bias

  def _clear(self, refs, names):
    for name in names:
      refs[name][...] = jnp.zeros(refs[name].shape, self.wide)


def _skew(x_Kx2K: jax.Array) -> jax.Array:
  """Returns y[a, c] = x[a, K - 1 - a + c], [K, K]."""
  K = x_Kx2K.shape[0]
  return _rotate(x_Kx2K, lambda steps: 2 * K - steps)[:, :K]


def _unskew(y_KxK: jax.Array) -> jax.Array:
  """Returns x[a, K - 1 - a + c] = y[a, c], else 0, [K, 2 K]."""
  y_Kx2K = jnp.concatenate([y_KxK, jnp.zeros_like(y_KxK)], axis=1)
  return _rotate(y_Kx2K, lambda steps: steps)


def _rotate(x_Kx2K: jax.Array, to_right: Callable[[int], int]) -> jax.Array:
  """Rotates row a by K - 1 - a: by each power of 2 in that number."""
  # The strided `pltpu.roll` exists from TPU v5 on, in float32, and in one direction alone.
  K = x_Kx2K.shape[0]
  number_Kx2K = K - 1 - jax.lax.broadcasted_iota(jnp.int32, x_Kx2K.shape, 0)
  steps = 1
  while steps < K:
    rotated_Kx2K = pltpu.roll(x_Kx2K, to_right(steps), 1)
    x_Kx2K = jnp.where((number_Kx2K & steps) > 0, rotated_Kx2K, x_Kx2K)
    steps *= 2
  return x_Kx2K


# A kernel can transpose square matrices, not vectors.
def _to_column(x_1xK: jax.Array) -> jax.Array:
  K = x_1xK.shape[1]
  return jnp.broadcast_to(x_1xK, (K, K)).T[:, :1]


def _to_row(x_Kx1: jax.Array) -> jax.Array:
  K = x_Kx1.shape[0]
  return jnp.broadcast_to(x_Kx1, (K, K)).T[:1]
