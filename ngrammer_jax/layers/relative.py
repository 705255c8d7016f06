"""Positions as distances: Transformer-XL (Dai et al. 2019, section 3.3 and appendix B).

The score of query i and key j, d = i - j tokens apart, before it is scaled, is

  (q_i + u) . k_j + (q_i + v) . W R_d

with learned u and v, and R_d the sinusoid of the distance. A key's term depends on the distance
alone: the products with all distances are computed once, [T, S], and row i is moved to where it
belongs, instead of one encoding for every pair.

B batch, T queries, S keys, N heads, H head width, D model width.
"""

from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import dense, dropout
from ngrammer_jax.layers.context import Context


def encodings(
  S: int, D: int, clamp_length: int | None = None, dtype=jnp.float32, less_first: bool = True
) -> jax.Array:
  """R_d - R_0 of the distances d = S - 1 down to 0, [S, D]: all sines, then all cosines less 1.

  Frequency k is 10000^(-2 k / D). Distances beyond `clamp_length` count as that. What all
  keys have in common changes no softmax; but where a frequency is low, the cosines of all
  distances are almost 1, and all digits of their differences would be lost in it. Where other
  keys are in the softmax too, `less_first=False` gives R_d.
  """
  distance_S = jnp.arange(S - 1, -1, -1, dtype=dtype)
  if clamp_length is not None:
    distance_S = jnp.minimum(distance_S, clamp_length)
  frequency_h = 10_000 ** (-jnp.arange(0, D, 2, dtype=dtype) / D)
  angle_Sxh = distance_S[:, None] * frequency_h
  cosine_less_1_Sxh = -2 * jnp.square(jnp.sin(angle_Sxh / 2))
  cosine_Sxh = cosine_less_1_Sxh if less_first else jnp.cos(angle_Sxh)
  return jnp.concatenate([jnp.sin(angle_Sxh), cosine_Sxh], axis=-1)


def shift(scores_BxNxTxS: jax.Array) -> jax.Array:
  """Moves row i of the T rows T - 1 - i to the left; what comes in is for masked keys only.

  From scores by distance S - 1 down to 0, where the last T keys are the queries themselves, to
  scores by key.
  """
  B, N, T, S = scores_BxNxTxS.shape
  padded = jnp.pad(scores_BxNxTxS, ((0, 0), (0, 0), (0, 0), (1, 0)))
  return padded.reshape(B, N, S + 1, T)[:, :, 1:].reshape(B, N, T, S)


def by_distance(scores_BxNxTxS: jax.Array, distance_BxTxS: jax.Array) -> jax.Array:
  """From scores by distance S - 1 down to 0 to scores by key, for keys in any order."""
  S = scores_BxNxTxS.shape[-1]
  index_BxTxS = jnp.clip(S - 1 - distance_BxTxS, 0, S - 1)
  return jnp.take_along_axis(scores_BxNxTxS, index_BxTxS[:, None], axis=-1)


class DistanceTerm(NamedTuple):
  """What scores distances: the term query_i . encoding_d + bias_d.

  Attributes:
    query_BxTxNxH: scaled, with the position bias.
    encoding_SxNxH: of the distances S - 1 down to 0; N may be 1.
    bias_SxN: None: nothing.
  """

  query_BxTxNxH: jax.Array
  encoding_SxNxH: jax.Array
  bias_SxN: jax.Array | None = None


def scores(term: DistanceTerm, distance_BxTxS: jax.Array | None = None) -> jax.Array:
  """The scores [B, N, T, S] of distances, in at least float32; those of later keys mean nothing.

  `distance_BxTxS` is from query to key. None: keys are in order, the last T of them are the
  queries.
  """
  wide = jnp.promote_types(term.query_BxTxNxH.dtype, jnp.float32)
  indices = 'btnh,snh->bnts'
  encoding = term.encoding_SxNxH
  if encoding.shape[1] == 1:  # the same for all heads
    indices, encoding = 'btnh,sh->bnts', encoding[:, 0]
  scores_BxNxTxS = jnp.einsum(indices, term.query_BxTxNxH, encoding, preferred_element_type=wide)
  if term.bias_SxN is not None:
    scores_BxNxTxS += term.bias_SxN.T[:, None]
  if distance_BxTxS is None:
    return shift(scores_BxNxTxS)
  return by_distance(scores_BxNxTxS, distance_BxTxS)


