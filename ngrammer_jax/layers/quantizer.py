"""Product quantisation by mini-batch k-means (N-Grammer, section 3.1).

Every head has a codebook of K centroids. A token belongs, per head, to its nearest
centroid; the centroids follow the tokens:

  z = argmin_k |x - m_k|^2
  m_k <- decay m_k + (1 - decay) s_k / (epsilon + c_k)

where s_k and c_k are the sum and the number of the tokens of cluster k, over the
global batch and without padding. A cluster that received nothing shrinks by
`decay`. Nothing is differentiated.

B batch, T segment length, N heads, H head width, K clusters.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

# Tokens whose distances exist at one time on one device. Measured on CPU: the
# distances of 256 to 1024 tokens stay in cache; larger chunks only cost memory.
CHUNK_TOKENS = 1024


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


def nearest_centroids(x_BxTxNxH: jax.Array, centroids_NxKxH: jax.Array) -> jax.Array:
  """Cluster id of every token and head, int32 [B, T, N].

  The lowest id wins a tie, and a token that is not finite gets id 0. The distances
  [B, T, N, K] never exist at once: a few time steps at a time are scored.
  """
  B, _, _, _ = x_BxTxNxH.shape
  K = centroids_NxKxH.shape[1]
  dtype = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
  centroids_NxKxH = centroids_NxKxH.astype(dtype)
  centre_Nx1xH = _coarse_centre(centroids_NxKxH)
  centroids_NxKxH = centroids_NxKxH - centre_Nx1xH
  half_norm_NxK = 0.5 * jnp.square(centroids_NxKxH).sum(axis=-1)
  highest = jax.lax.Precision.HIGHEST  # a TPU would multiply in bfloat16 otherwise

  def of_step(x_BxNxH):
    x_BxNxH = x_BxNxH.astype(dtype) - centre_Nx1xH[:, 0]
    # argmin |x - m|^2 = argmax x.m - |m|^2 / 2. The maximum first, then the first place
    # that attains it: XLA's argmax takes ten times as long on CPU.
    score_NxBxK = jnp.einsum('bnh,nkh->nbk', x_BxNxH, centroids_NxKxH, precision=highest)
    score_NxBxK = score_NxBxK - half_norm_NxK[:, None, :]
    best_NxBx1 = score_NxBxK.max(axis=-1, keepdims=True)
    index_K = jnp.arange(K, dtype=jnp.int32)
    first_NxB = jnp.where(score_NxBxK == best_NxBx1, index_K, K).min(axis=-1)
    return jnp.where(jnp.isfinite(best_NxBx1[..., 0]), first_NxB, 0).T

  # Chunks of time steps, so that a batch spread over devices stays where it is.
  steps = max(1, CHUNK_TOKENS * _batch_shards() // B)
  ids_TxBxN = jax.lax.map(of_step, x_BxTxNxH.swapaxes(0, 1), batch_size=steps)
  return ids_TxBxN.swapaxes(0, 1)


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


def cluster_statistics(
  x_BxTxNxH: jax.Array, ids_BxTxN: jax.Array, K: int, valid_BxT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Sum [N, K, H] and number [N, K] of the valid tokens of every cluster."""
  N, H = x_BxTxNxH.shape[-2:]
  dtype = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
  valid_BxT = jnp.ones(x_BxTxNxH.shape[:2]) if valid_BxT is None else valid_BxT
  weight_BxT = (valid_BxT > 0).astype(dtype)
  slot_BxTxN = ids_BxTxN + K * jnp.arange(N, dtype=jnp.int32)
  # Chosen, not multiplied: padding may hold anything, also what is not a number.
  kept_BxTx1x1 = weight_BxT[..., None, None] > 0
  weighted_BxTxNxH = jnp.where(kept_BxTx1x1, x_BxTxNxH.astype(dtype), 0)
  sums = jnp.zeros((N * K, H), dtype).at[slot_BxTxN].add(weighted_BxTxNxH)
  counts = jnp.zeros((N * K,), dtype).at[slot_BxTxN].add(weight_BxT[..., None])
  return sums.reshape(N, K, H), counts.reshape(N, K)


def moved_centroids(
  centroids_NxKxH: jax.Array,
  sums_NxKxH: jax.Array,
  counts_NxK: jax.Array,
  decay: float,
  epsilon: float,
) -> jax.Array:
  """The centroids after one step of mini-batch k-means."""
  mean_NxKxH = sums_NxKxH / (epsilon + counts_NxK[..., None])
  return decay * centroids_NxKxH + (1 - decay) * mean_NxKxH


class ProductQuantizer(nn.Module):
  """Cluster ids of [B, T, N, H] inputs, and the codebook that learns them.

  The collection `codebook` holds the `centroids` [N, K, H] and their `usage` [N, K],
  the running share of tokens that each cluster receives. It is updated when it is
  mutable, from the centroids before the step; in evaluation leave it immutable.

  Attributes:
    clusters: K, centroids of each head.
    decay: 1 - the learning rate of k-means.
    epsilon: added to the counts.
    prenormalize: cluster x / |x| instead of x; a zero vector stays zero.
  """

  clusters: int
  decay: float = 0.999
  epsilon: float = 1e-6
  prenormalize: bool = False

  @nn.compact
  def __call__(self, x_BxTxNxH: jax.Array, valid_BxT: jax.Array | None = None) -> jax.Array:
    """Returns int32 ids [B, T, N]; tokens where `valid` is 0 do not move the centroids."""
    N, H = x_BxTxNxH.shape[-2:]
    K = self.clusters
    x_BxTxNxH = jax.lax.stop_gradient(x_BxTxNxH)
    dtype = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
    x_BxTxNxH = x_BxTxNxH.astype(dtype)
    if self.prenormalize:
      norm = jnp.linalg.norm(x_BxTxNxH, axis=-1, keepdims=True)
      x_BxTxNxH = x_BxTxNxH / jnp.where(norm > 0, norm, 1)

    def initial_centroids():
      bound = (6 / (N * (K + H))) ** 0.5  # Xavier, the heads counted as receptive field
      key = self.make_rng('params')
      return jax.random.uniform(key, (N, K, H), dtype, -bound, bound)

    names = ('heads', 'clusters', 'kv')
    centroids = self.variable(
      'codebook', 'centroids', nn.with_logical_partitioning(initial_centroids, names)
    )
    usage = self.variable(
      'codebook',
      'usage',
      nn.with_logical_partitioning(lambda: jnp.full((N, K), 1 / K, dtype), names[:2]),
    )
    ids_BxTxN = nearest_centroids(x_BxTxNxH, centroids.value)
    if self.is_mutable_collection('codebook') and not self.is_initializing():
      sums, counts = cluster_statistics(x_BxTxNxH, ids_BxTxN, K, valid_BxT)
      centroids.value = moved_centroids(centroids.value, sums, counts, self.decay, self.epsilon)
      share_NxK = counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1)
      usage.value = self.decay * usage.value + (1 - self.decay) * share_NxK
    return ids_BxTxN
