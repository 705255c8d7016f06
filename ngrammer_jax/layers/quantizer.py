"""Product quantisation by mini-batch k-means (N-Grammer, section 3.1).

Every head has a codebook of K centroids. A token belongs, per head, to its nearest
centroid; the centroids follow the tokens:

  z = argmin_k |x - m_k|^2
  m_k <- decay m_k + (1 - decay) s_k / (epsilon + c_k)

where s_k and c_k are the sum and the number of the tokens of cluster k, over the
global batch and without padding. Nothing is differentiated.

A cluster that received nothing shrinks by `decay` (praxis), is kept where it is, or,
when it has been all but unused for long, is revived: it goes beside the centroid of a
much used cluster and takes a part of its tokens.

B batch, T segment length, C tokens of a chunk, N heads, H head width, K clusters.
"""

from collections.abc import Mapping
import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

# Distances that exist at one time on one device, where one time step has no more. On CPU they
# stay in cache: 8 MB in float32, twice as fast as 64 MB. An accelerator wants larger products.
CPU_DISTANCES, DISTANCES = 2**21, 2**25

USAGE_DECAY = 0.99  # usage looks back about 100 steps
DEAD = 0.1  # of an even share: who is used less is dead


def _batch_shards() -> int:
  """Over how many devices the batch is spread, under the mesh and rules in force."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1
  axes = nn.logical_to_mesh_axes(('batch',))[0] or ()
  axes = (axes,) if isinstance(axes, str) else axes
  shards = 1
  for axis in axes:
    shards *= mesh.shape.get(axis, 1)
  return shards


def clustered(x: jax.Array, prenormalize: bool) -> jax.Array:
  """What is clustered of an input [..., N, H], in at least float32."""
  x = jax.lax.stop_gradient(x)
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if not prenormalize:
    return x
  norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
  return x / jnp.where(norm > 0, norm, 1)


def nearest_centroids(x_BxTxNxH: jax.Array, centroids_NxKxH: jax.Array) -> jax.Array:
  """Cluster id of every token and head, int32 [B, T, N].

  The lowest id wins a tie, and a token that is not finite gets id 0. The distances
  [B, T, N, K] never exist at once: a few time steps at a time are scored.
  """
  of = lambda limit: functools.partial(_nearest, limit=limit)
  return jax.lax.platform_dependent(
    x_BxTxNxH, centroids_NxKxH, cpu=of(CPU_DISTANCES), default=of(DISTANCES)
  )


def _nearest(x_BxTxNxH, centroids_NxKxH, *, limit):
  """The nearest centroids, with about `limit` distances at a time on a device."""
  B, T, N, H = x_BxTxNxH.shape
  K = centroids_NxKxH.shape[1]
  dtype = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
  centroids_NxKxH = centroids_NxKxH.astype(dtype)
  centre_Nx1xH = _coarse_centre(centroids_NxKxH)
  centroids_NxKxH = centroids_NxKxH - centre_Nx1xH
  half_norm_NxKx1 = 0.5 * jnp.square(centroids_NxKxH).sum(axis=-1, keepdims=True)
  index_Kx1 = jnp.arange(K, dtype=jnp.int32)[:, None]
  highest = jax.lax.Precision.HIGHEST  # a TPU would multiply in bfloat16 otherwise
  ids_BxTxN = nn.with_logical_constraint(jnp.zeros((B, T, N), jnp.int32), ('batch', 'length', None))
  if not ids_BxTxN.size:
    return ids_BxTxN
  # Chunks of time steps, so that a batch spread over devices stays where it is.
  shards = _batch_shards()
  rows = B if B % shards else B // shards  # of one device
  steps = min(max(limit // (rows * N * K), 1), T)

  def take(chunk, ids_BxTxN):
    # The last chunk begins earlier where T is no multiple, for reading and for writing.
    part = jax.lax.dynamic_slice_in_dim(x_BxTxNxH, chunk * steps, steps, axis=1)
    x_NxCxH = part.astype(dtype).transpose(2, 0, 1, 3).reshape(N, B * steps, H) - centre_Nx1xH
    # argmin |x - m|^2 = argmax x.m - |m|^2 / 2. The maximum first, then the first place
    # that attains it: XLA's argmax takes ten times as long on CPU.
    score_NxKxC = jnp.einsum('nkh,nch->nkc', centroids_NxKxH, x_NxCxH, precision=highest)
    score_NxKxC = score_NxKxC - half_norm_NxKx1
    best_Nx1xC = score_NxKxC.max(axis=1, keepdims=True)
    first_NxC = jnp.where(score_NxKxC == best_Nx1xC, index_Kx1, K).min(axis=1)
    first_NxC = jnp.where(jnp.isfinite(best_Nx1xC[:, 0]), first_NxC, 0)
    ids = first_NxC.reshape(N, B, steps).transpose(1, 2, 0)
    return jax.lax.dynamic_update_slice_in_dim(ids_BxTxN, ids, chunk * steps, axis=1)

  return jax.lax.fori_loop(0, -(-T // steps), take, ids_BxTxN)


def _coarse_centre(centroids_NxKxH: jax.Array) -> jax.Array:
  """The mean centroid, rounded to a power of two as coarse as the spread around it.

  An offset common to all centroids would cost the expanded distance its digits. Removing
  a round number removes the offset, and keeps exact what was exact: ties stay ties.
  """
  mean_Nx1xH = centroids_NxKxH.mean(axis=1, keepdims=True)
  spread_Nx1xH = jnp.abs(centroids_NxKxH - mean_Nx1xH).max(axis=1, keepdims=True)
  grid_Nx1xH = jax.lax.reduce_precision(spread_Nx1xH, exponent_bits=8, mantissa_bits=0)
  grid_Nx1xH = jnp.where(grid_Nx1xH > 0, grid_Nx1xH, 1)
  return jnp.round(mean_Nx1xH / grid_Nx1xH) * grid_Nx1xH


def nearest_of_rows(rows_VxNxH: jax.Array, centroids_NxKxH: jax.Array) -> jax.Array:
  """Cluster id of every row of a table and head, int32 [V, N], the rows shared by all devices."""
  V = rows_VxNxH.shape[0]
  shards = _batch_shards()
  rows = jnp.pad(rows_VxNxH, ((0, -V % shards), (0, 0), (0, 0)))
  rows = rows.reshape(shards, -1, *rows.shape[1:])
  rows = nn.with_logical_constraint(rows, ('batch', None, None, None))
  return nearest_centroids(rows, centroids_NxKxH).reshape(-1, rows.shape[2])[:V]


def cluster_statistics(
  x_BxTxNxH: jax.Array, ids_BxTxN: jax.Array, K: int, weight_BxT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Sum [N, K, H] and number [N, K] of the tokens of every cluster.

  `weight_BxT` is how often a token counts: 0 at padding. None: every token once.
  """
  N, H = x_BxTxNxH.shape[-2:]
  dtype = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
  x_BxTxNxH = x_BxTxNxH.astype(dtype)
  weight_BxTx1 = jnp.ones((*ids_BxTxN.shape[:2], 1), dtype)
  if weight_BxT is not None:
    weight_BxTx1 = weight_BxT.astype(dtype)[..., None]
    # Chosen, not only multiplied: padding may hold anything, also what is not a number.
    weighted_BxTxNxH = x_BxTxNxH * weight_BxTx1[..., None]
    x_BxTxNxH = jnp.where(weight_BxTx1[..., None] > 0, weighted_BxTxNxH, 0)
  slot_BxTxN = ids_BxTxN + K * jnp.arange(N, dtype=jnp.int32)
  # Rows as windows of [1, H]: windows of [H] are turned into them by a copy of all tokens.
  window = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))
  sums = jnp.zeros((N * K, H), dtype)
  sums = jax.lax.scatter_add(sums, slot_BxTxN.reshape(-1, 1), x_BxTxNxH.reshape(-1, 1, H), window)
  counts = jnp.zeros((N * K,), dtype).at[slot_BxTxN].add(weight_BxTx1)
  return sums.reshape(N, K, H), counts.reshape(N, K)


