"""Readouts of the last outputs h of a recurrent layer (Daniluk et al. 2017).

Attention, with h = [key; value; predict] (equations 1 to 12), and N-gram RNN (equation 13):

  a = softmax(w tanh(W_Y key_s + W_h key_t)),  r = sum a_s value_s
  h* = tanh(W_r r + W_x predict_t)

  h* = tanh(W [h_t^1; h_(t-1)^2; ...; h_(t-G+1)^G])

Readouts do not feed back into the recurrence, so there is no loop over time: they are functions of
all outputs of a segment and of earlier ones in the memory.

B batch, T segment length, S = L + T slots, L slots of the memory, K hidden size, J = K / parts,
G slices.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import axis_names, dense, document_masks
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.state import State


def empty_memory(batch: int, slots: int, width: int | None, dtype: jnp.dtype) -> State:
  """Returns the memory before the first segment: L empty slots, oldest first.

  Keys: `documents` int32 [B, L], and `kept`, vectors [B, L, width] or, if width is None, tokens
  int32 [B, L].
  """
  documents = jnp.full((batch, slots), document_masks.NONE, jnp.int32)
  if width is None:
    values = jnp.zeros((batch, slots), jnp.int32)
  else:
    values = jnp.zeros((batch, slots, width), dtype)
  return {'documents': documents, 'kept': values}


def append_memory(
  memory: State, rows_BxTx: jax.Array, documents_BxT: jax.Array, valid_BxT: jax.Array | None
) -> tuple[jax.Array, jax.Array, State]:
  """Returns slots [B, S, ...] and documents [B, S] of memory and segment, and the next memory."""
  next_memory = {
    'documents': cache.keep_last(memory['documents'], documents_BxT, valid_BxT),
    'kept': cache.keep_last(memory['kept'], rows_BxTx, valid_BxT),
  }
  documents_BxS = jnp.concatenate([memory['documents'], documents_BxT], axis=1)
  slots_BxSx = jnp.concatenate([memory['kept'], rows_BxTx], axis=1)
  return slots_BxSx, documents_BxS, next_memory


def shift_right(slots_BxSx: jax.Array, steps: int, T: int) -> jax.Array:
  """Returns, for each of the last T slots, the slot that many steps earlier, [B, T, ...]."""
  first = slots_BxSx.shape[1] - T - steps
  return slots_BxSx[:, first : first + T]


def same_document(
  documents_BxS: jax.Array, steps: list[int], documents_BxT: jax.Array
) -> list[jax.Array]:
  """Returns whether earlier slots are in the document of a token, bool [B, T, 1] per step count."""
  T = documents_BxT.shape[1]
  return [(shift_right(documents_BxS, s, T) == documents_BxT)[..., None] for s in steps]


def attend(
  scores_BxTxL: jax.Array, values: list[jax.Array], visible_BxTxL: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns the mean [B, T, J] of L values weighted by softmax, and the weights [B, T, L].

  Both are zero where nothing is visible. With visible_BxTxL=None everything is visible.
  """
  if visible_BxTxL is not None:
    lowest = jnp.finfo(scores_BxTxL.dtype).min
    scores_BxTxL = jnp.where(visible_BxTxL, scores_BxTxL, lowest)
  weights_BxTxL = jax.nn.softmax(scores_BxTxL)
  if visible_BxTxL is not None:
    weights_BxTxL = jnp.where(visible_BxTxL, weights_BxTxL, 0)
  mean_BxTxJ = sum(weights_BxTxL[..., i, None] * value for i, value in enumerate(values))
  return mean_BxTxJ.astype(values[0].dtype), weights_BxTxL


