"""Persistent vectors (all-attention)."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.initial import start_field

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
  )
  start: str | None = start_field()

  def check(self, model: Any) -> None:
    """Raises BadInput for vectors that are invalid for the model."""
    if not self.vectors and self.kind != 'all_attention':
      raise errors.BadInput(
        f'model.persistent.kind={self.kind!r} needs vectors, but model.persistent.vectors=0'
      )
    if self.start == 'neutral' and self.kind in ('all_attention', 'head_split'):
      raise errors.BadInput(
        f'model.persistent.kind={self.kind!r} takes attention from the context, so it cannot be '
        f'added to a trained model: use model.persistent.kind="attention_split", with a softmax of '
        f'its own, or model.persistent.start="published", with another loss at the start'
      )
    if self.kind != 'head_split':
      return
    if model.heads % 2:
      raise errors.BadInput(
        f'model.persistent.kind="head_split" needs an even number of heads, not '
        f'model.heads={model.heads}'
      )
    if model.shared_query_key:
      raise errors.BadInput(
        'model.persistent.kind="head_split" has heads without keys, but model.shared_query_key '
        'computes queries from keys: use only one of them'
      )
    if model.ngram is not None and model.ngram.layer == 'attention':
      raise errors.BadInput(
        'model.persistent.kind="head_split" has heads without context, but '
        'model.ngram.layer="attention" needs context in all heads: use another kind or layer'
      )
