"""Segment memory (Transformer-XL)."""

import dataclasses

from ngrammer_jax.config.fields import field
from ngrammer_jax.config.relations import at_least, at_most, less_than

# The keys that a token attends to, with a memory of M slots. no: all in the memory and the segment;
# memory: the last M, including itself (PyTorch code of Transformer-XL); memory_and_self: the last
# M + 1 (its TensorFlow code); memory_alone: the M before itself (adaptive span).
SAME_LENGTH = ('no', 'memory', 'memory_and_self', 'memory_alone')


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
  """Segment memory (Transformer-XL): inputs of each layer for the tokens before a segment.

  With `first='zeros'`, the zeros are before the first document of the stream, which attends to them
  only if `across_documents` is True.
  """

  length: int = field(
    128,
    'length of the memory in tokens',
    at_least=0,
    free_on_init=True,
    relations=(
      at_least(
        1,
        where={'same_length': ('memory', 'memory_alone')},
        reason='a token attends to no key; "memory_and_self" is for a memory of length 0',
      ),
      at_most('span.limit'),
    ),
  )
  first: str = field(
    'empty',
    'initial slots: masked, or visible zeros',
    choices=('empty', 'zeros'),
    needs={
      'zeros': {
        'bias': (False,),
        'norm': ('post', 'post_skip'),
        'attention.query_key_value_bias': (None, False),
      }
    },
    reason='zero inputs must have zero keys and values',
  )
  same_length: str = field(
    'no', 'every token attends to the same number of keys', choices=SAME_LENGTH
  )
  across_documents: bool = field(False, 'tokens attend to previous documents too')
  sinks: int = field(
    0,
    'evaluation and generation: first tokens of a document kept in the memory (StreamingLLM)',
    at_least=0,
    free_on_init=True,
    free_on_resume=True,
    only_for={
      'position': ('rope', 'none'),
      'same_length': ('no',),
      'span': (None,),
      'recurrent': (None,),
    },
    relations=(less_than('length', unless=(0,)),),
    reason='moving the keys of the first tokens needs rotary positions',
  )

  def window(self) -> int | None:
    """Distances of attended keys are below this number of tokens; None: no limit."""
    match self.same_length:
      case 'no':
        return None
      case 'memory':
        return self.length
      case _:
        return self.length + 1

  def sees_itself(self) -> bool:
    """Whether a token attends to itself."""
    return self.same_length != 'memory_alone'

  def zeros(self) -> int:
    """Number of visible zeros before a stream."""
    return self.length if self.first == 'zeros' else 0
