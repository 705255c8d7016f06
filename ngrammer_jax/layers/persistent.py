"""Persistent vectors: keys and values that are learned (All-attention, Sukhbaatar et al. 2019b).

Every head has P of them. In one softmax with the context they take the place of the
feed-forward layer:

  used key   sqrt(H) n_k,   n_k of variance 1 / H at the start
  used value sqrt(P) n_v,   n_v of variance 1 / P

so that what is used has unit variance, and what is trained the size of a weight.

B batch, T queries, N heads, H head width, P persistent vectors.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp


class PersistentVectors(nn.Module):
  """Scores and values of the persistent vectors.

  Attributes:
    vectors: P, of each head.
    dtype: of the products; scores take at least float32.
  """

  vectors: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, q_BxTxNxH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scores [B, N, T, P], scaled by 1 / sqrt(H), and the values [N, P, H].

    The scale and the root of the keys cancel: a score is q . n_k.
    """
    N, H = q_BxTxNxH.shape[-2:]
    P, wide = self.vectors, jnp.promote_types(self.dtype, jnp.float32)

    def param(name, deviation):
      init = nn.initializers.normal(deviation)
      names = ('heads', 'persistent', 'kv')
      return self.param(name, nn.with_logical_partitioning(init, names), (N, P, H), wide)

    keys_NxPxH = param('persistent_keys', H**-0.5).astype(self.dtype)
    values_NxPxH = (P**0.5 * param('persistent_values', P**-0.5)).astype(self.dtype)
    scores_BxNxTxP = jnp.einsum(
      'btnh,nph->bntp', q_BxTxNxH, keys_NxPxH, preferred_element_type=wide
    )
    return scores_BxNxTxP, values_NxPxH