def moved_centroids(
  centroids_NxKxH: jax.Array,
  sums_NxKxH: jax.Array,
  counts_NxK: jax.Array,
  decay: float,
  epsilon: float,
  empty: str = 'shrink',
) -> jax.Array:
  """The centroids after one step of mini-batch k-means."""
  mean_NxKxH = sums_NxKxH / (epsilon + counts_NxK[..., None])
  moved_NxKxH = decay * centroids_NxKxH + (1 - decay) * mean_NxKxH
  if empty == 'shrink':
    return moved_NxKxH
  return jnp.where(counts_NxK[..., None] > 0, moved_NxKxH, centroids_NxKxH)


def revived(centroids_NxKxH: jax.Array, usage_NxK: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Centroids and usage after the dead have been put beside the most used.

  The r-th dead cluster of a head goes to the r-th most used one, a hundredth of its length
  away, if that has at least an even share; the two then count as equally used.
  """
  K = usage_NxK.shape[1]
  order_NxK = jnp.argsort(usage_NxK, axis=1)  # the dead come first
  giver_NxK = order_NxK[:, ::-1]
  of = lambda index: jnp.take_along_axis(usage_NxK, index, axis=1)
  split_NxK = (of(order_NxK) < DEAD / K) & (of(giver_NxK) >= 1 / K)
  half_NxK = of(giver_NxK) / 2
  beside_NxKxH = 1.01 * jnp.take_along_axis(centroids_NxKxH, giver_NxK[..., None], axis=1)
  row_Nx1 = jnp.arange(usage_NxK.shape[0])[:, None]
  nowhere = jnp.where(split_NxK, order_NxK, K)  # out of bounds: dropped
  centroids_NxKxH = centroids_NxKxH.at[row_Nx1, nowhere].set(beside_NxKxH, mode='drop')
  usage_NxK = usage_NxK.at[row_Nx1, nowhere].set(half_NxK, mode='drop')
  nowhere = jnp.where(split_NxK, giver_NxK, K)
  return centroids_NxKxH, usage_NxK.at[row_Nx1, nowhere].set(half_NxK, mode='drop')


class Vocabulary(NamedTuple):
  """What the inputs were looked up from: x = rows_VxD[tokens_BxT].

  rows_VxD may be None where the quantiser serves with the clusters of all tokens.
  """

  rows_VxD: jax.Array | None
  tokens_BxT: jax.Array


class ProductQuantizer(nn.Module):
  """Cluster ids of [B, T, N, H] inputs, and the codebook that learns them.

  The collection `codebook` holds the `centroids` [N, K, H], their `usage` [N, K], the
  running share of tokens that each receives, and `changed` [N], the share of the tokens of
  the first row that the last step moved to another cluster. It is updated when it is
  mutable, from the centroids before the step; in evaluation leave it immutable. For serving
  it may hold `token_ids` [V, N] instead: the cluster of every token.

  Where a step is computed in parts, the collection `statistics` is mutable instead: it gets the
  `sums` [N, K, H] and `counts` [N, K] of the tokens, and `moved` makes one update of their totals.

  Attributes:
    clusters: K, centroids of each head.
    decay: 1 - the learning rate of k-means.
    epsilon: added to the counts.
    prenormalize: cluster x / |x| instead of x; a zero vector stays zero.
    empty: what happens to clusters without tokens, `shrink`, `keep` or `revive`.
    initial: centroids are drawn from a Xavier-uniform or a unit normal distribution, or from
      the vocabulary.
  """

  clusters: int
  decay: float = 0.999
  epsilon: float = 1e-6
  prenormalize: bool = False
  empty: str = 'shrink'
  initial: str = 'uniform'

  @nn.compact
  def __call__(
    self,
    x_BxTxNxH: jax.Array,
    valid_BxT: jax.Array | None = None,
    vocabulary: Vocabulary | None = None,
  ) -> jax.Array:
    """Returns int32 ids [B, T, N].

    Args:
      x_BxTxNxH: inputs.
      valid_BxT: 0 at padding, which does not move the centroids.
      vocabulary: where x comes from. Where it has fewer rows than there are tokens, its rows
        are clustered instead of every token; the ids are the same.
    """
    if self.has_variable('codebook', 'token_ids'):
      return self.get_variable('codebook', 'token_ids')[vocabulary.tokens_BxT]
    B, T, N, H = x_BxTxNxH.shape
    x_BxTxNxH = clustered(x_BxTxNxH, self.prenormalize)
    rows_VxNxH = None
    if vocabulary is not None and vocabulary.rows_VxD is not None:
      rows_VxNxH = clustered(vocabulary.rows_VxD.reshape(-1, N, H), self.prenormalize)
    centroids, usage = self._codebook(x_BxTxNxH, rows_VxNxH)
    dtype = x_BxTxNxH.dtype
    weight_BxT = None if valid_BxT is None else (valid_BxT > 0).astype(dtype)
    valid_1xT = jnp.ones((1, T), dtype) if weight_BxT is None else weight_BxT[:1]
    if rows_VxNxH is None or len(rows_VxNxH) >= B * T:
      ids_BxTxN = nearest_centroids(x_BxTxNxH, centroids.value)
      counted = x_BxTxNxH, ids_BxTxN
    else:
      ids_VxN = nearest_of_rows(rows_VxNxH, centroids.value)
      ids_BxTxN = ids_VxN[vocabulary.tokens_BxT]
      zeros_1xV = jnp.zeros((1, len(rows_VxNxH)), dtype)
      weight_BxT = zeros_1xV.at[0, vocabulary.tokens_BxT].add(
        1 if weight_BxT is None else weight_BxT
      )
      counted = rows_VxNxH[None], ids_VxN[None]
    if self.is_initializing():
      self._note_changes(jnp.zeros((N,), dtype))
    elif self.is_mutable_collection('statistics'):
      sums, counts = cluster_statistics(*counted, self.clusters, weight_BxT)
      self.put_variable('statistics', 'sums', sums)
      self.put_variable('statistics', 'counts', counts)
    elif self.is_mutable_collection('codebook'):
      sums, counts = cluster_statistics(*counted, self.clusters, weight_BxT)
      before = {'centroids': centroids.value, 'usage': usage.value}
      after = self.moved(before, {'sums': sums, 'counts': counts})
      centroids.value, usage.value = after['centroids'], after['usage']
      after_1xTxN = nearest_centroids(x_BxTxNxH[:1], centroids.value)
      changed_1xTxN = (after_1xTxN != ids_BxTxN[:1]) & (valid_1xT > 0)[..., None]
      self._note_changes(changed_1xTxN.sum((0, 1), dtype=dtype) / jnp.maximum(valid_1xT.sum(), 1))
    return ids_BxTxN

  def _codebook(self, x_BxTxNxH, rows_VxNxH):
    N, H = x_BxTxNxH.shape[-2:]
    K, dtype = self.clusters, x_BxTxNxH.dtype

    def initial_centroids():
      key = self.make_rng('params')
      if self.initial == 'normal':
        return jax.random.normal(key, (N, K, H), dtype)
      if self.initial == 'data':
        if rows_VxNxH is None:
          raise ValueError('initial centroids of the data need the vocabulary of the inputs')
        rows = jax.random.permutation(key, len(rows_VxNxH))
        return rows_VxNxH[jnp.resize(rows, K)].swapaxes(0, 1)
      bound = (6 / (N * (K + H))) ** 0.5  # Xavier, the heads counted as receptive field
      return jax.random.uniform(key, (N, K, H), dtype, -bound, bound)

    def variable(name, init, *names):
      return self.variable('codebook', name, nn.with_logical_partitioning(init, names))

    return (
      variable('centroids', initial_centroids, 'heads', 'clusters', 'kv'),
      variable('usage', lambda: jnp.full((N, K), 1 / K, dtype), 'heads', 'clusters'),
    )

  def _note_changes(self, share_N):
    zeros = nn.with_logical_partitioning(lambda: jnp.zeros_like(share_N), ('heads',))
    self.variable('codebook', 'changed', zeros).value = share_N

  def moved(
    self, codebook: Mapping[str, jax.Array], statistics: Mapping[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """The codebook after the tokens whose sums and counts these are."""
    counts_NxK = statistics['counts']
    share_NxK = counts_NxK / jnp.maximum(counts_NxK.sum(axis=-1, keepdims=True), 1)
    usage_NxK = USAGE_DECAY * codebook['usage'] + (1 - USAGE_DECAY) * share_NxK
    how = self.decay, self.epsilon, self.empty
    centroids_NxKxH = moved_centroids(codebook['centroids'], statistics['sums'], counts_NxK, *how)
    if self.empty == 'revive':
      centroids_NxKxH, usage_NxK = revived(centroids_NxKxH, usage_NxK)
    return {**codebook, 'centroids': centroids_NxKxH, 'usage': usage_NxK}
