"""Copies: the token after the longest earlier match."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.place import Place

KEYS = ('tokens', 'compressed')
NAME = 'copy_memory'  # of its module; of those at its places the first part


@dataclasses.dataclass(frozen=True)
class CopyMemoryConfig:
  """The token after the longest earlier match in the document (see `layers.copy_memory`)."""

  key: str = field(
    'tokens',
    'ids to compare: token ids, or ids of normalised texts (Engram)',
    choices=KEYS,
  )
  window: int = field(1024, 'maximum distance of a match, in tokens', at_least=1, at_most=2**20)
  lengths: tuple[int, ...] = field(
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    'lengths of matches, increasing',
    at_least=1,
    at_most=1024,
    may_be_empty=False,
  )
  counts: int = field(3, 'largest number of matches with its own vector', at_least=1, at_most=64)
  input_gate: float = field(0.5, 'initial factor at the input')
  head_gate: float = field(1.0, 'initial factor before the final norm')

  def places(self, layers: int) -> tuple[Place, ...]:
    """Returns the places of the memory in a model with this number of blocks."""
    del layers
    return Place('input'), Place('before_head')

  def check(self, model: Any) -> None:
    """Raises BadInput for lengths that do not increase, or a memory that would not learn."""
    del model
    rising = tuple(sorted(set(self.lengths)))
    if rising != self.lengths:
      raise errors.BadInput(f'model.copy_memory.lengths={self.lengths} must increase: use {rising}')
    if self.input_gate == self.head_gate == 0:
      raise errors.BadInput(
        'model.copy_memory.input_gate=0 and model.copy_memory.head_gate=0 would learn nothing, '
        'because the vectors start at 0 too: use another value for one of them'
      )
