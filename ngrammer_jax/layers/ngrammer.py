"""The N-Grammer layer: latent n-grams looked up in hashed tables (Roy et al. 2022).

Per head: quantise the token to a cluster id z_t, put it together with z_{t-1} (and those
before, for orders above two), hash the n-gram to a row of a table, normalise the row and
the token, and join them. The width does not change.

B batch, T segment length, N heads, H head width, E n-gram width, K clusters,
V rows of the table of one head and order, G orders.
"""

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax import ngram_sizes
from ngrammer_jax.layers import cache, documents, hashing, normalization, quantizer, table


def most_attended(scores_BxNxTxS: jax.Array, may_BxTxS: jax.Array) -> jax.Array:
  """The key that each token attends to most among those it may pair with, int32 [B, N, T].

  S where there is none, the first of equals: positions as `paired_ids` takes them. A score of
  minus infinity is not attended to.
  """
  scores_BxNxTxS = jnp.where(may_BxTxS[:, None], scores_BxNxTxS, -jnp.inf)
  best_BxNxT, S = scores_BxNxTxS.argmax(axis=-1), scores_BxNxTxS.shape[-1]
  return jnp.where(scores_BxNxTxS.max(axis=-1) > -jnp.inf, best_BxNxT, S)


def paired_ids(
  ids_BxSxN: jax.Array, pair_ids: jax.Array, continues_BxT: jax.Array | None = None, start: int = 0
) -> jax.Array:
  """The id that each id forms a bi-gram with, where the positions are given, [B, T, N].

  Args:
    ids_BxSxN: cluster or token ids, of the memory and the segment.
    pair_ids: [B, T] or [B, N, T] positions to pair with, S for none.
    continues_BxT: false where a document starts: there is none. None: not looked at.
    start: the id that stands for none.
  """
  index_BxTxN = pair_ids[..., None] if pair_ids.ndim == 2 else pair_ids.swapaxes(1, 2)
  padded = jnp.pad(ids_BxSxN, ((0, 0), (0, 1), (0, 0)), constant_values=start)
  pairs_BxTxN = jnp.take_along_axis(padded, index_BxTxN, axis=1)
  if continues_BxT is None:
    return pairs_BxTxN
  return jnp.where(continues_BxT[..., None], pairs_BxTxN, start)


def previous_ids(
  ids_BxTxN: jax.Array,
  documents_BxT: jax.Array,
  memory: dict[str, jax.Array],
  order: int,
  start: int = 0,
) -> list[jax.Array]:
  """The ids 1, 2, ..., order - 1 steps back, [B, T, N] each; `start` outside the document."""
  T, R = ids_BxTxN.shape[1], memory['ids'].shape[1]
  all_BxSxN = jnp.concatenate([memory['ids'], ids_BxTxN], axis=1)
  all_BxS = jnp.concatenate([memory['documents'], documents_BxT], axis=1)
  previous = []
  for back in range(1, order):
    cut = slice(R - back, R - back + T)
    same_BxTx1 = (all_BxS[:, cut] == documents_BxT)[..., None]
    previous.append(jnp.where(same_BxTx1, all_BxSxN[:, cut], start))
  return previous


def empty_memory(batch: int, heads: int, orders: tuple[int, ...] = (2,)) -> dict[str, jax.Array]:
  """The seam before the first segment: R slots, one less than the highest order, all empty.

  Keys: `ids` int32 [B, R, N], cluster ids of the last tokens; `documents` int32 [B, R].
  """
  R = max(orders) - 1
  return {
    'ids': jnp.zeros((batch, R, heads), jnp.int32),
    'documents': jnp.full((batch, R), documents.NONE, jnp.int32),
  }


