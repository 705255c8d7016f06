"""What attention sees beside the segment: segment memory, spans and persistent vectors."""

import dataclasses
from typing import Any, NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

FIRST = ('empty', 'zeros')
# The keys that a token sees at most. no: all there are; memory: as many as the memory has slots,
# with itself (PyTorch code of Transformer-XL); memory_and_self: one more (its TensorFlow code);
# memory_alone: as many as the memory has slots, before it (adaptive span).
SAME_LENGTH = ('no', 'memory', 'memory_and_self', 'memory_alone')
SPANS = ('adaptive', 'dynamic')
# Where memories may act, see `Place`.
BETWEEN_BLOCKS = ('input', 'after_block')
POINTS = (*BETWEEN_BLOCKS, 'after_attention')
# all_attention is the paper's; the others are its ablations.
PERSISTENT = ('all_attention', 'attention_split', 'single_head', 'head_split')


class Place(NamedTuple):
  """Where a memory acts (see `layers.memory`).

  Attributes:
    point: `input`: on the embeddings, before positions and dropout. `after_block`: on the output
      of a block. `after_attention`: on the attended values of a block, before they are projected.
    block: number of the block, from 0 on; 0 for `input`.
  """

  point: str
  block: int = 0


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
  """Segment memory (Transformer-XL): inputs of each layer for the tokens before a segment.

  With `first='zeros'`, a document that begins with the stream sees the zeros, as all that is before
  it, only with `across_documents`.
  """

  length: int = field(128, 'tokens before the segment that are kept', at_least=0)
  first: str = field(
    'empty', 'slots before the first segment: masked, or zeros that are attended to', choices=FIRST
  )
  same_length: str = field(
    'no', 'the same number of keys for every token, as in one of the papers', choices=SAME_LENGTH
  )
  across_documents: bool = field(False, 'tokens see the documents before their own')

  def window(self) -> int | None:
    """Keys that a token attends to are less than so many tokens away."""
    return {'no': None, 'memory': self.length}.get(self.same_length, self.length + 1)

  def sees_itself(self) -> bool:
    """Whether a token attends to itself."""
    return self.same_length != 'memory_alone'

  def check(self, model: Any) -> None:
    """Raises BadInput for a memory that the model cannot have."""
    if self.length == 0 and self.same_length in ('memory', 'memory_alone'):
      raise errors.BadInput(
        f'model.memory.same_length={self.same_length!r} with model.memory.length=0: a token sees '
        f'nothing, not even itself; use "memory_and_self"'
      )
    if self.first == 'zeros' and (model.bias or model.norm not in ('post', 'post_skip')):
      raise errors.BadInput(
        f'model.memory.first="zeros" needs keys and values of zeros to be zeros: without '
        f'model.bias, and model.norm="post_skip" or "post", not {model.norm!r}'
      )


@dataclasses.dataclass(frozen=True)
class SpanConfig:
  """How far each head looks back (see `layers.span`)."""

  kind: str = field('adaptive', 'a parameter of a head, or a function of the token', choices=SPANS)
  limit: int = field(1024, 'maximum span S, in tokens', at_least=1)
  ramp: int = field(
    32,
    'tokens R over which a span fades out',
    at_least=1,
    reason='a span that ends at once has no slope to learn by (the papers use 32)',
  )
  penalty: float = field(
    2e-6, 'loss in nats per token of span, mean over heads, sum over layers', at_least=0
  )
  initial: float | None = field(
    None, 'initial parameter; None: 0 for adaptive, -4 (before the sigmoid) for dynamic'
  )
  renormalize: bool = field(True, 'rescale masked attention weights to a sum of 1')
  reserve: int = field(16, 'no longer used', at_least=1, free_on_resume=True, is_used=False)
  check_every: int = field(100, 'no longer used', at_least=1, free_on_resume=True, is_used=False)

  def check(self, model: Any) -> None:
    """Raises BadInput for a span that the model cannot have."""
    if self.limit < self.ramp:
      raise errors.BadInput(
        f'model.span.limit={self.limit} is below model.span.ramp={self.ramp}, which even a span of '
        f'0 reaches: raise the limit, or use a shorter ramp'
      )
    if self.initial is not None:
      if self.kind == 'adaptive' and not 0 <= self.initial <= 1:
        raise errors.BadInput(f'model.span.initial={self.initial} must be from 0 to 1')
      if not abs(self.initial) <= 20:
        raise errors.BadInput(
          f'model.span.initial={self.initial} is where the sigmoid of kind="dynamic" is flat and '
          f'nothing is learned: use -20 to 20'
        )
    memory = model.memory
    if memory is None or memory.same_length == 'no':
      raise errors.BadInput(
        f'model.span needs as many keys for every token: set model.memory.length={self.limit} and '
        f'model.memory.same_length, "memory_alone" as in the paper'
      )
    if memory.length > self.limit:
      raise errors.BadInput(
        f'model.memory.length={memory.length} is beyond '
        f'model.span.limit={self.limit}, the longest span there can be: use {self.limit}'
      )


@dataclasses.dataclass(frozen=True)
class PersistentConfig:
  """Learned keys and values of each head (see `layers.persistent`)."""

  vectors: int = field(1024, 'persistent vectors of each head; 0: none', at_least=0)
  kind: str = field(
    'all_attention', 'how they join the context (the others: ablations)', choices=PERSISTENT
  )

  def check(self, model: Any) -> None:
    """Raises BadInput for vectors that the model cannot have."""
    if not self.vectors and self.kind != 'all_attention':
      raise errors.BadInput(
        f'model.persistent.kind={self.kind!r} splits what is not there: model.persistent.vectors=0'
      )
    if self.kind != 'head_split':
      return
    if model.heads % 2:
      raise errors.BadInput(
        f'model.persistent.kind="head_split" halves the heads: model.heads={model.heads} is odd'
      )
    if model.shared_query_key:
      raise errors.BadInput(
        'model.persistent.kind="head_split" has queries without keys, but model.shared_query_key '
        'makes queries of keys: use one of them'
      )
    if model.ngram is not None and model.ngram.layer == 'attention':
      raise errors.BadInput(
        'model.persistent.kind="head_split" leaves half of the heads without a context, whose '
        'n-grams model.ngram.layer="attention" looks up: use another kind, or another layer'
      )
