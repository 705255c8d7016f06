"""The memory block of recurrent memory networks, RM(+tM-g) (Tran, Bisazza and Monz 2016).

The output h of a recurrent layer attends to the last words x_i, including the current one:

  p_i = softmax_i((M[x_i] + T_i) h),  s = sum p_i (C[x_i] + T'_i)
  z = sigmoid(W_z s + U_z h),  q = sigmoid(W_q s + U_q h)
  h* = (1 - z) h + z tanh(W s + U (q h))

B batch, T segment length, S slots, L words, K hidden size, V vocabulary.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, dense
from ngrammer_jax.layers.recurrent import readout
from ngrammer_jax.layers.state import State


class RecurrentMemory(nn.Module):
  """Attends from the outputs to the last words of the document.

  Parameters: `input_words` (M) and `output_words` (C) [V, K]; `temporal` (T) [L, K], with the
  current word in the last row, and `output_temporal` (T') if there are two tables; the kernels
  [K, K] `update`, `reset` and `candidate` of s, and `update_h`, `reset_h` and `candidate_h` of h.

  Attributes:
    vocabulary_size: V.
    window: L.
    temporal_tables: 1 omits T', as in the paper's equations; 2 as in the authors' code.
    bias: whether the six linear maps have biases, as in the authors' code.
    initializer: initializer of all parameters.
    dtype: dtype of the computation.
  """

  vocabulary_size: int
  window: int = 15
  temporal_tables: int = 1
  bias: bool = False
  initializer: nn.initializers.Initializer = dense.symmetric(0.1)
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    h_BxTxK: jax.Array,
    tokens_BxT: jax.Array,
    documents_BxT: jax.Array,
    memory: State,
    valid_BxT: jax.Array | None = None,
  ) -> tuple[jax.Array, State]:
    """Returns h* [B, T, K], and the memory of L - 1 words for the next segment."""
    _, T, K = h_BxTxK.shape
    tokens_BxS, documents_BxS, memory = readout.append_memory(
      memory, tokens_BxT, documents_BxT, valid_BxT
    )
    steps = list(range(self.window - 1, -1, -1))  # the current word last
    visible = readout.same_document(documents_BxS, steps, documents_BxT)
    wide = jnp.promote_types(self.dtype, jnp.float32)
    temporal_LxK = self._table('temporal', ('position', None), self.window, K)
    words_VxK = self._table('input_words', ('vocab', 'embed'), self.vocabulary_size, K)
    keys_BxSxK = words_VxK[tokens_BxS]
    scores = []
    for s, row_K in zip(steps, temporal_LxK, strict=True):
      key_BxTxK = readout.shift_right(keys_BxSxK, s, T) + row_K
      scores.append(jnp.einsum('btk,btk->bt', key_BxTxK, h_BxTxK, preferred_element_type=wide))
    scores_BxTxL = jnp.stack(scores, axis=-1)

    words_VxK = self._table('output_words', ('vocab', 'embed'), self.vocabulary_size, K)
    values_BxSxK = words_VxK[tokens_BxS]
    values = [readout.shift_right(values_BxSxK, s, T) for s in steps]
    if self.temporal_tables == 2:
      rows_LxK = self._table('output_temporal', ('position', None), self.window, K)
      values = [value + row_K for value, row_K in zip(values, rows_LxK, strict=True)]

    mask_BxTxL = jnp.concatenate(visible, axis=-1)
    s_BxTxK, weights_BxTxL = readout.attend(scores_BxTxL, values, mask_BxTxL)
    self.sow('intermediates', 'weights', weights_BxTxL)
    return self._gate(s_BxTxK, h_BxTxK), memory

  def _gate(self, s_BxTxK: jax.Array, h_BxTxK: jax.Array) -> jax.Array:
    """Returns h* from the sum s of values and the output h."""
    z_BxTxK = nn.sigmoid(self._dense('update', s_BxTxK) + self._dense('update_h', h_BxTxK))
    q_BxTxK = nn.sigmoid(self._dense('reset', s_BxTxK) + self._dense('reset_h', h_BxTxK))
    reset_BxTxK = self._dense('candidate_h', q_BxTxK * h_BxTxK)
    candidate_BxTxK = jnp.tanh(self._dense('candidate', s_BxTxK) + reset_BxTxK)
    return (1 - z_BxTxK) * h_BxTxK + z_BxTxK * candidate_BxTxK

  def _dense(self, name: str, x_BxTxK: jax.Array) -> jax.Array:
    return dense.project(
      x_BxTxK,
      features=x_BxTxK.shape[-1],
      names=('embed', 'mlp'),
      use_bias=self.bias,
      kernel_init=self.initializer,
      bias_init=self.initializer,
      dtype=self.dtype,
      name=name,
    )

  def _table(self, name: str, names: tuple[str | None, ...], rows: int, K: int) -> jax.Array:
    init = axis_names.with_axis_names(self.initializer, names)
    wide = jnp.promote_types(self.dtype, jnp.float32)
    return self.param(name, init, (rows, K), wide).astype(self.dtype)
