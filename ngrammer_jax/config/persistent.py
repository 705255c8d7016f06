"""Persistent vectors (all-attention)."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.initial import start_field
from ngrammer_jax.config.ngram.ngrammer import BETWEEN_BLOCKS

# all_attention is the method of the paper; the others are its ablations.
KINDS = ('all_attention', 'attention_split', 'single_head', 'head_split')


@dataclasses.dataclass(frozen=True)
class PersistentConfig:
  """Learned keys and values of each head (see `layers.attention.persistent`)."""

  vectors: int = field(1024, 'persistent vectors of each head; 0: none', at_least=0)
  kind: str = field(
    'all_attention',
    'how the vectors are combined with the context (the others: ablations)',
    choices=KINDS,
    # It has heads without keys, and without context.
    needs={'head_split': {'shared_query_key': (False,), 'ngram.layer': (None, *BETWEEN_BLOCKS)}},
  )
  start: str | None = start_field(
    needs={'neutral': {'kind': ('attention_split', 'single_head')}},
    reason='the others take attention from the context of the trained model',
  )

  def check(self, model: Any) -> None:
    """Raises BadInput for vectors that are invalid for the model."""
    if not self.vectors and self.kind != 'all_attention':
      raise errors.BadInput(f'model.persistent.kind={self.kind!r} needs vectors, not 0 of them')
    if self.kind == 'head_split' and model.heads % 2:
      raise errors.BadInput(
        f'model.persistent.kind="head_split" needs an even model.heads, not {model.heads}'
      )
