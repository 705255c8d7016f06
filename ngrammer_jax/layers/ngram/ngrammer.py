"""The N-Grammer layer: latent n-grams looked up in hashed tables (Roy et al. 2022).

For every head, with the cluster id z_t of the token x_t (section 3):

  g_t = table[hash(z_t, z_{t-1}, ...)]
  y_t = [LN(x_t)[: H - E]; LN(g_t)]  ('concat')  or  LN(x_t) + LN(g_t)  ('add')

B batch, T segment length, S tokens of memory and segment, N heads, H head width, E n-gram width,
K clusters, V rows of the table of one head and order, G orders, R slots of the memory.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config.ngram import sizes as ngram_sizes
from ngrammer_jax.layers import axis_names, documents
from ngrammer_jax.layers.ngram import per_head, quantizer, table
from ngrammer_jax.layers.ngram.hashing import NGramHash
from ngrammer_jax.layers.ngram.windows import Windows


def most_attended(scores_BxNxTxS: jax.Array, allowed_BxTxS: jax.Array) -> jax.Array:
  """Returns the position of the allowed key with the highest score, int32 [B, N, T].

  The first of equal scores wins. S if no key is allowed or all scores are minus infinity; see
  `paired_ids`.
  """
  scores_BxNxTxS = jnp.where(allowed_BxTxS[:, None], scores_BxNxTxS, -jnp.inf)
  best_BxNxT, S = scores_BxNxTxS.argmax(axis=-1), scores_BxNxTxS.shape[-1]
  return jnp.where(scores_BxNxTxS.max(axis=-1) > -jnp.inf, best_BxNxT, S)


def paired_ids(
  ids_BxSxN: jax.Array, pair_ids: jax.Array, continues_BxT: jax.Array | None = None, start: int = 0
) -> jax.Array:
  """Returns the ids at the positions that the tokens form bi-grams with, [B, T, N].

  Args:
    ids_BxSxN: cluster or token ids of the memory and the segment.
    pair_ids: [B, T] or [B, N, T] positions to pair with, S for no pair.
    continues_BxT: false at document starts, which have no pair. None ignores documents.
    start: the id in place of a missing pair.
  """
  index_BxTxN = pair_ids[..., None] if pair_ids.ndim == 2 else pair_ids.swapaxes(1, 2)
  padded = jnp.pad(ids_BxSxN, ((0, 0), (0, 1), (0, 0)), constant_values=start)
  pairs_BxTxN = jnp.take_along_axis(padded, index_BxTxN, axis=1)
  if continues_BxT is None:
    return pairs_BxTxN
  return jnp.where(continues_BxT[..., None], pairs_BxTxN, start)


def empty_memory(batch: int, heads: int, orders: tuple[int, ...] = (2,)) -> dict[str, jax.Array]:
  """Returns the memory before the first segment: R = max(orders) - 1 empty slots.

  Keys: `ids` int32 [B, R, N], cluster ids of the last tokens; `documents` int32 [B, R].
  """
  return Windows(max(orders)).empty_state(batch, heads)


class NGrammer(nn.Module):
  """Combines every token with the embeddings of its latent n-grams.

  A drop-in layer from [B, T, D] to [B, T, D]. The centroids are in the mutable collection
  `codebook` (see `ProductQuantizer`), everything else is in `params`. The n-gram tables are one
  parameter [G N V, E] with logical axes `ngram_vocab`, `ngram_embed`, looked up by gather.

  Attributes:
    heads: N. D must be a multiple; features are head-major.
    clusters: K of the codebook. None uses n-grams of the raw `ids` without a quantiser.
    vocabulary_size: V, rows of the table of each head and order.
    dim: E. 'concat' replaces the last G E features of each head; 'add' needs E = H.
    combine: 'concat' or 'add'.
    orders: lengths of the n-grams; (2,) is the paper, (2, 3) adds tri-grams.
    distinct_start: whether positions before a document have their own id instead of that of
      cluster 0.
    id_vocabulary: number of distinct raw ids, required if clusters is None.
    decay, epsilon, prenormalize, empty, initial: options of the quantiser.
    padding_trains: whether padding is treated like other tokens, in codebook and output.
    exchange: how devices exchange the gradient of the tables, see `table.TableSharding`.
    dtype: dtype of the output. None: that of the input. Parameters, centroids and norm statistics
      have at least float32.
    return_memory: whether to return the memory too, or the embeddings alone.

  Raises:
    ValueError: an input that is empty or not [B, T, D], incompatible sizes, or too few primes
      between V and 2 V for N heads.
  """

  heads: int
  clusters: int | None
  vocabulary_size: int
  dim: int = 8
  combine: str = 'concat'
  orders: tuple[int, ...] = (2,)
  distinct_start: bool = False
  id_vocabulary: int | None = None
  decay: float = 0.999
  epsilon: float = 1e-6
  prenormalize: bool = False
  empty: str = 'shrink'
  initial: str = 'uniform'
  padding_trains: bool = False
  exchange: str = 'auto'
  dtype: jnp.dtype | None = jnp.float32
  return_memory: bool = True

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    *,
    ids: jax.Array | None = None,
    documents_BxT: jax.Array | None = None,
    valid_BxT: jax.Array | None = None,
    pair_ids: jax.Array | None = None,
    earlier_ids: jax.Array | None = None,
    vocabulary: quantizer.Vocabulary | None = None,
    memory: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]] | jax.Array:
    """Returns the combined embeddings [B, T, D] and the memory for the next segment.

    Without `return_memory`, only the embeddings.

    The intermediate `lookup` has the `ids` [B, T, N] at each place and the `rows` [B, T, G N].

    Args:
      x_BxTxD: embeddings.
      ids: raw ids [B, T] or [B, T, N], for a layer without a quantiser.
      documents_BxT: document number of each token (any integers >= 0 that change at document
        boundaries). No n-gram crosses a boundary. None means one document per row.
      valid_BxT: 0 at padding. Unless padding_trains, its output is 0 and the codebook ignores it.
      pair_ids: positions to pair with instead of the predecessor, see `paired_ids`. Pairs may
        cross document boundaries, but the first token of a document has no pair. The layer then
        takes no memory, and returns the `ids` [B, T, N] of the segment.
      earlier_ids: ids [B, M, N] of tokens before the segment; pair_ids count from the first one.
      vocabulary: the embedding lookup of x, see `ProductQuantizer`.
      memory: the memory that the previous segment returned; None at the start of a stream.
    """
    if x_BxTxD.ndim != 3 or not x_BxTxD.size:
      raise ValueError(
        f'an NGrammer needs inputs [B, T, D] with at least one token, not of shape '
        f'{x_BxTxD.shape}: for one sequence [T, D], pass x[None]'
      )
    dtype = x_BxTxD.dtype if self.dtype is None else self.dtype
    self.check(x_BxTxD.shape[-1])
    N, E, V, G = self.heads, self.dim, self.vocabulary_size, len(self.orders)
    x_BxTxNxH = x_BxTxD.reshape(*x_BxTxD.shape[:2], N, -1)
    counted_BxT = None if self.padding_trains else valid_BxT
    K, ids_BxTxN = self._quantize(x_BxTxNxH, ids, counted_BxT, vocabulary)
    if pair_ids is None:
      windows = Windows(max(self.orders), fill_id=K if self.distinct_start else 0)
      gram, memory = windows(ids_BxTxN, documents_BxT, memory, valid_BxT=valid_BxT)
    elif memory is not None:
      raise ValueError('pair_ids take earlier_ids instead of a memory')
    else:
      gram = self._pairs(ids_BxTxN, K, documents_BxT, pair_ids, earlier_ids)
      memory = {'ids': ids_BxTxN}
    rows_BxTxGN = self.ngram_hash()(gram)
    self.sow('intermediates', 'lookup', {'ids': gram, 'rows': rows_BxTxGN})
    first_GN = V * jnp.arange(G * N, dtype=jnp.int32)
    ngram_BxTxGNxE = table.lookup_parameter(
      self, 'table', self._table((G * N * V, E), dtype), rows_BxTxGN + first_GN, self.exchange
    )
    y_BxTxNxH = per_head.combine(x_BxTxNxH, ngram_BxTxGNxE, self.combine, dtype)
    y_BxTxD = y_BxTxNxH.reshape(x_BxTxD.shape)
    if counted_BxT is not None:
      y_BxTxD = jnp.where(counted_BxT[..., None] > 0, y_BxTxD, 0)
    return (y_BxTxD, memory) if self.return_memory else y_BxTxD

  def check(self, width: int) -> None:
    """Raises ValueError if the sizes of the layer do not fit inputs of this width, D."""
    sizes = self.heads, self.vocabulary_size, self.dim, self.combine, self.orders
    ngram_sizes.check(width, *sizes)

  def ngram_hash(self) -> NGramHash:
    """Returns the hash of the layer, with the rows of each head."""
    num_ids = self.id_vocabulary if self.clusters is None else self.clusters
    sizes = ((self.vocabulary_size,) * self.heads,) * len(self.orders)
    return NGramHash('praxis', self.orders, sizes, num_ids + self.distinct_start)

  def _quantize(self, x_BxTxNxH, ids, valid_BxT, vocabulary):
    """Returns the number of distinct ids, and the ids [B, T, N]."""
    if self.clusters is not None and self.clusters < 1:
      raise ValueError(f'clusters={self.clusters} must be at least 1, or None for raw ids')
    if self.clusters is None:
      if ids is None or self.id_vocabulary is None:
        raise ValueError('an NGrammer without clusters needs raw ids and their id_vocabulary')
      ids = ids[..., None] if ids.ndim == 2 else ids
      return self.id_vocabulary, jnp.broadcast_to(ids, x_BxTxNxH.shape[:3]).astype(jnp.int32)
    quantize = self.make_quantizer(name='quantizer')
    return self.clusters, quantize(x_BxTxNxH, valid_BxT, vocabulary)

  def make_quantizer(self, **fields: Any) -> quantizer.ProductQuantizer:
    """Returns the quantiser of the layer; unbound with `parent=None`."""
    return quantizer.make(self, **fields)

  def _pairs(self, ids_BxTxN, K, documents_BxT, pair_ids, earlier_ids):
    """Returns the ids of bi-grams of each token and its pair."""
    if self.orders != (2,):
      raise ValueError(f'pair_ids need orders=(2,), not {self.orders}')
    ids_BxSxN, continues_BxT = ids_BxTxN, None
    if earlier_ids is not None:
      ids_BxSxN = jnp.concatenate([earlier_ids, ids_BxTxN], axis=1)
    elif documents_BxT is not None:
      continues_BxT = jnp.diff(documents_BxT, axis=1, prepend=documents.NONE) == 0
    start = K if self.distinct_start else 0
    return ids_BxTxN, paired_ids(ids_BxSxN, pair_ids, continues_BxT, start)

  def _table(self, shape, dtype):
    bound = (6 / (self.vocabulary_size + shape[1])) ** 0.5  # Xavier, for the table of one head

    def uniform(key, shape, dtype):
      return jax.random.uniform(key, shape, dtype, -bound, bound)

    init = axis_names.with_axis_names(uniform, table.AXES)
    return self.param('table', init, shape, jnp.promote_types(dtype, jnp.float32))
