"""What attention looks at beside the segment: its memory, how far back, and learned vectors."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.layers import persistent

FIRST = ('empty', 'zeros')
SAME_LENGTH = ('no', 'memory', 'memory_and_self', 'memory_alone')
SPANS = ('adaptive', 'dynamic')


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
  """Segment memory (Transformer-XL): inputs of each layer for the tokens before a segment."""

  length: int = 128  # tokens
  # Before the first segment: nothing, or zeros that are attended to. A document that begins with
  # the stream sees zeros, as all that is before it, only with across_documents.
  first: str = 'empty'
  # Keys of a token at most: all there are; as many as the memory, with itself (the PyTorch code
  # of Transformer-XL); one more (the TensorFlow code); or as many before it (adaptive span).
  same_length: str = 'no'
  across_documents: bool = False  # tokens see the documents before their own

  def window(self) -> int | None:
    """Keys that a token attends to are less than so many tokens away."""
    return {'no': None, 'memory': self.length}.get(self.same_length, self.length + 1)

  def sees_itself(self) -> bool:
    """Whether a token attends to itself."""
    return self.same_length != 'memory_alone'

  def check(self, model: Any) -> None:
    """Raises BadInput for a memory that the model cannot have."""
    errors.check_choices('model.memory', self, {'first': FIRST, 'same_length': SAME_LENGTH})
    if self.length < 0:
      raise errors.BadInput(f'model.memory.length={self.length} must be at least 0')
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

  kind: str = 'adaptive'  # a number of each head; dynamic: a function of the token
  limit: int = 1024  # S, the longest span in tokens
  ramp: int = 32  # R, over which a span fades out
  penalty: float = 2e-6  # nats per token of span, mean of the heads, sum of the layers
  # Where the parameter begins; None: 0 for adaptive, -4 for dynamic (before the sigmoid).
  initial: float | None = None
  renormalize: bool = True  # what the mask leaves adds up to 1 again
  # Tokens that a span may grow before what is computed has to be fitted to it again.
  reserve: int = 16
  check_every: int = 100  # steps after which it is

  def check(self, model: Any) -> None:
    """Raises BadInput for a span that the model cannot have."""
    errors.check_choices('model.span', self, {'kind': SPANS})
    if self.limit < 1:
      raise errors.BadInput(f'model.span.limit={self.limit} must be at least 1')
    if self.ramp < 1:
      raise errors.BadInput(
        f'model.span.ramp={self.ramp}: a span of kind={self.kind!r} without a width to fade out '
        f'over ends at once, and has no slope to be learned by; use at least 1 (the papers use 32)'
      )
    if self.limit < self.ramp:
      raise errors.BadInput(
        f'model.span.limit={self.limit} is below model.span.ramp={self.ramp}, which even a span of '
        f'0 reaches: raise the limit, or use a shorter ramp'
      )
    for key in ('reserve', 'check_every'):
      if getattr(self, key) < 1:
        raise errors.BadInput(f'model.span.{key}={getattr(self, key)} must be at least 1')
    if not self.penalty >= 0:
      raise errors.BadInput(f'model.span.penalty={self.penalty} must be at least 0')
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

  vectors: int = 1024  # of each head; 0: none
  kind: str = 'all_attention'  # the paper's; the others are its ablations

  def check(self, model: Any) -> None:
    """Raises BadInput for vectors that the model cannot have."""
    errors.check_choices('model.persistent', self, {'kind': persistent.KINDS})
    if self.vectors < 0:
      raise errors.BadInput(f'model.persistent.vectors={self.vectors} must be at least 0')
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
