"""Persistent vectors (all-attention)."""

import dataclasses

from ngrammer_jax.config.fields import field
from ngrammer_jax.config.initial import start_field
from ngrammer_jax.config.ngram.ngrammer import OUTSIDE_OF_BLOCKS
from ngrammer_jax.config.relations import at_least

ABLATIONS = ('attention_split', 'single_head', 'head_split')
KINDS = ('all_attention', *ABLATIONS)  # the method of the paper, then its ablations


@dataclasses.dataclass(frozen=True)
class PersistentConfig:
  """Learned keys and values of each head (see `layers.attention.persistent`)."""

  vectors: int = field(
    1024,
    'persistent vectors of each head; 0: none',
    at_least=0,
    relations=(at_least(1, where={'kind': ABLATIONS}),),
  )
  kind: str = field(
    'all_attention',
    'combination of vectors and context (all but the default: ablations)',
    choices=KINDS,
    # It has heads without keys, and without context.
    needs={'head_split': {'shared_query_key': (False,), 'ngram.layer': (None, *OUTSIDE_OF_BLOCKS)}},
  )
  start: str | None = start_field(
    needs={'neutral': {'kind': ('attention_split', 'single_head')}},
    reason='the others take attention from the context of the trained model',
  )
