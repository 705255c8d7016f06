"""The ids of each token and its predecessors, up to a boundary.

B batch, T segment length, S tokens of state and segment, K heads or 1, R slots of the state.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ngrammer_jax.config.ngram.memory import BOUNDARIES
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.attention import cache
from ngrammer_jax.layers.state import State


@dataclasses.dataclass(frozen=True)
class Windows:
  """Windows of ids over a stream of segments.

  The state holds the last R tokens: `ids` int32 [B, R, K]; `documents` int32 [B, R], NONE in empty
  slots; and for the boundary 'eos_id', `is_eos` bool [B, R]. Any segmentation of a stream gives the
  same windows.

  Attributes:
    places: number of ids in a window: the token and places - 1 predecessors.
    boundary: predecessors do not cross it: 'starts', document starts; 'eos_id', document starts and
      tokens with the id `eos_id`, the last of their sentence; 'none', only the start of the stream.
    eos_id: the token id that ends a sentence.
    fill_id: the id in place of a predecessor across a boundary.
    displacement: number of tokens by which predecessors are read further back.
  """

  places: int
  boundary: str = 'starts'
  eos_id: int | None = None
  fill_id: int = 0
  displacement: int = 0

  def __post_init__(self):
    if self.boundary not in BOUNDARIES:
      raise ValueError(f'boundary {self.boundary!r} is not one of {", ".join(BOUNDARIES)}')
    if self.boundary == 'eos_id' and self.eos_id is None:
      raise ValueError('boundary "eos_id" needs an eos_id, or use boundary="starts"')

  @property
  def slots(self) -> int:
    """R, reach of the windows in tokens before a segment."""
    if self.places < 2:
      return 0
    return self.places - 1 + self.displacement

  def empty_state(self, batch: int, heads: int = 1) -> State | None:
    """Returns the state before the first segment; None for windows without predecessors."""
    R = self.slots
    if not R:
      return None
    state = {
      'ids': jnp.zeros((batch, R, heads), jnp.int32),
      'documents': jnp.full((batch, R), document_masks.NONE, jnp.int32),
    }
    if self.boundary == 'eos_id':
      state['is_eos'] = jnp.zeros((batch, R), bool)
    return state

  def __call__(
    self,
    ids_BxTxK: jax.Array,
    documents_BxT: jax.Array | None,
    state: State | None,
    *,
    valid_BxT: jax.Array | None = None,
    tokens_BxT: jax.Array | None = None,
  ) -> tuple[list[jax.Array], State | None]:
    """Returns the ids 0, 1, ..., places - 1 tokens back, [B, T, K] each, and the next state.

    Args:
      ids_BxTxK: ids of the segment.
      documents_BxT: document number of each token, integers >= 0. None: all are of one document.
      state: the state returned by the previous segment; None at the start of a stream.
      valid_BxT: 0 at padding, only at the end of a row. The state skips padding.
      tokens_BxT: the token ids to compare with `eos_id`, if `ids_BxTxK` are not token ids.

    Raises:
      ValueError: documents_BxT is not an integer array [B, T].
    """
    B, T, K = ids_BxTxK.shape
    if documents_BxT is not None:
      _check_documents(documents_BxT, (B, T))
    if not self.slots:
      return [ids_BxTxK], None
    if state is None:
      state = self.empty_state(B, K)
    if documents_BxT is None:
      number_Bx1 = jnp.maximum(state['documents'][:, -1:], 0)
      documents_BxT = jnp.broadcast_to(number_Bx1, (B, T))
    segment = {'ids': ids_BxTxK, 'documents': documents_BxT}
    if self.boundary == 'eos_id':
      if tokens_BxT is None:
        tokens_BxT = ids_BxTxK[..., 0]
      segment['is_eos'] = tokens_BxT == self.eos_id

    def concatenate(before, new):
      return jnp.concatenate([before, new], axis=1)

    def keep_last(before, new):
      return cache.keep_last(before, new, valid_BxT)

    stream = jax.tree.map(concatenate, state, segment)
    return self._look_back(stream, T), jax.tree.map(keep_last, state, segment)

  def _look_back(self, stream: State, T: int) -> list[jax.Array]:
    """Returns the ids at each place of the windows of the last T of S tokens, [B, T, K] each."""
    R = self.slots

    def before(name, steps):
      return stream[name][:, R - steps : R - steps + T]

    windows = [before('ids', 0)]
    is_inside_BxT = True
    for steps in range(1, R + 1):
      if self.boundary == 'none':
        is_inside_BxT &= before('documents', steps) != document_masks.NONE
      else:
        is_inside_BxT &= before('documents', steps) == before('documents', 0)
      if self.boundary == 'eos_id':
        is_inside_BxT &= ~before('is_eos', steps)
      if steps > self.displacement:
        is_inside_BxTx1 = is_inside_BxT[..., None]
        windows.append(jnp.where(is_inside_BxTx1, before('ids', steps), self.fill_id))
    return windows


def _check_documents(documents_BxT: jax.Array, shape: tuple[int, int]) -> None:
  """Raises ValueError unless document numbers are integers [B, T]."""
  if not jnp.issubdtype(documents_BxT.dtype, jnp.integer) or documents_BxT.shape != shape:
    raise ValueError(
      f'documents_BxT is {documents_BxT.dtype} {list(documents_BxT.shape)}: expected the document '
      f'number of each token, integers {list(shape)}; for document starts, pass '
      f'jnp.cumsum(starts_BxT, axis=1)'
    )