class AttentionReadout(nn.Module):
  """Attention to the L outputs before the current one (equations 1 to 12).

  With three parts h = [key; value; predict]; with two h = [key; value] and predict is the value;
  with one all three are h.

  Parameters: the kernels [J, J] of `keys` (W_Y), `query` (W_h), `read` (W_r) and `predict` (W_x),
  and `score` (w) [J].

  Attributes:
    parts: 1, 2 or 3.
    window: L.
    empty: how slots outside the document are treated: `mask` excludes them; `zeros` attends to
      them as zero vectors.
    initializer: initializer of all parameters.
    dtype: dtype of the computation.
  """

  parts: int = 3
  window: int = 5
  empty: str = 'mask'
  initializer: nn.initializers.Initializer = dense.symmetric(0.1)
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    h_BxTxK: jax.Array,
    documents_BxT: jax.Array,
    memory: State,
    valid_BxT: jax.Array | None = None,
  ) -> tuple[jax.Array, State]:
    """Returns h* [B, T, J], and the memory of keys and values for the next segment."""
    _, T, K = h_BxTxK.shape
    J = K // self.parts
    slots_BxSx, documents_BxS, memory = append_memory(
      memory, h_BxTxK[..., : 2 * J], documents_BxT, valid_BxT
    )
    steps = list(range(self.window, 0, -1))  # the oldest slot first
    visible = same_document(documents_BxS, steps, documents_BxT)
    keys_BxSxJ = self._project('keys', slots_BxSx[..., :J])
    query_BxTxJ = self._project('query', h_BxTxK[..., :J])
    keys = [shift_right(keys_BxSxJ, s, T) for s in steps]
    values = [shift_right(slots_BxSx[..., -J:], s, T) for s in steps]
    if self.empty == 'zeros':
      keys = _where_visible(visible, keys)
      values = _where_visible(visible, values)

    wide = jnp.promote_types(self.dtype, jnp.float32)
    init = axis_names.with_axis_names(self.initializer, ('mlp',))
    score_J = self.param('score', init, (J,), wide).astype(self.dtype)
    scores = []
    for key_BxTxJ in keys:
      activation_BxTxJ = jnp.tanh(key_BxTxJ + query_BxTxJ)
      scores.append(jnp.einsum('btj,j->bt', activation_BxTxJ, score_J, preferred_element_type=wide))
    mask_BxTxL = None
    if self.empty == 'mask':
      mask_BxTxL = jnp.concatenate(visible, axis=-1)
    read_BxTxJ, weights_BxTxL = attend(jnp.stack(scores, axis=-1), values, mask_BxTxL)
    self.sow('intermediates', 'weights', weights_BxTxL)

    predict_BxTxJ = self._project('predict', h_BxTxK[..., -J:])
    return jnp.tanh(self._project('read', read_BxTxJ) + predict_BxTxJ), memory

  def _project(self, name: str, x_BxTxJ: jax.Array) -> jax.Array:
    return dense.project(
      x_BxTxJ,
      features=x_BxTxJ.shape[-1],
      names=('embed', 'mlp'),
      use_bias=False,
      kernel_init=self.initializer,
      dtype=self.dtype,
      name=name,
    )


def _where_visible(visible: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
  """Returns arrays [B, T, J], zero where `visible`, bool [B, T, 1], is false."""
  return [jnp.where(mask, array, 0) for mask, array in zip(visible, arrays, strict=True)]


class NGramReadout(nn.Module):
  """N-gram RNN: reads a different slice of each of the last G outputs (equation 13).

  Slices from before the document are zeros. The sizes in the paper's table match G = N slices,
  its formula has N - 1. Parameters: the `kernel` [K, J] of `slices`.

  Attributes:
    slices: G.
    initializer: initializer of the kernel.
    dtype: dtype of the computation.
  """

  slices: int = 4
  initializer: nn.initializers.Initializer = dense.symmetric(0.1)
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    h_BxTxK: jax.Array,
    documents_BxT: jax.Array,
    memory: State,
    valid_BxT: jax.Array | None = None,
  ) -> tuple[jax.Array, State]:
    """Returns h* [B, T, J], and the memory of G - 1 outputs for the next segment."""
    _, T, K = h_BxTxK.shape
    J = K // self.slices
    h_BxSxK, documents_BxS, memory = append_memory(memory, h_BxTxK, documents_BxT, valid_BxT)
    steps = list(range(self.slices))
    visible = same_document(documents_BxS, steps, documents_BxT)
    slices = []
    for s in steps:
      slice_BxSxJ = h_BxSxK[..., s * J : (s + 1) * J]
      slices.append(shift_right(slice_BxSxJ, s, T))
    slices_BxTxK = jnp.concatenate(_where_visible(visible, slices), axis=-1)
    h_BxTxJ = dense.project(
      slices_BxTxK,
      features=J,
      names=('embed', 'mlp'),
      use_bias=False,
      kernel_init=self.initializer,
      dtype=self.dtype,
      name='slices',
    )
    return jnp.tanh(h_BxTxJ), memory
