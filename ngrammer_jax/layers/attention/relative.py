"""Relative positions: Transformer-XL (Dai et al. 2019, section 3.3 and appendix B).

The unscaled score of query i and key j, d = i - j tokens apart, is

  (q_i + u) . k_j + (q_i + v) . W R_d

with learned u and v, and R_d the sinusoid of the distance. The second term depends on the key only
through its distance: the products with all distances are computed once, [T, S], and row i is
shifted, instead of encoding every pair. This module has three encodings of distances: W R_d and two
learned ones. u and v are parameters of attention; each encoding names the ones it needs.

B batch, T queries, S keys, N heads, H head width, D model width.
"""

from typing import NamedTuple

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, dense, dropout, products, row_sums
from ngrammer_jax.layers.attention import position
from ngrammer_jax.layers.context import Context


def encodings(
  S: int, D: int, clamp_length: int | None = None, dtype=jnp.float32, relative_to_zero: bool = True
) -> jax.Array:
  """Returns R_d - R_0 of the distances d = S - 1 down to 0, [S, D].

  R_d is `position.distance_sinusoid`. Larger distances than `clamp_length` are clamped. A term that
  all keys share does not change the softmax. Without R_0, the cosines of low frequencies are almost
  1 at all distances, and rounding would lose their differences. If the softmax has other keys too,
  use `relative_to_zero=False`, which returns R_d.
  """
  distance_S = jnp.arange(S - 1, -1, -1)
  if clamp_length is not None:
    distance_S = jnp.minimum(distance_S, clamp_length)
  return position.distance_sinusoid(distance_S, D, dtype, relative_to_zero)


def shift(scores_BxNxTxS: jax.Array) -> jax.Array:
  """Converts scores by distance, from S - 1 down to 0, to scores by key.

  The last T keys belong to the queries. Row i of the T rows moves T - 1 - i to the left; the values
  moved in belong to later keys, masked afterwards.
  """
  B, N, T, S = scores_BxNxTxS.shape
  padded = jnp.pad(scores_BxNxTxS, ((0, 0), (0, 0), (0, 0), (1, 0)))
  return padded.reshape(B, N, S + 1, T)[:, :, 1:].reshape(B, N, T, S)


def shift_block(scores_AxKxR: jax.Array) -> jax.Array:
  """Converts scores by distance to scores by key, [A, K, K], in blocks of K queries and K keys.

  The R = 2 K - 1 distances of a block decrease. Row i begins at column K - 1 - i.
  """
  A, K, R = scores_AxKxR.shape

  def shift_rows(scores_AxKxR):
    row_N = jnp.arange(A * K)
    first_Nx1 = (row_N * R + K - 1 - row_N % K)[:, None]
    axes = jax.lax.GatherDimensionNumbers((1,), (), (0,))
    rows = jax.lax.gather(scores_AxKxR.ravel(), first_Nx1, axes, (K,), mode='promise_in_bounds')
    return rows.reshape(A, K, K)

  def pad_and_reshape(scores_AxKxR):
    return shift(scores_AxKxR[:, None])[:, 0, :, :K]

  # A CPU copies rows three times as fast as it pads and reshapes, other devices do not.
  return jax.lax.platform_dependent(scores_AxKxR, cpu=shift_rows, default=pad_and_reshape)


class DistanceTerm(NamedTuple):
  """The term query_i . encoding_d + bias_d of the scores.

  Attributes:
    query_BxTxNxH: scaled queries, with v.
    encoding_SxNxH: encodings of the distances S - 1 down to 0; N may be 1.
    bias_SxN: biases of the same distances. None: no biases.
  """

  query_BxTxNxH: jax.Array
  encoding_SxNxH: jax.Array
  bias_SxN: jax.Array | None = None


def scores(term: DistanceTerm, distance_BxTxS: jax.Array | None = None) -> jax.Array:
  """Returns the scores [B, N, T, S] of a term in at least float32; arbitrary for later keys.

  `distance_BxTxS` is from query to key. None: keys are in order, and the last T belong to the
  queries.
  """
  encoding = term.encoding_SxNxH
  indices = 'btnh,snh->bnts'
  if encoding.shape[1] == 1:  # the same for all heads
    encoding = encoding[:, 0]
    indices = 'btnh,sh->bnts'
  scores_BxNxTxS = products.wide_einsum(indices, term.query_BxTxNxH, encoding)
  if term.bias_SxN is not None:
    scores_BxNxTxS += term.bias_SxN.T[:, None]
  if distance_BxTxS is None:
    return shift(scores_BxNxTxS)
  S = scores_BxNxTxS.shape[-1]
  index_BxTxS = jnp.clip(S - 1 - distance_BxTxS, 0, S - 1)
  return jnp.take_along_axis(scores_BxNxTxS, index_BxTxS[:, None], axis=-1)