class RelativePosition(nn.Module):
  """The term (q + v) . W R_d.

  Attributes:
    heads: N.
    width: D, of the encodings R_d.
    clamp_length: distances beyond it count as that. None: all are different.
    shares_softmax: other keys than those of the context are in the softmax (see `encodings`).
    dropout: rate of the encodings.
    dtype: of the projection.
  """

  heads: int
  width: int
  clamp_length: int | None = None
  shares_softmax: bool = False
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  biases = ('content_bias', 'position_bias')  # u and v, [N, H] each

  @nn.compact
  def __call__(
    self,
    q_BxTxNxH: jax.Array,
    scale: jax.Array,
    S: int,
    biases: tuple[jax.Array, ...],
    context: Context,
  ) -> tuple[jax.Array, DistanceTerm]:
    """Returns the queries that are multiplied with the keys, and what scores the distances.

    Args:
      q_BxTxNxH: queries.
      scale: of the queries.
      S: keys.
      biases: those of the class, of this layer or of all layers.
      context: of the segment.
    """
    N, H = q_BxTxNxH.shape[-2:]
    wide = jnp.promote_types(self.dtype, jnp.float32)
    u_NxH, v_NxH = (bias.astype(self.dtype) for bias in biases)
    how = {'use_bias': False, 'dtype': self.dtype, 'name': 'position'}
    project = dense.dense_general((self.width,), (N, H), ('embed', 'heads', 'kv'), **how)
    key = context.distance_key if self.dropout else None
    # R_0 makes no difference only where all keys have it, and have it whole.
    is_alone = not self.shares_softmax and key is None
    r_SxD = encodings(S, self.width, self.clamp_length, wide, less_first=is_alone)
    # The nearest first: what is drawn for a distance is the same however many there are.
    r_SxD = dropout.drop(r_SxD[::-1], self.dropout, key)[::-1]
    r_SxNxH = project(r_SxD.astype(self.dtype))
    return (q_BxTxNxH + u_NxH) * scale, DistanceTerm((q_BxTxNxH + v_NxH) * scale, r_SxNxH)


class ShawPosition(nn.Module):
  """Learned distances: the term q . a_d + b_d (after Shaw et al. 2018, as Transformer-XL has it).

  Attributes:
    heads: N.
    max_length: distances that are learned, 0 among them; longer ones count as the longest.
    clamp_length: so many of them are used. None: all.
    dtype: of the products.
  """

  heads: int
  max_length: int
  clamp_length: int | None = None
  dtype: jnp.dtype = jnp.float32

  biases = ('content_bias',)

  @nn.compact
  def __call__(
    self,
    q_BxTxNxH: jax.Array,
    scale: jax.Array,
    S: int,
    biases: tuple[jax.Array, ...],
    context: Context,
  ) -> tuple[jax.Array, DistanceTerm]:
    """See `RelativePosition`."""
    del context
    wide = jnp.promote_types(self.dtype, jnp.float32)
    N, H = q_BxTxNxH.shape[-2:]
    init = nn.initializers.normal(0.02)
    rows = lambda *names: nn.with_logical_partitioning(init, (None, 'heads', *names))
    a = self.param('distance_embedding', rows('kv'), (self.max_length, N, H), wide)
    b = self.param('distance_bias', rows(), (self.max_length, N), wide)
    farthest = min(self.max_length, self.clamp_length or self.max_length) - 1
    row_S = self.max_length - 1 - jnp.minimum(jnp.arange(S - 1, -1, -1), farthest)
    a_SxNxH = (a[row_S] * scale).astype(self.dtype)
    # One number for all features: praxis' scales of features have no place here.
    term = DistanceTerm(q_BxTxNxH, a_SxNxH, b[row_S] * H**-0.5)
    (u_NxH,) = biases
    return (q_BxTxNxH + u_NxH.astype(self.dtype)) * scale, term


class TablePosition(nn.Module):
  """The term q . p_d, p learned and the same in all heads and layers (adaptive span, section 2).

  Attributes:
    heads: N.
    dtype: of the products.
  """

  heads: int
  dtype: jnp.dtype = jnp.float32

  biases = ()  # p is shared by all layers

  def __call__(
    self,
    q_BxTxNxH: jax.Array,
    scale: jax.Array,
    S: int,
    biases: tuple[jax.Array, ...],
    context: Context,
  ) -> tuple[jax.Array, DistanceTerm]:
    """See `RelativePosition`. Distances beyond the table count as its last."""
    (table_WxH,) = biases
    first = int(not context.sees_itself)  # the table begins at the nearest key
    row_S = jnp.clip(jnp.arange(S - 1, -1, -1) - first, 0, len(table_WxH) - 1)
    q_BxTxNxH = q_BxTxNxH * scale
    return q_BxTxNxH, DistanceTerm(q_BxTxNxH, table_WxH[row_S].astype(self.dtype)[:, None])