class NGrammer(nn.Module):
  """Joins every token with the learned vectors of its latent n-grams.

  A drop-in layer: [B, T, D] in, [B, T, D] out. The centroids live in the mutable
  collection `codebook` (see `ProductQuantizer`), everything else in `params`; the
  n-gram tables are one flat [G N V, E] parameter with logical axes `ngram_vocab`,
  `ngram_embed`, looked up by gather.

  Attributes:
    heads: N. D must be a multiple; features are head-major.
    clusters: K of the codebook. None: no quantiser, n-grams of the raw `ids`.
    vocabulary_size: V, rows of the table of each head and order.
    dim: E. 'concat' replaces the last G E features of each head; 'add' needs E = H.
    combine: 'concat' or 'add'.
    orders: lengths of the n-grams; (2,) is the paper, (2, 3) adds tri-grams.
    distinct_start: what lies before a document has an id of its own, and not that of
      cluster 0.
    id_vocabulary: number of distinct raw ids, needed when clusters is None.
    decay, epsilon, prenormalize, empty, initial: of the quantiser.
    padding_trains: padding moves the centroids and is joined with n-grams, as everything else.
    exchange: of the gradient of the tables between devices, see `table.Layout`.
    dtype: of the output.

  Raises:
    ValueError: sizes that do not fit, or too few primes between V and 2 V for N heads.
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
  dtype: jnp.dtype = jnp.float32

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
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the joined embeddings [B, T, D] and the memory for the next segment.

    Args:
      x_BxTxD: embeddings.
      ids: raw ids [B, T] or [B, T, N], for a layer without a quantiser.
      documents_BxT: document number of each token (any integers >= 0 that change at
        borders). No n-gram crosses a border. None: one document per row.
      valid_BxT: 0 at padding, which gives zeros and does not move the centroids, or else see
        padding_trains.
      pair_ids: positions to pair with instead of the predecessor, see `paired_ids`. A pair
        may reach across a border, but the first token of a document has none. The layer then
        takes no memory, and returns the `ids` [B, T, N] of the segment.
      earlier_ids: [B, M, N] of tokens before the segment, which pair_ids count first.
      vocabulary: where x was looked up, see `ProductQuantizer`.
      memory: what the previous segment returned; None at the start of a stream.
    """
    N, E, V, G = self.heads, self.dim, self.vocabulary_size, len(self.orders)
    ngram_sizes.check(x_BxTxD.shape[-1], N, V, E, self.combine, self.orders)
    x_BxTxNxH = x_BxTxD.reshape(*x_BxTxD.shape[:2], N, -1)
    counted_BxT = None if self.padding_trains else valid_BxT
    K, ids_BxTxN = self._ids(x_BxTxNxH, ids, counted_BxT, vocabulary)
    if pair_ids is None:
      grams, memory = self._grams(ids_BxTxN, K, documents_BxT, valid_BxT, memory)
    elif memory is not None:
      raise ValueError('pair_ids take earlier_ids instead of a memory')
    else:
      grams = [self._pairs(ids_BxTxN, K, documents_BxT, pair_ids, earlier_ids)]
      memory = {'ids': ids_BxTxN}
    rows_BxTxGN = jnp.concatenate(
      [hashing.ngram_rows(gram, K + self.distinct_start, V) for gram in grams], axis=-1
    )
    first_GN = V * jnp.arange(G * N, dtype=jnp.int32)
    ngram_BxTxGNxE = table.lookup(self._table(G * N * V, E), rows_BxTxGN + first_GN, self.exchange)
    y_BxTxD = self._joined(x_BxTxNxH, ngram_BxTxGNxE).reshape(x_BxTxD.shape)
    if counted_BxT is not None:
      y_BxTxD = jnp.where(counted_BxT[..., None] > 0, y_BxTxD, 0)
    return y_BxTxD, memory

  def _joined(self, x_BxTxNxH, ngram_BxTxGNxE):
    """Tokens and n-grams, normed and put together."""
    norm = functools.partial(normalization.LayerNorm, per_head=True, dtype=self.dtype)
    unigram_BxTxNxH = norm(name='unigram_norm')(x_BxTxNxH)
    ngram_BxTxGNxE = norm(name='ngram_norm')(ngram_BxTxGNxE)
    G, H = len(self.orders), unigram_BxTxNxH.shape[-1]
    ngrams = jnp.split(ngram_BxTxGNxE, G, axis=-2)
    if self.combine == 'add':
      return sum(ngrams, start=unigram_BxTxNxH)
    # Written over the last features, in place: two arrays of this size never exist.
    ngram, first = jnp.concatenate(ngrams, axis=-1), H - G * self.dim
    return jax.lax.dynamic_update_slice_in_dim(unigram_BxTxNxH, ngram, first, axis=-1)

  def _ids(self, x_BxTxNxH, ids, valid_BxT, vocabulary):
    """The number of distinct ids, and the ids [B, T, N]."""
    if self.clusters is not None and self.clusters < 1:
      raise ValueError(f'{self.clusters} clusters; at least 1, or None for raw ids')
    if self.clusters is None:
      if ids is None or self.id_vocabulary is None:
        raise ValueError('an NGrammer without clusters needs raw ids and their id_vocabulary')
      ids = ids[..., None] if ids.ndim == 2 else ids
      return self.id_vocabulary, jnp.broadcast_to(ids, x_BxTxNxH.shape[:3]).astype(jnp.int32)
    quantize = self.make_quantizer(name='quantizer')
    return self.clusters, quantize(x_BxTxNxH, valid_BxT, vocabulary)

  def make_quantizer(self, **module: Any) -> quantizer.ProductQuantizer:
    """What finds the clusters; with `parent=None`, apart from the layer."""
    fields = (self.prenormalize, self.empty, self.initial)
    how = self.clusters, self.decay, self.epsilon, *fields
    return quantizer.ProductQuantizer(*how, **module)

  def _pairs(self, ids_BxTxN, K, documents_BxT, pair_ids, earlier_ids):
    """The ids of the bi-grams of given pairs."""
    if self.orders != (2,):
      raise ValueError(f'pair_ids make bi-grams, but the orders are {self.orders}')
    ids_BxSxN, continues_BxT = ids_BxTxN, None
    if earlier_ids is not None:
      ids_BxSxN = jnp.concatenate([earlier_ids, ids_BxTxN], axis=1)
    elif documents_BxT is not None:
      continues_BxT = jnp.diff(documents_BxT, axis=1, prepend=documents.NONE) == 0
    start = K if self.distinct_start else 0
    return ids_BxTxN, paired_ids(ids_BxSxN, pair_ids, continues_BxT, start)

  def _grams(self, ids_BxTxN, K, documents_BxT, valid_BxT, memory):
    """For each order the ids of its n-grams, the current one first; the next memory."""
    B, T, N = ids_BxTxN.shape
    start = K if self.distinct_start else 0
    memory = empty_memory(B, N, self.orders) if memory is None else memory
    if documents_BxT is None:
      number_Bx1 = jnp.maximum(memory['documents'][:, -1:], 0)
      documents_BxT = jnp.broadcast_to(number_Bx1, (B, T))
    back = previous_ids(ids_BxTxN, documents_BxT, memory, max(self.orders), start)
    grams = [(ids_BxTxN, *back[: order - 1]) for order in self.orders]
    last = lambda before, new: cache.last(before, new, valid_BxT)
    now = {'ids': ids_BxTxN, 'documents': documents_BxT}
    return grams, jax.tree.map(last, memory, now)

  def _table(self, rows, E):
    bound = (6 / (self.vocabulary_size + E)) ** 0.5  # Xavier, each head's table by itself

    def uniform(key, shape, dtype):
      return jax.random.uniform(key, shape, dtype, -bound, bound)

    init = nn.with_logical_partitioning(uniform, table.AXES)
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    return self.param('table', init, (rows, E), param_dtype)
