"""The N-Grammer layer: latent bi-grams looked up in hashed tables (Roy et al. 2022).

Per head: quantise the token to a cluster id z_t, pair it with z_{t-1}, hash the pair
to a row of an n-gram table, normalise the row and the token, and join them. The width
does not change.

B batch, T segment length, N heads, H head width, E n-gram width, K clusters,
V rows of one head's table.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import cache, documents, hashing, normalization, quantizer

COMBINE = ('concat', 'add')


def check_shape(width: int, heads: int, vocabulary_size: int, dim: int, combine: str) -> None:
  """Raises ValueError, saying what to change, for sizes no layer can have."""
  if combine not in COMBINE:
    raise ValueError(f'combine {combine!r} is not one of {", ".join(COMBINE)}')
  if heads < 1 or width % heads:
    raise ValueError(f'{heads} heads do not divide the width {width}')
  H = width // heads
  if not 0 < dim <= H:
    raise ValueError(
      f'n-gram dim {dim} is not between 1 and the head width {H} (width {width} / {heads} heads)'
    )
  if combine == 'add' and dim != H:
    raise ValueError(f'combine "add" needs n-gram dim {dim} to equal the head width {H}')
  if heads * vocabulary_size >= 2**31:
    raise ValueError(
      f'{heads} heads of {vocabulary_size:,} n-grams exceed the 2^31 rows of a table'
    )
  hashing.primes_above(vocabulary_size, heads)


def previous_ids(
  ids_BxTxN: jax.Array,
  continues_BxT: jax.Array | None = None,
  pair_ids: jax.Array | None = None,
  before_BxN: jax.Array | None = None,
) -> jax.Array:
  """The id that each id forms a bi-gram with, [B, T, N]; 0 where there is none.

  Args:
    ids_BxTxN: cluster or token ids.
    continues_BxT: false where a document starts: nothing comes before.
    pair_ids: [B, T] or [B, N, T] positions to pair with instead of t - 1, T for none.
    before_BxN: ids of the token before the first, for a segment that continues.
  """
  B, T, N = ids_BxTxN.shape
  if pair_ids is None:
    before_BxN = jnp.zeros((B, N), ids_BxTxN.dtype) if before_BxN is None else before_BxN
    pairs_BxTxN = jnp.concatenate([before_BxN[:, None], ids_BxTxN[:, :-1]], axis=1)
  else:
    index_BxTxN = pair_ids[..., None] if pair_ids.ndim == 2 else pair_ids.swapaxes(1, 2)
    padded = jnp.pad(ids_BxTxN, ((0, 0), (0, 1), (0, 0)))
    pairs_BxTxN = jnp.take_along_axis(padded, index_BxTxN, axis=1)
  if continues_BxT is None:
    return pairs_BxTxN
  return jnp.where(continues_BxT[..., None], pairs_BxTxN, 0)


def empty_memory(batch: int, heads: int) -> dict[str, jax.Array]:
  """The seam before the first segment: one slot [B, 1] that holds no token.

  Keys: `ids` int32 [B, 1, N], cluster ids of the last token; `documents` int32 [B, 1].
  """
  return {
    'ids': jnp.zeros((batch, 1, heads), jnp.int32),
    'documents': jnp.full((batch, 1), documents.NONE, jnp.int32),
  }


class NGrammer(nn.Module):
  """Joins every token with the learned vector of its latent bi-gram.

  A drop-in layer: [B, T, D] in, [B, T, D] out. The centroids live in the mutable
  collection `codebook` (see `ProductQuantizer`), everything else in `params`; the
  n-gram table is one flat [N V, E] parameter with logical axes `ngram_vocab`,
  `ngram_embed`, looked up by gather.

  Attributes:
    heads: N. D must be a multiple; features are head-major.
    clusters: K of the codebook. None: no quantiser, bi-grams of the raw `ids`.
    vocabulary_size: V, rows of each head's n-gram table.
    dim: E. 'concat' replaces the last E features of each head; 'add' needs E = H.
    combine: 'concat' or 'add'.
    id_vocabulary: number of distinct raw ids, needed when clusters is None.
    decay, epsilon, prenormalize: of the quantiser.
    dtype: of the output.

  Raises:
    ValueError: sizes that do not fit, or too few primes between V and 2 V for N heads.
  """

  heads: int
  clusters: int | None
  vocabulary_size: int
  dim: int = 8
  combine: str = 'concat'
  id_vocabulary: int | None = None
  decay: float = 0.999
  epsilon: float = 1e-6
  prenormalize: bool = False
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
    memory: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the joined embeddings [B, T, D] and the memory for the next segment.

    Args:
      x_BxTxD: embeddings.
      ids: raw ids [B, T] or [B, T, N], for a layer without a quantiser.
      documents_BxT: document number of each token (any integers >= 0 that change at
        borders). No bi-gram crosses a border. None: one document per row.
      valid_BxT: 0 at padding, which gives zeros and does not move the centroids.
      pair_ids: positions to pair with instead of the predecessor, see `previous_ids`.
      memory: what the previous segment returned; None at the start of a stream.
    """
    N, E, V = self.heads, self.dim, self.vocabulary_size
    check_shape(x_BxTxD.shape[-1], N, V, E, self.combine)
    x_BxTxNxH = x_BxTxD.reshape(*x_BxTxD.shape[:2], N, -1)
    K, ids_BxTxN = self._ids(x_BxTxNxH, ids, valid_BxT)
    previous_BxTxN, memory = _previous_and_memory(
      ids_BxTxN, documents_BxT, valid_BxT, pair_ids, memory
    )
    rows_BxTxN = hashing.ngram_rows((ids_BxTxN, previous_BxTxN), K, V)
    # Every device looks for all heads in its share of the table's rows.
    everywhere = ('batch', 'length', None)
    rows_BxTxN = nn.with_logical_constraint(rows_BxTxN, everywhere)
    ngram_BxTxNxE = self._table(N * V, E)[rows_BxTxN + V * jnp.arange(N, dtype=jnp.int32)]
    ngram_BxTxNxE = nn.with_logical_constraint(ngram_BxTxNxE, (*everywhere, None))

    norm = functools.partial(normalization.LayerNorm, per_head=True, dtype=self.dtype)
    unigram_BxTxNxH = norm(name='unigram_norm')(x_BxTxNxH)
    ngram_BxTxNxE = norm(name='ngram_norm')(ngram_BxTxNxE)
    if self.combine == 'concat':
      y_BxTxNxH = jnp.concatenate([unigram_BxTxNxH[..., :-E], ngram_BxTxNxE], axis=-1)
    else:
      y_BxTxNxH = unigram_BxTxNxH + ngram_BxTxNxE
    y_BxTxD = y_BxTxNxH.reshape(x_BxTxD.shape)
    if valid_BxT is not None:
      y_BxTxD = jnp.where(valid_BxT[..., None] > 0, y_BxTxD, 0)
    return y_BxTxD, memory

  def _ids(self, x_BxTxNxH, ids, valid_BxT):
    """The number of distinct ids, and the ids [B, T, N]."""
    if self.clusters is not None and self.clusters < 1:
      raise ValueError(f'{self.clusters} clusters; at least 1, or None for raw ids')
    if self.clusters is None:
      if ids is None or self.id_vocabulary is None:
        raise ValueError('an NGrammer without clusters needs raw ids and their id_vocabulary')
      ids = ids[..., None] if ids.ndim == 2 else ids
      return self.id_vocabulary, jnp.broadcast_to(ids, x_BxTxNxH.shape[:3]).astype(jnp.int32)
    quantize = quantizer.ProductQuantizer(
      self.clusters, self.decay, self.epsilon, self.prenormalize, name='quantizer'
    )
    return self.clusters, quantize(x_BxTxNxH, valid_BxT)

  def _table(self, rows, E):
    bound = (6 / (self.vocabulary_size + E)) ** 0.5  # Xavier, each head's table by itself

    def init(key, shape, dtype):
      return jax.random.uniform(key, shape, dtype, -bound, bound)

    names = ('ngram_vocab', 'ngram_embed')
    param_dtype = jnp.promote_types(self.dtype, jnp.float32)
    return self.param('table', nn.with_logical_partitioning(init, names), (rows, E), param_dtype)


def _previous_and_memory(ids_BxTxN, documents_BxT, valid_BxT, pair_ids, memory):
  """Predecessors within the document, and the seam for the next segment."""
  B, T, N = ids_BxTxN.shape
  memory = empty_memory(B, N) if memory is None else memory
  # Given pairs reach wherever they point, unless a document is known to start there.
  guarded = pair_ids is None or documents_BxT is not None
  if documents_BxT is None:
    number_Bx1 = jnp.maximum(memory['documents'][:, -1:], 0)
    documents_BxT = jnp.broadcast_to(number_Bx1, (B, T))
  before_BxT = jnp.concatenate([memory['documents'][:, -1:], documents_BxT[:, :-1]], axis=1)
  continues_BxT = before_BxT == documents_BxT if guarded else None
  previous_BxTxN = previous_ids(ids_BxTxN, continues_BxT, pair_ids, memory['ids'][:, -1])
  take = lambda before, new: cache.last(before, new, valid_BxT)
  return previous_BxTxN, jax.tree.map(take, memory, {'ids': ids_BxTxN, 'documents': documents_BxT})
