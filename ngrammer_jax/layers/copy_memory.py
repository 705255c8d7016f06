"""The token after the longest earlier match, as a vector at the input and before the head.

  m_t = s_b E[c_t] + u_b,  0 without a match          y_t = x_t + g m_t   at each of two places

with the token c_t and the bucket b of `layers.copies`, the embedding E, a scale s and a vector u
per bucket (initially 0), and a factor g per place (pull request 378 of the modded-nanogpt
speedrun). The gradient of m reaches the embedding through c.

B batch, T segment length, D model width, V vocabulary.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.config.copy_memory import NAME, CopyMemoryConfig
from ngrammer_jax.layers import axis_names, copies, row_sums, token_classes
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.state import State

VECTORS = f'model.{NAME}'  # key of the vectors in `context.shared`


class CopyMemory(nn.Module):
  """Returns the vectors m [B, T, D] of a segment, read at both places.

  The state is the state of `copies.CopySearch`. With the key `compressed`, the collection
  `codebook` has `token_classes` [V].

  Attributes:
    options: the config.
    vocabulary_size: V. None: the module is not applied.
    width: D.
    dtype: of the vectors; parameters are in at least float32.
  """

  options: CopyMemoryConfig
  vocabulary_size: int | None
  width: int
  dtype: jnp.dtype = jnp.float32

  def search(self) -> copies.CopySearch:
    """Returns the search of the longest matches."""
    o = self.options
    return copies.CopySearch(o.window, o.lengths, o.counts)

  def empty_state(self, batch: int, slots: int | None) -> State:
    """Returns the state before the first segment."""
    del slots
    return self.search().empty_state(batch)

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
    """Returns m [B, T, D], and the next state.

    The intermediate `copies` has the tokens and the buckets [B, T].

    Raises:
      ValueError: the context has no documents, or no embedding.
    """
    del x_BxTxD
    if context.documents_BxT is None:
      raise ValueError('a copy memory searches within documents: set context.documents_BxT')
    if context.vocabulary is None or context.vocabulary.rows_VxD is None:
      raise ValueError('a copy memory reads the embedding: set context.vocabulary')
    copied, next_state = self.search()(
      context.tokens_BxT,
      context.documents_BxT,
      state,
      valid_BxT=context.valid_BxT,
      classes_V=self._classes(),
    )
    self.sow('intermediates', 'copies', copied)
    buckets = self.search().buckets
    wide = jnp.promote_types(self.dtype, jnp.float32)
    zeros = nn.initializers.zeros
    scale_init = axis_names.with_axis_names(zeros, ('buckets',))
    vector_init = axis_names.with_axis_names(zeros, ('buckets', 'embed'))
    scale_N = self.param('bucket_scale', scale_init, (buckets,), wide).astype(self.dtype)
    vector_NxD = self.param('bucket_vector', vector_init, (buckets, self.width), wide)
    vector_NxD = vector_NxD.astype(self.dtype)

    copied_BxTxD = context.vocabulary.rows_VxD[jnp.maximum(copied.token_BxT, 0)]
    scale_BxTx1 = row_sums.take(scale_N, copied.bucket_BxT)[..., None]
    m_BxTxD = scale_BxTx1 * copied_BxTxD.astype(self.dtype) + row_sums.take(
      vector_NxD, copied.bucket_BxT
    )
    return jnp.where((copied.bucket_BxT > 0)[..., None], m_BxTxD, 0), next_state

  def _classes(self) -> jax.Array | None:
    """Returns the class of each id [V]; None if ids are compared."""
    if self.options.key == 'tokens':
      return None
    return token_classes.variable(self, self.vocabulary_size)


class CopySum(nn.Module):
  """Adds the vectors of the copies, times a learned factor, at one of the two places.

  Attributes:
    initial: initial factor g.
    dtype: of the output; the parameter is in at least float32.
  """

  initial: float
  dtype: jnp.dtype = jnp.float32

  def empty_state(self, batch: int, slots: int | None) -> None:
    """Returns None: it has no state."""

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, context: Context, state: None) -> tuple[jax.Array, None]:
    """Returns y [B, T, D], and no state."""
    del state
    init = axis_names.with_axis_names(nn.initializers.constant(self.initial), ())
    gate = self.param('gate', init, (), jnp.promote_types(self.dtype, jnp.float32))
    m_BxTxD = context.shared[VECTORS]
    return x_BxTxD + gate.astype(self.dtype) * m_BxTxD, None
