"""What is read from the last outputs of a recurrent layer (Daniluk et al. 2017).

No readout goes back into the recurrence: each is a function of all outputs of a segment and of
those before, which its memory holds. So there is no loop over time here.

B batch, T segment length, S = L + T slots, L slots of the memory, K hidden size, J = K / parts.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from ngrammer_jax.layers import cache, dense, documents, recurrence

EMPTY = ('mask', 'zeros')

Memory = dict[str, jax.Array]


def empty_memory(batch: int, slots: int, width: int | None, dtype: jnp.dtype) -> Memory:
  """What came before a stream: L empty slots, the oldest first.

  Keys: `documents` int32 [B, L], and `kept`: vectors [B, L, width], or tokens int32 [B, L] where
  there is no width.
  """
  shape = (batch, slots) if width is None else (batch, slots, width)
  return {
    'documents': jnp.full((batch, slots), documents.NONE, jnp.int32),
    'kept': jnp.zeros(shape, jnp.int32 if width is None else dtype),
  }


def joined(
  memory: Memory, kept: jax.Array, documents_BxT: jax.Array, valid_BxT: jax.Array | None
) -> tuple[jax.Array, jax.Array, Memory]:
  """The slots [B, S, ...] of the memory and the segment, their documents, and the next memory."""
  now = {'documents': documents_BxT, 'kept': kept}
  after = jax.tree.map(lambda before, new: cache.last(before, new, valid_BxT), memory, now)
  all_of = {name: jnp.concatenate([memory[name], now[name]], axis=1) for name in now}
  return all_of['kept'], all_of['documents'], after


def back(slots_BxSx: jax.Array, steps: int, T: int) -> jax.Array:
  """For each of the last T slots the one so many steps before."""
  first = slots_BxSx.shape[1] - T - steps
  return slots_BxSx[:, first : first + T]


def visible(
  documents_BxS: jax.Array, steps: list[int], documents_BxT: jax.Array
) -> list[jax.Array]:
  """Whether the slots so many steps before each token are of its document, bool [B, T, 1] each."""
  T = documents_BxT.shape[1]
  return [(back(documents_BxS, s, T) == documents_BxT)[..., None] for s in steps]


def attend(
  scores_BxTxL: jax.Array, values: list[jax.Array], visible_BxTxL: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """The mean [B, T, J] of L values by the softmax of their scores, and its weights [B, T, L].

  Zero where nothing is visible. None: everything is.
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
  """Attention to the last L outputs, itself not among them (equations 1 to 12).

  With one part, h is key, value and what is predicted from; with two h = [key; value], and the
  value predicts; with three h = [key; value; predict]. Then

    a = softmax(w tanh(W_Y key_s + W_h key_t)),  r = sum a_s value_s,
    h* = tanh(W_r r + W_x predict_t)

  Parameters: the kernels [J, J] of `keys` (W_Y), `query` (W_h), `read` (W_r) and `predict` (W_x),
  and `score` (w) [J].

  Attributes:
    parts: 1, 2 or 3.
    window: L.
    empty: what slots without an output of the document are: `mask`, none; `zeros`, vectors of
      zeros that take their share of the softmax.
    initializer: of all parameters.
    dtype: of the computation.
  """

  parts: int = 3
  window: int = 5
  empty: str = 'mask'
  initializer: nn.initializers.Initializer = recurrence.symmetric(0.1)
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    h_BxTxK: jax.Array,
    documents_BxT: jax.Array,
    memory: Memory,
    valid_BxT: jax.Array | None = None,
  ) -> tuple[jax.Array, Memory]:
    """h* [B, T, J], and the memory of keys and values for the next segment."""
    T, J = h_BxTxK.shape[1], h_BxTxK.shape[2] // self.parts
    kept_BxSx, documents_BxS, memory = joined(
      memory, h_BxTxK[..., : 2 * J], documents_BxT, valid_BxT
    )
    steps = list(range(self.window, 0, -1))  # the oldest slot first
    seen = visible(documents_BxS, steps, documents_BxT)
    keys_BxSxJ = self._dense('keys', kept_BxSx[..., :J])
    query_BxTxJ = self._dense('query', h_BxTxK[..., :J])
    keys = [back(keys_BxSxJ, s, T) for s in steps]
    values = [back(kept_BxSx[..., -J:], s, T) for s in steps]
    if self.empty == 'zeros':
      only = lambda slots: [jnp.where(*each, 0) for each in zip(seen, slots, strict=True)]
      keys, values = only(keys), only(values)
    wide = jnp.promote_types(self.dtype, jnp.float32)
    score_J = self.param('score', self.initializer, (J,), wide).astype(self.dtype)
    of = lambda key_BxTxJ: jnp.einsum(
      'btj,j->bt', jnp.tanh(key_BxTxJ + query_BxTxJ), score_J, preferred_element_type=wide
    )
    scores_BxTxL = jnp.stack([of(key_BxTxJ) for key_BxTxJ in keys], axis=-1)
    mask = jnp.concatenate(seen, axis=-1) if self.empty == 'mask' else None
    read_BxTxJ, weights_BxTxL = attend(scores_BxTxL, values, mask)
    self.sow('intermediates', 'weights', weights_BxTxL)
    predict_BxTxJ = h_BxTxK[..., -J:]
    h_BxTxJ = jnp.tanh(self._dense('read', read_BxTxJ) + self._dense('predict', predict_BxTxJ))
    return h_BxTxJ, memory

  def _dense(self, name, x_BxTxJ):
    J, how = x_BxTxJ.shape[-1:], {'dtype': self.dtype, 'kernel_init': self.initializer}
    return dense.dense_general(J, J, ('embed', 'mlp'), use_bias=False, name=name, **how)(x_BxTxJ)


class NGramReadout(nn.Module):
  """An N-gram RNN: of each of the last outputs another slice (equation 13).

    h* = tanh(W [h_t^1; h_(t-1)^2; ...; h_(t-S+1)^S])

  What lies before the document is zeros. The sizes in the paper's table are those of S = N
  slices, its formula has N - 1. Parameters: the `kernel` [K, J] of `slices`.

  Attributes:
    slices: S.
    initializer: of the kernel.
    dtype: of the computation.
  """

  slices: int = 4
  initializer: nn.initializers.Initializer = recurrence.symmetric(0.1)
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    h_BxTxK: jax.Array,
    documents_BxT: jax.Array,
    memory: Memory,
    valid_BxT: jax.Array | None = None,
  ) -> tuple[jax.Array, Memory]:
    """h* [B, T, J], and the memory of S - 1 outputs for the next segment."""
    T, J = h_BxTxK.shape[1], h_BxTxK.shape[2] // self.slices
    kept_BxSxK, documents_BxS, memory = joined(memory, h_BxTxK, documents_BxT, valid_BxT)
    steps = list(range(self.slices))
    seen = visible(documents_BxS, steps, documents_BxT)
    slices = [
      jnp.where(seen[s], back(kept_BxSxK[..., s * J : (s + 1) * J], s, T), 0) for s in steps
    ]
    slices_BxTxK = jnp.concatenate(slices, axis=-1)
    how = {'dtype': self.dtype, 'kernel_init': self.initializer, 'name': 'slices'}
    project = dense.dense_general(
      slices_BxTxK.shape[2:], (J,), ('embed', 'mlp'), use_bias=False, **how
    )
    return jnp.tanh(project(slices_BxTxK)), memory
