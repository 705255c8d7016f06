"""Product quantisation by mini-batch k-means (N-Grammer, section 3.1).

Every head has a codebook of K centroids. The cluster id of a token is its nearest centroid, and
the centroids are exponential moving averages (EMA) of their tokens:

  z = argmin_k |x - m_k|^2
  m_k <- decay m_k + (1 - decay) s_k / (epsilon + c_k)

where s_k and c_k are the sum and the number of the tokens of cluster k, over the
global batch and without padding. Nothing is differentiated.

A cluster without tokens shrinks by `decay` (praxis), stays unchanged, or, once it is dead, is
reset: its centroid moves next to the centroid of a frequent cluster and takes some of its tokens.

B batch, T segment length, C tokens of a chunk, N heads, H head width, K clusters.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, mesh_axes, row_sums
from ngrammer_jax.layers.context import EmbeddingLookup

# Number of distances computed at a time on one device, unless a time step has more. On a CPU they
# fit in the cache: 8 MB in float32, twice as fast as 64 MB. Accelerators need larger products.
CPU_DISTANCES = 2**21
DISTANCES = 2**25

INPUTS = 'quantizer_inputs'  # collection of the inputs of quantisers, if it is mutable
USAGE_DECAY = 0.99  # usage averages over about 100 steps
DEAD = 0.1  # a cluster is dead if its usage is below this multiple of 1 / K


def quantizer_input(x: jax.Array, prenormalize: bool) -> jax.Array:
  """Returns the vectors [..., N, H] to quantise, in at least float32 and without gradient."""
  x = jax.lax.stop_gradient(x)
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if not prenormalize:
    return x
  norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
  return x / jnp.where(norm > 0, norm, 1)


def nearest_centroids(x_BxTxNxH: jax.Array, centroids_NxKxH: jax.Array) -> jax.Array:
  """Returns the cluster id of every token and head, int32 [B, T, N].

  The lowest id wins a tie; a non-finite token gets id 0. The distances [B, T, N, K] are computed
  for a few time steps at a time.
  """
  return jax.lax.platform_dependent(
    x_BxTxNxH,
    centroids_NxKxH,
    cpu=functools.partial(_nearest, limit=CPU_DISTANCES),
    default=functools.partial(_nearest, limit=DISTANCES),
  )


def _nearest(x_BxTxNxH: jax.Array, centroids_NxKxH: jax.Array, *, limit: int) -> jax.Array:
  """Returns cluster ids, computing about `limit` distances at a time on a device."""
  B, T, N, H = x_BxTxNxH.shape
  K = centroids_NxKxH.shape[1]
  dtype = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
  centroids_NxKxH = centroids_NxKxH.astype(dtype)
  centre_Nx1xH = _coarse_centre(centroids_NxKxH)
  centroids_NxKxH = centroids_NxKxH - centre_Nx1xH
  half_norm_NxKx1 = 0.5 * jnp.square(centroids_NxKxH).sum(axis=-1, keepdims=True)
  index_Kx1 = jnp.arange(K, dtype=jnp.int32)[:, None]
  highest = jax.lax.Precision.HIGHEST  # by default a TPU multiplies in bfloat16
  ids_BxTxN = nn.with_logical_constraint(jnp.zeros((B, T, N), jnp.int32), ('batch', 'length', None))
  if not ids_BxTxN.size:
    return ids_BxTxN
  # Chunks are slices of time, so that a sharded batch needs no communication.
  shards = mesh_axes.shards('batch')
  rows_per_device = B if B % shards else B // shards
  steps = min(max(limit // (rows_per_device * N * K), 1), T)

  def quantize(start, ids_BxTxN, steps=steps):
    chunk_BxtxNxH = jax.lax.dynamic_slice_in_dim(x_BxTxNxH, start, steps, axis=1).astype(dtype)
    x_NxCxH = chunk_BxtxNxH.transpose(2, 0, 1, 3).reshape(N, B * steps, H) - centre_Nx1xH
    # argmin |x - m|^2 = argmax x.m - |m|^2 / 2, as the first index that attains the maximum:
    # XLA's argmax takes ten times as long on a CPU.
    score_NxKxC = jnp.einsum('nkh,nch->nkc', centroids_NxKxH, x_NxCxH, precision=highest)
    score_NxKxC = score_NxKxC - half_norm_NxKx1
    best_Nx1xC = score_NxKxC.max(axis=1, keepdims=True)
    first_NxC = jnp.where(score_NxKxC == best_Nx1xC, index_Kx1, K).min(axis=1)
    first_NxC = jnp.where(jnp.isfinite(best_Nx1xC[:, 0]), first_NxC, 0)
    ids = first_NxC.reshape(N, B, steps).transpose(1, 2, 0)
    return jax.lax.dynamic_update_slice_in_dim(ids_BxTxN, ids, start, axis=1)

  def quantize_chunk(chunk, ids_BxTxN):
    return quantize(chunk * steps, ids_BxTxN)

  chunks, rest = divmod(T, steps)
  ids_BxTxN = jax.lax.fori_loop(0, chunks, quantize_chunk, ids_BxTxN)
  if rest:
    ids_BxTxN = quantize(T - rest, ids_BxTxN, rest)
  return ids_BxTxN


def _coarse_centre(centroids_NxKxH: jax.Array) -> jax.Array:
  """Returns the mean centroid, rounded to a power of two of the size of the spread around it.

  The expanded distance loses digits to an offset common to all centroids. Subtracting a round
  number removes the offset and is exact for round inputs, so ties remain ties.
  """
  mean_Nx1xH = centroids_NxKxH.mean(axis=1, keepdims=True)
  spread_Nx1xH = jnp.abs(centroids_NxKxH - mean_Nx1xH).max(axis=1, keepdims=True)
  grid_Nx1xH = jax.lax.reduce_precision(spread_Nx1xH, exponent_bits=8, mantissa_bits=0)
  grid_Nx1xH = jnp.where(grid_Nx1xH > 0, grid_Nx1xH, 1)
  return jnp.round(mean_Nx1xH / grid_Nx1xH) * grid_Nx1xH


def nearest_of_rows(rows_VxNxH: jax.Array, centroids_NxKxH: jax.Array) -> jax.Array:
  """Returns the cluster id of every table row and head, int32 [V, N], sharded by rows."""
  V = rows_VxNxH.shape[0]
  shards = mesh_axes.shards('batch')
  rows = jnp.pad(rows_VxNxH, ((0, -V % shards), (0, 0), (0, 0)))
  rows = rows.reshape(shards, -1, *rows.shape[1:])
  rows = nn.with_logical_constraint(rows, ('batch', None, None, None))
  return nearest_centroids(rows, centroids_NxKxH).reshape(-1, rows.shape[2])[:V]


def cluster_statistics(
  x_BxTxNxH: jax.Array, ids_BxTxN: jax.Array, K: int, weight_BxT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the sum [N, K, H] and the number [N, K] of the tokens of every cluster.

  `weight_BxT` is the count of each token, 0 at padding. None: every token counts once.
  """
  N, H = x_BxTxNxH.shape[-2:]
  dtype = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
  x_BxTxNxH = x_BxTxNxH.astype(dtype)
  weight_BxTx1 = jnp.ones((*ids_BxTxN.shape[:2], 1), dtype)
  if weight_BxT is not None:
    weight_BxTx1 = weight_BxT.astype(dtype)[..., None]
    # Padding may contain NaN; a weight of 0 does not remove it.
    weighted_BxTxNxH = x_BxTxNxH * weight_BxTx1[..., None]
    x_BxTxNxH = jnp.where(weight_BxTx1[..., None] > 0, weighted_BxTxNxH, 0)
  slot_BxTxN = ids_BxTxN + K * jnp.arange(N, dtype=jnp.int32)
  shape = N * K, H
  sums = jax.lax.platform_dependent(
    slot_BxTxN.ravel(),
    x_BxTxNxH.reshape(-1, H),
    cpu=functools.partial(_add_windows, shape),
    default=functools.partial(row_sums.totals, shape),
  )
  weight_BxTxN = jnp.broadcast_to(weight_BxTx1, slot_BxTxN.shape)
  counts = row_sums.totals((N * K,), slot_BxTxN, weight_BxTxN)
  return sums.reshape(N, K, H), counts.reshape(N, K)


