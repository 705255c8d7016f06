"""The memories of a model, and the places where they act.

A memory is a Linen module with

  state_name                                               its key in the memory of the model
  empty_state(batch, slots) -> state                       before the first segment
  __call__(x_BxTxD, context, state) -> (y_BxTxD, state)    one segment

A state is a pytree of arrays, or None. Each array has the batch as its first axis and keeps its
shape and dtype. It is detached (`stop_gradient`), and padding (`context.valid_BxT`) does not change
it: any split of a stream into segments gives the same result as one pass. `slots` is the number
of earlier tokens in the memory of the layers, None without a memory.

A memory after attention also has `needs_pairs`: whether it reads `context.pair_BxNxT`.

The config of a memory is a field of `ModelConfig` with `places(layers)`, see `config.memory.Place`.

B batch, T segment length, D model width.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.memory import BETWEEN_BLOCKS, Place
from ngrammer_jax.layers.context import Context
from ngrammer_jax.models import ngrams

States = dict[str, Any]

# For each field of `ModelConfig`: the name of the parameters, and a function that makes the module
# from the config of the model, the place, the vocabulary size, and arguments of Linen.
MEMORIES = {'ngram': ('ngrammer', ngrams.make)}


@dataclasses.dataclass(frozen=True)
class PlacedMemory:
  """A memory at one of its places.

  Attributes:
    name: name of its parameters.
    place: its place in the model.
    make: makes its module, with the arguments `name` and `parent` of Linen.
  """

  name: str
  place: Place
  make: Callable[..., nn.Module]

  @property
  def is_between_blocks(self) -> bool:
    """Whether the model applies it, rather than a block."""
    return self.place.point in BETWEEN_BLOCKS


def all_memories(
  config: model_config.ModelConfig, vocabulary_size: int | None = None
) -> list[PlacedMemory]:
  """Returns the memories of a model, at each place in the order of their application."""
  memories = []
  for field, (name, make) in MEMORIES.items():
    memory_config = getattr(config, field)
    for place in () if memory_config is None else memory_config.places(config.layers):
      make_module = functools.partial(make, config, place, vocabulary_size)
      memories.append(PlacedMemory(name, place, make_module))
  return memories


def between_blocks(config: model_config.ModelConfig, *args: Any) -> list[PlacedMemory]:
  """Returns the memories that the model applies between blocks."""
  return [memory for memory in all_memories(config, *args) if memory.is_between_blocks]


def in_block(config: model_config.ModelConfig, number: int) -> list[PlacedMemory]:
  """Returns the memories in a block."""
  memories = [memory for memory in all_memories(config) if not memory.is_between_blocks]
  return [memory for memory in memories if memory.place.block == number]


def empty(memories: Iterable[PlacedMemory], batch: int, slots: int | None = None) -> States:
  """Returns the states of memories before the first segment."""
  modules = [memory.make(parent=None) for memory in memories]
  states = {module.state_name: module.empty_state(batch, slots) for module in modules}
  return {name: state for name, state in states.items() if state is not None}


def apply(
  module: nn.Module, x_BxTxD: jax.Array, context: Context, states: States
) -> tuple[jax.Array, States]:
  """Returns the output of a memory [B, T, D], and its next state by name."""
  y_BxTxD, state = module(x_BxTxD, context, states.get(module.state_name))
  return y_BxTxD, {} if state is None else {module.state_name: state}
