"""The memories of a model, see `layers.memory`.

The config of a memory is a field of `ModelConfig` with `places(layers)`, see `config.memory.Place`.
"""

from collections.abc import Iterable

from ngrammer_jax.config.memory import POINTS
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers.memory import PlacedMemory, States
from ngrammer_jax.models import ngrams, precision

# For each field of `ModelConfig`, a function that makes the memory at a place from the config of
# the model, the place, the dtype of activations and the vocabulary size.
MEMORIES = {
  # Those at one place act in this order.
  'ngram': ngrams.memory
}
# Other keys of the memories of models and blocks.
RESERVED = ('cache', 'document', 'hidden', 'layers', 'recent', 'spans', 'state', 'window')


def all_memories(config: ModelConfig, vocabulary_size: int | None = None) -> list[PlacedMemory]:
  """Returns the memories of a model.

  Args:
    config: of the model.
    vocabulary_size: V, which some modules need to be applied.

  Raises:
    ValueError: a place that does not exist, or two memories of one name.
  """
  memories, dtype = [], precision.compute_dtype(config)
  for field, make in MEMORIES.items():
    memory_config = getattr(config, field)
    for place in () if memory_config is None else memory_config.places(config.layers):
      if place.point not in POINTS or place.block not in range(config.layers):
        raise ValueError(f'model.{field}: {place} is not in a model of {config.layers} blocks')
      memories.append(make(config, place, dtype, vocabulary_size))
  used = set()
  for memory in memories:
    scope = None if memory.is_between_blocks else memory.place.block
    for kind, name in (('name', memory.name), ('state_name', memory.state_key)):
      if (scope, kind, name) in used or kind == 'state_name' and name in RESERVED:
        raise ValueError(f'memory at {memory.place}: {kind}={name!r} is already used')
      used.add((scope, kind, name))
  return memories


def between_blocks(config: ModelConfig, vocabulary_size: int | None = None) -> list[PlacedMemory]:
  """Returns the memories that the model applies, at its input and between blocks."""
  memories = all_memories(config, vocabulary_size)
  return [memory for memory in memories if memory.is_between_blocks]


def in_block(config: ModelConfig, number: int) -> list[PlacedMemory]:
  """Returns the memories in a block."""
  memories = [memory for memory in all_memories(config) if not memory.is_between_blocks]
  return [memory for memory in memories if memory.place.block == number]


def empty_states(memories: Iterable[PlacedMemory], batch: int, slots: int | None = None) -> States:
  """Returns the states of memories before the first segment, by name."""
  states = {}
  for memory in memories:
    states |= memory.empty_state(batch, slots)
  return states