def _add_windows(shape: tuple[int, int], slot_R: jax.Array, x_RxH: jax.Array) -> jax.Array:
  """Adds rows by windows of [1, H]: XLA:CPU would copy all rows to make these windows."""
  window = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))
  zeros_SxH = jnp.zeros(shape, x_RxH.dtype)
  return jax.lax.scatter_add(zeros_SxH, slot_R[:, None], x_RxH[:, None], window)


def ema_update(
  centroids_NxKxH: jax.Array,
  sums_NxKxH: jax.Array,
  counts_NxK: jax.Array,
  decay: float,
  epsilon: float,
  empty: str = 'shrink',
) -> jax.Array:
  """Returns the centroids after one step of mini-batch k-means."""
  mean_NxKxH = sums_NxKxH / (epsilon + counts_NxK[..., None])
  updated_NxKxH = decay * centroids_NxKxH + (1 - decay) * mean_NxKxH
  if empty == 'shrink':
    return updated_NxKxH
  return jnp.where(counts_NxK[..., None] > 0, updated_NxKxH, centroids_NxKxH)


def reset_dead_codes(
  centroids_NxKxH: jax.Array, usage_NxK: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns centroids and usage with every dead code moved next to a frequent one, its donor.

  The donor of the r-th least used code of a head is the r-th most used one. If the code is dead and
  its donor has a usage of at least 1 / K, the code is set to 1.01 times the centroid of the donor,
  and each of the two gets half the usage of the donor.
  """
  N, K = usage_NxK.shape
  code_NxK = jnp.argsort(usage_NxK, axis=1)  # dead codes come first
  donor_NxK = code_NxK[:, ::-1]
  code_usage_NxK = jnp.take_along_axis(usage_NxK, code_NxK, axis=1)
  donor_usage_NxK = jnp.take_along_axis(usage_NxK, donor_NxK, axis=1)
  reset_NxK = (code_usage_NxK < DEAD / K) & (donor_usage_NxK >= 1 / K)
  near_NxKxH = 1.01 * jnp.take_along_axis(centroids_NxKxH, donor_NxK[..., None], axis=1)
  head_Nx1 = jnp.arange(N)[:, None]
  out_of_range = K  # dropped by `set`
  target_NxK = jnp.where(reset_NxK, code_NxK, out_of_range)
  centroids_NxKxH = centroids_NxKxH.at[head_Nx1, target_NxK].set(
    near_NxKxH, mode='drop', unique_indices=True
  )
  reset_donor_NxK = jnp.where(reset_NxK, donor_NxK, out_of_range)
  for index_NxK in (target_NxK, reset_donor_NxK):
    usage_NxK = usage_NxK.at[head_Nx1, index_NxK].set(
      donor_usage_NxK / 2, mode='drop', unique_indices=True
    )
  return centroids_NxKxH, usage_NxK


class ProductQuantizer(nn.Module):
  """Quantises inputs [B, T, N, H] to cluster ids and updates the codebook.

  The collection `codebook` contains the `centroids` [N, K, H]; their `usage` [N, K], the running
  share of tokens of each cluster; and `changed` [N], the share of the tokens of the first row
  whose cluster the last update changed. It is updated if it is mutable, with the ids from before
  the update; leave it immutable in evaluation. For serving it may contain `token_ids` [V, N]
  instead, the cluster ids of every token of the vocabulary.

  With gradient accumulation, make the collection `statistics` mutable instead. It receives the
  `sums` [N, K, H] and `counts` [N, K] of the tokens; pass their totals to `update_codebook`.

  Attributes:
    clusters: K, centroids of each head.
    decay: decay of the EMA, 1 - the learning rate of k-means.
    epsilon: added to the counts.
    prenormalize: quantise x / |x| instead of x; a zero vector stays zero.
    empty: how clusters without tokens are treated: `shrink`, `keep` or `revive`.
    initial: initial centroids: Xavier-uniform (`uniform`), unit normal (`normal`), random rows of
      the vocabulary (`data`), or for `hidden` uniform until `training.centroids` draws them.
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
    vocabulary: EmbeddingLookup | None = None,
  ) -> jax.Array:
    """Returns cluster ids, int32 [B, T, N].

    Args:
      x_BxTxNxH: inputs.
      valid_BxT: 0 at padding, not counted.
      vocabulary: the embedding lookup of x. With fewer rows than tokens, the rows are quantised
        instead of the tokens; the ids are the same.

    Raises:
      ValueError: initial='data' without vocabulary rows.
    """
    if self.has_variable('codebook', 'token_ids'):
      return self.get_variable('codebook', 'token_ids')[vocabulary.tokens_BxT]
    B, T, N, H = x_BxTxNxH.shape
    x_BxTxNxH = quantizer_input(x_BxTxNxH, self.prenormalize)
    if not self.is_initializing():
      self.sow(INPUTS, 'x', x_BxTxNxH)
    rows_VxNxH = None
    if vocabulary is not None and vocabulary.rows_VxD is not None:
      rows_VxNxH = quantizer_input(vocabulary.rows_VxD.reshape(-1, N, H), self.prenormalize)
    centroids, usage = self._codebook(x_BxTxNxH, rows_VxNxH)
    dtype = x_BxTxNxH.dtype
    if valid_BxT is None:
      weight_BxT = None
      valid_1xT = jnp.ones((1, T), dtype)
    else:
      weight_BxT = (valid_BxT > 0).astype(dtype)
      valid_1xT = weight_BxT[:1]
    if rows_VxNxH is None or len(rows_VxNxH) >= B * T:
      ids_BxTxN = nearest_centroids(x_BxTxNxH, centroids.value)
      vectors = x_BxTxNxH
      vector_ids = ids_BxTxN
    else:
      ids_VxN = nearest_of_rows(rows_VxNxH, centroids.value)
      ids_BxTxN = ids_VxN[vocabulary.tokens_BxT]
      if weight_BxT is None:
        weight_BxT = jnp.ones((B, T), dtype)
      counts_V = row_sums.totals((len(rows_VxNxH),), vocabulary.tokens_BxT, weight_BxT)
      weight_BxT = counts_V[None]
      vectors = rows_VxNxH[None]
      vector_ids = ids_VxN[None]
    if self.is_initializing():
      self._set_changed(jnp.zeros((N,), dtype))
    elif self.is_mutable_collection('statistics'):
      sums, counts = cluster_statistics(vectors, vector_ids, self.clusters, weight_BxT)
      self.put_variable('statistics', 'sums', sums)
      self.put_variable('statistics', 'counts', counts)
    elif self.is_mutable_collection('codebook'):
      sums, counts = cluster_statistics(vectors, vector_ids, self.clusters, weight_BxT)
      before = {'centroids': centroids.value, 'usage': usage.value}
      after = self.update_codebook(before, {'sums': sums, 'counts': counts})
      centroids.value = after['centroids']
      usage.value = after['usage']
      self._measure_changed(x_BxTxNxH, centroids.value, ids_BxTxN, valid_1xT)
    return ids_BxTxN

  def _measure_changed(
    self,
    x_BxTxNxH: jax.Array,
    centroids_NxKxH: jax.Array,
    ids_BxTxN: jax.Array,
    valid_1xT: jax.Array,
  ) -> None:
    """Stores the share of the tokens of the first row whose ids the new centroids change."""
    new_ids_1xTxN = nearest_centroids(x_BxTxNxH[:1], centroids_NxKxH)
    changed_1xTxN = (new_ids_1xTxN != ids_BxTxN[:1]) & (valid_1xT > 0)[..., None]
    dtype = x_BxTxNxH.dtype
    self._set_changed(changed_1xTxN.sum((0, 1), dtype=dtype) / jnp.maximum(valid_1xT.sum(), 1))

  def _codebook(
    self, x_BxTxNxH: jax.Array, rows_VxNxH: jax.Array | None
  ) -> tuple[nn.Variable, nn.Variable]:
    """Returns the variables of the centroids and of their usage."""
    N, H = x_BxTxNxH.shape[-2:]
    K = self.clusters
    dtype = x_BxTxNxH.dtype

    def initial_centroids():
      key = self.make_rng('params')
      if self.initial == 'normal':
        return jax.random.normal(key, (N, K, H), dtype)
      if self.initial == 'data':
        if rows_VxNxH is None:
          raise ValueError("initial='data' needs the rows of the vocabulary: pass `vocabulary`")
        rows = jax.random.permutation(key, len(rows_VxNxH))
        return rows_VxNxH[jnp.resize(rows, K)].swapaxes(0, 1)
      bound = (6 / (N * (K + H))) ** 0.5  # Xavier, heads as receptive field
      return jax.random.uniform(key, (N, K, H), dtype, -bound, bound)

    def initial_usage():
      return jnp.full((N, K), 1 / K, dtype)

    centroids = self._variable('centroids', initial_centroids, ('heads', 'clusters', 'kv'))
    usage = self._variable('usage', initial_usage, ('heads', 'clusters'))
    return centroids, usage

  def _set_changed(self, share_N: jax.Array) -> None:
    changed = self._variable('changed', lambda: jnp.zeros_like(share_N), ('heads',))
    changed.value = share_N

  def _variable(
    self, name: str, init: Callable[[], jax.Array], names: tuple[str, ...]
  ) -> nn.Variable:
    """Returns a variable of the codebook with logical axis names."""
    return self.variable('codebook', name, axis_names.with_axis_names(init, names))

  def update_codebook(
    self, codebook: Mapping[str, jax.Array], statistics: Mapping[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns the codebook after one update with the `sums` and `counts` of `statistics`."""
    counts_NxK = statistics['counts']
    share_NxK = counts_NxK / jnp.maximum(counts_NxK.sum(axis=-1, keepdims=True), 1)
    usage_NxK = USAGE_DECAY * codebook['usage'] + (1 - USAGE_DECAY) * share_NxK
    centroids_NxKxH = ema_update(
      codebook['centroids'], statistics['sums'], counts_NxK, self.decay, self.epsilon, self.empty
    )
    if self.empty == 'revive':
      centroids_NxKxH, usage_NxK = reset_dead_codes(centroids_NxKxH, usage_NxK)
    return {**codebook, 'centroids': centroids_NxKxH, 'usage': usage_NxK}


def make(options: Any, **fields: Any) -> ProductQuantizer:
  """Returns a quantiser with the options of a layer or of its config.

  Args:
    options: has the attributes of the quantiser; `initial` may be None (uniform).
    **fields: attributes of Linen, `name` or `parent`; `parent=None` for an unbound quantiser.
  """
  return ProductQuantizer(
    clusters=options.clusters,
    decay=options.decay,
    epsilon=options.epsilon,
    prenormalize=options.prenormalize,
    empty=options.empty,
    initial=options.initial or 'uniform',
    **fields,
  )
