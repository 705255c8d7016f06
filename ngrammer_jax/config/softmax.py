"""Adaptive input and softmax."""

import dataclasses
import itertools
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

DROPOUT = {'at_least': 0, 'below': 1, 'free_on_init': True}  # rules of every dropout


@dataclasses.dataclass(frozen=True)
class AdaptiveSoftmaxConfig:
  """Adaptive input and softmax (see `layers.adaptive_softmax`)."""

  cutoffs: tuple[int, ...] = field(
    (),
    'first word id of each tail cluster',
    only_for={'data.vocabulary': ('words',)},
    reason='only these are sorted by frequency',
  )
  divisor: int = field(1, 'ratio of the widths of a cluster and the next one', at_least=1)
  embedding_width: int | None = field(None, 'width of the head embeddings; None: D', at_least=1)
  tied_projections: tuple[bool, ...] = field(
    (True,), 'share the projection of input and output, by cluster or one entry for all'
  )
  project_same_width: bool = field(True, 'project clusters as wide as the model, if divided')
  dropout: float | None = field(None, 'dropout of input and output; None: model.dropout', **DROPOUT)

  def check(self, model: Any) -> None:
    """Raises BadInput for invalid clusters."""
    borders = (0, *self.cutoffs)
    if any(end <= start for start, end in itertools.pairwise(borders)):
      raise errors.BadInput(
        f'model.adaptive_softmax.cutoffs={self.cutoffs} must increase, the first above 0'
      )
    width = self.embedding_width
    if width is None:
      width = model.width
    clusters = len(borders)
    if width // self.divisor ** (clusters - 1) < 1:
      raise errors.BadInput(
        f'model.adaptive_softmax.divisor={self.divisor}: width {width} is too small for the last '
        f'of {clusters} clusters: use a smaller divisor, or fewer cutoffs'
      )
    if len(self.tied_projections) not in (1, clusters):
      raise errors.BadInput(
        f'model.adaptive_softmax.tied_projections has {len(self.tied_projections)} entries for '
        f'{clusters} clusters: expected one for each, the head first, or one for all'
      )

  def check_vocabulary(self, size: int) -> None:
    """Raises BadInput if a tail cluster would be empty."""
    if self.cutoffs and self.cutoffs[-1] >= size:
      raise errors.BadInput(
        f'model.adaptive_softmax.cutoffs={self.cutoffs}: the vocabulary has only {size:,} words: '
        f'use smaller ones'
      )
