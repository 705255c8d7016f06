"""Persistent vectors: learned keys and values (All-attention, Sukhbaatar et al. 2019b).

Every head has P of them. In one softmax with the context they can replace the feed-forward layer:

  used key   sqrt(H) n_k,   n_k of variance 1 / H at the start
  used value sqrt(P) n_v,   n_v of variance 1 / P

so that used vectors have unit variance, and parameters the scale of weights.

With a zero gate, the used value of a head is g sqrt(P) n_v with a learned number g from 0: vectors
with a softmax of their own then add nothing at the start.

B batch, T queries, N heads, H head width, P persistent vectors.
"""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, dropout, products
from ngrammer_jax.layers.attention import full


@dataclasses.dataclass(frozen=True)
class Persistent:
  """Options of the persistent vectors of attention.

  Attributes:
    vectors: P, of each head; 0 for no vectors.
    kind: `all_attention`: one softmax with the context. `attention_split`, `single_head`: a
      separate softmax, for each head or one of the full width, added to attention to the context.
      `head_split`: half of the heads attends to the context, the other half to the vectors.
    has_zero_gate: whether the values have a gate that starts at 0.
  """

  vectors: int
  kind: str = 'all_attention'
  has_zero_gate: bool = False


class PersistentVectors(nn.Module):
  """Scores and values of the persistent vectors.

  Attributes:
    vectors: P, of each head.
    dtype: dtype of the products; scores take at least float32.
    has_zero_gate: see `Persistent`.
  """

  vectors: int
  dtype: jnp.dtype = jnp.float32
  has_zero_gate: bool = False

  @nn.compact
  def __call__(self, q_BxTxNxH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scores [B, N, T, P], scaled by 1 / sqrt(H), and the values [N, P, H].

    The scale and the factor sqrt(H) of the keys cancel: a score is q . n_k.
    """
    N, H = q_BxTxNxH.shape[-2:]
    P = self.vectors
    wide = jnp.promote_types(self.dtype, jnp.float32)

    def param(name: str, deviation: float) -> jax.Array:
      init = nn.initializers.normal(deviation)
      names = ('heads', 'persistent', 'kv')
      return self.param(name, axis_names.with_axis_names(init, names), (N, P, H), wide)

    keys_NxPxH = param('persistent_keys', H**-0.5).astype(self.dtype)
    values_NxPxH = (P**0.5 * param('persistent_values', P**-0.5)).astype(self.dtype)
    if self.has_zero_gate:
      zeros = axis_names.with_axis_names(nn.initializers.zeros, ('heads',))
      values_NxPxH *= self.param('gate', zeros, (N,), wide).astype(self.dtype)[:, None, None]
    scores_BxNxTxP = products.wide_einsum('btnh,nph->bntp', q_BxTxNxH, keys_NxPxH)
    return scores_BxNxTxP, values_NxPxH


def attend(
  scores_BxNxTxP: jax.Array, values_NxPxH: jax.Array, drop: dropout.Dropout
) -> full.PartialAttention:
  """Attends to the persistent vectors only."""
  log_mass_BxNxT = jax.nn.logsumexp(scores_BxNxTxP, axis=-1)
  weights_BxNxTxP = jnp.exp(scores_BxNxTxP - log_mass_BxNxT[..., None])
  dropped_BxNxTxP = drop(weights_BxNxTxP).astype(values_NxPxH.dtype)
  values_BxTxNxH = products.wide_einsum('bntp,nph->btnh', dropped_BxNxTxP, values_NxPxH)
  return full.PartialAttention(values_BxTxNxH, log_mass_BxNxT, weights_BxNxTxP)
