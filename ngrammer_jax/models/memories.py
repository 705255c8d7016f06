"""The memories of a model, see `layers.memory`.

The config of a memory is a field of `ModelConfig` with `places(layers)`, see `config.memory.Place`;
or a tuple of such configs.
"""

from collections.abc import Iterable
import functools

from ngrammer_jax.config.memory import POINTS
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers.memory import PlacedMemory, States
from ngrammer_jax.layers.ngram.quantizer import ProductQuantizer
from ngrammer_jax.models import ngram_memories, ngrams, precision

# For each field of `ModelConfig`, a function that makes the memory at a place from the config of
# the model, the place, the dtype of activations and the vocabulary size. If the field is a tuple,
# `number` is the index of the memory in it.
MEMORIES = {
  # Those at one place act in this order.
  'ngram': ngrams.memory,
  'ngram_memories': ngram_memories.memory,
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
  for key, memory_config, make in _configured(config):
    for place in memory_config.places(config.layers):
      if place.point not in POINTS or place.block not in range(config.layers):
        raise ValueError(f'{key}: {place} is not in a model of {config.layers} blocks')
      memories.append(make(config, place, dtype, vocabulary_size))
  used = set()
  for memory in memories:
    scope = None if memory.is_between_blocks else memory.place.block
    for kind, name in (('name', memory.name), ('state_name', memory.state_key)):
      if (scope, kind, name) in used or kind == 'state_name' and name in RESERVED:
        raise ValueError(f'memory at {memory.place}: {kind}={name!r} is already used')
      used.add((scope, kind, name))
  return memories


def _configured(config):
  """Yields the key and the config of every memory, and the function that makes it at a place."""
  for name, make in MEMORIES.items():
    field = getattr(config, name)
    if isinstance(field, tuple):
      for number, memory_config in enumerate(field):
        yield f'model.{name}.{number}', memory_config, functools.partial(make, number=number)
    elif field is not None:
      yield f'model.{name}', field, make


def between_blocks(config: ModelConfig, vocabulary_size: int | None = None) -> list[PlacedMemory]:
  """Returns the memories that the model applies, at its input and between blocks."""
  memories = all_memories(config, vocabulary_size)
  return [memory for memory in memories if memory.is_between_blocks]


def in_block(
  config: ModelConfig, number: int, vocabulary_size: int | None = None
) -> list[PlacedMemory]:
  """Returns the memories in a block."""
  memories = all_memories(config, vocabulary_size)
  memories = [memory for memory in memories if not memory.is_between_blocks]
  return [memory for memory in memories if memory.place.block == number]


def make_quantizer(config: ModelConfig, memory_name: str) -> ProductQuantizer:
  """Returns the quantiser of a memory with clusters, not bound to variables."""
  make = {memory.name: memory.make for memory in all_memories(config)}[memory_name]
  return make(parent=None).make_quantizer(parent=None)


def empty_states(memories: Iterable[PlacedMemory], batch: int, slots: int | None = None) -> States:
  """Returns the states of memories before the first segment, by name."""
  states = {}
  for memory in memories:
    states |= memory.empty_state(batch, slots)
  return states
