"""Segment memory, attention spans and persistent vectors."""

import dataclasses
from typing import Any, NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

FIRST = ('empty', 'zeros')
# The keys that a token attends to, with a memory of M slots. no: all in the memory and the segment;
# memory: the last M, including itself (PyTorch code of Transformer-XL); memory_and_self: the last
# M + 1 (its TensorFlow code); memory_alone: the M before itself (adaptive span).
SAME_LENGTH = ('no', 'memory', 'memory_and_self', 'memory_alone')
SPANS = ('adaptive', 'dynamic')
# Where memories may act, see `Place`.
BETWEEN_BLOCKS = ('input', 'after_block')
POINTS = (*BETWEEN_BLOCKS, 'before_attention', 'after_attention')
# all_attention is the method of the paper; the others are its ablations.
PERSISTENT = ('all_attention', 'attention_split', 'single_head', 'head_split')


class Place(NamedTuple):
  """Where a memory is applied (see `layers.memory`).

  Attributes:
    point: `input`: to the embeddings, before positions and dropout. `after_block`: to the output
      of a block. `before_attention`: to the input of a block, before the segment memory stores it.
      `after_attention`: to the attended values of a block, before their projection.
    block: number of the block, from 0 on; 0 for `input`.
  """

  point: str
  block: int = 0


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
  """Segment memory (Transformer-XL): inputs of each layer for the tokens before a segment.

  With `first='zeros'`, a document at the start of the stream attends to the zeros only if
  `across_documents` is True, because they are before the document.
  """

  length: int = field(128, 'length of the memory in tokens', at_least=0, free_on_init=True)
  first: str = field('empty', 'initial slots: masked, or zeros that are attended to', choices=FIRST)
  same_length: str = field(
    'no', 'attend to the same number of keys for every token', choices=SAME_LENGTH
  )
  across_documents: bool = field(False, 'tokens attend to previous documents too')

  def window(self) -> int | None:
    """Distance in tokens below which keys are attended to; None: no limit."""
    return {'no': None, 'memory': self.length}.get(self.same_length, self.length + 1)

  def sees_itself(self) -> bool:
    """Whether a token attends to itself."""
    return self.same_length != 'memory_alone'

  def check(self, model: Any) -> None:
    """Raises BadInput for a memory that is invalid for the model."""
    if self.length == 0 and self.same_length in ('memory', 'memory_alone'):
      raise errors.BadInput(
        f'model.memory.same_length={self.same_length!r} with model.memory.length=0: a token '
        f'attends to no key; use "memory_and_self"'
      )
    if self.first == 'zeros' and (model.bias or model.norm not in ('post', 'post_skip')):
      raise errors.BadInput(
        f'model.memory.first="zeros" requires that zero inputs have zero keys and values: use '
        f'model.bias=False, and model.norm="post_skip" or "post", not {model.norm!r}'
      )


@dataclasses.dataclass(frozen=True)
class SpanConfig:
  """Learned attention span of each head (see `layers.attention.span`)."""

  kind: str = field('adaptive', 'one parameter per head, or a function of the token', choices=SPANS)
  limit: int = field(1024, 'maximum span S, in tokens', at_least=1)
  ramp: int = field(
    32,
    'tokens R over which a span fades out',
    at_least=1,
    reason='a span without a ramp has no gradient (the papers use 32)',
  )
  penalty: float = field(
    2e-6,
    'loss in nats per token of span: mean over heads, summed over layers',
    at_least=0,
    free_on_init=True,
  )
  initial: float | None = field(
    None,
    'initial parameter; None: 0 for adaptive, -4 (before the sigmoid) for dynamic',
    free_on_init=True,
  )
  renormalize: bool = field(True, 'rescale masked attention weights to a sum of 1')
  reserve: int = field(16, 'no longer used', at_least=1, free_on_resume=True, is_used=False)
  check_every: int = field(100, 'no longer used', at_least=1, free_on_resume=True, is_used=False)

  def check(self, model: Any) -> None:
    """Raises BadInput for spans that are invalid for the model."""
    if self.limit < self.ramp:
      raise errors.BadInput(
        f'model.span.limit={self.limit} is less than model.span.ramp={self.ramp}, the minimum '
        f'span: raise the limit, or use a shorter ramp'
      )
    if self.initial is not None:
      if self.kind == 'adaptive' and not 0 <= self.initial <= 1:
        raise errors.BadInput(f'model.span.initial={self.initial} must be from 0 to 1')
      if not abs(self.initial) <= 20:
        raise errors.BadInput(
          f'model.span.initial={self.initial} saturates the sigmoid of kind="dynamic", so its '
          f'gradient vanishes: use -20 to 20'
        )
    memory = model.memory
    if memory is None or memory.same_length == 'no':
      raise errors.BadInput(
        f'model.span needs the same number of keys for every token: set model.memory.length='
        f'{self.limit} and model.memory.same_length ("memory_alone" in the paper)'
      )
    if memory.length > self.limit:
      raise errors.BadInput(
        f'model.memory.length={memory.length} exceeds the maximum span '
        f'model.span.limit={self.limit}: use {self.limit}'
      )


@dataclasses.dataclass(frozen=True)
class PersistentConfig:
  """Learned keys and values of each head (see `layers.attention.persistent`)."""

  vectors: int = field(1024, 'persistent vectors of each head; 0: none', at_least=0)
  kind: str = field(
    'all_attention',
    'how the vectors are combined with the context (the others: ablations)',
    choices=PERSISTENT,
  )

  def check(self, model: Any) -> None:
    """Raises BadInput for vectors that are invalid for the model."""
    if not self.vectors and self.kind != 'all_attention':
      raise errors.BadInput(
        f'model.persistent.kind={self.kind!r} needs vectors, but model.persistent.vectors=0'
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