class RelativePosition(nn.Module):
  """Projected sinusoids W R_d.

  Attributes:
    width: D, width of the encodings R_d.
    clamp_length: maximum distance; larger ones are clamped. None: no maximum.
    shares_softmax: whether the softmax has keys besides the context (see `encodings`).
    dropout: dropout rate of the encodings.
    dtype: dtype of the projection.
  """

  width: int
  clamp_length: int | None = None
  shares_softmax: bool = False
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  biases = ('content_bias', 'position_bias')  # u and v, [N, H] each

  @nn.compact
  def __call__(
    self, context: Context, N: int, H: int, is_capped: bool = False
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns the encodings [S, N or 1, H] and biases of a `DistanceTerm`.

    `is_capped`: whether scores are capped. A term shared by all keys then has an effect.
    """
    project = dense.dense_general(
      (self.width,),
      (N, H),
      ('embed', 'heads', 'kv'),
      use_bias=False,
      dtype=self.dtype,
      name='position',
    )
    key = context.positions.distance_key
    wide = jnp.promote_types(self.dtype, jnp.float32)
    # R_0 cancels only if all keys have it, without dropout and cap.
    is_dropped = key is not None and self.dropout > 0
    cancels = not (self.shares_softmax or is_dropped or is_capped)
    r_SxD = encodings(context.keys.count, self.width, self.clamp_length, wide, cancels)
    # Nearest first, so that the dropout mask of a distance does not depend on their number.
    r_SxD = dropout.drop(r_SxD[::-1], self.dropout, key)[::-1]
    return checkpoint_name(project(r_SxD.astype(self.dtype)), 'projected'), None


class ShawPosition(nn.Module):
  """Learned encodings a_d and biases b_d (Shaw et al. 2018, in the form of Transformer-XL).

  Attributes:
    max_length: number of learned distances, from 0; larger distances are clamped.
    clamp_length: number of distances used. None: all.
    dtype: dtype of the products.
  """

  max_length: int
  clamp_length: int | None = None
  dtype: jnp.dtype = jnp.float32

  biases = ('content_bias',)

  @nn.compact
  def __call__(
    self, context: Context, N: int, H: int, is_capped: bool = False
  ) -> tuple[jax.Array, jax.Array | None]:
    """See `RelativePosition`."""
    del is_capped
    wide = jnp.promote_types(self.dtype, jnp.float32)
    init = nn.initializers.normal(0.02)
    a_init = axis_names.with_axis_names(init, ('position', 'heads', 'kv'))
    a = self.param('distance_embedding', a_init, (self.max_length, N, H), wide)
    b_init = axis_names.with_axis_names(init, ('position', 'heads'))
    b = self.param('distance_bias', b_init, (self.max_length, N), wide)
    farthest = min(self.max_length, self.clamp_length or self.max_length) - 1
    distance_S = jnp.minimum(jnp.arange(context.keys.count - 1, -1, -1), farthest)
    row_S = self.max_length - 1 - distance_S
    # A bias has no features, so the per-dim scale of praxis does not apply.
    encoding_SxNxH = row_sums.take(a, row_S).astype(self.dtype)
    return encoding_SxNxH, row_sums.take(b, row_S) * H**-0.5


class TablePosition(nn.Module):
  """Learned encodings p_d that all heads and layers share (adaptive span, section 2).

  Attributes:
    dtype: dtype of the products.
  """

  dtype: jnp.dtype = jnp.float32

  biases = ()

  def __call__(
    self, context: Context, N: int, H: int, is_capped: bool = False
  ) -> tuple[jax.Array, jax.Array | None]:
    """See `RelativePosition`. Distances beyond the table are clamped to its last."""
    del N, H, is_capped
    (table_WxH,) = context.positions.params
    first = int(not context.keys.sees_itself)  # the table begins with the nearest key
    distance_S = jnp.arange(context.keys.count - 1, -1, -1) - first
    row_S = jnp.clip(distance_S, 0, len(table_WxH) - 1)
    table_SxH = row_sums.take(table_WxH, row_S)
    return table_SxH.astype(self.dtype)[:, None], None
