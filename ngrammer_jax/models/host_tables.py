"""Tables of n-gram memories in the memory of the host: which parameters they are.

Devices see only the rows that a segment looks up. `models.row_finder` finds their numbers,
`training.table_pages` and `inference.row_reader` move the rows.
"""

from collections.abc import Iterator
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from ngrammer_jax import errors
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.models import memories, parameter_groups
from ngrammer_jax.models.memories import PlacedMemory


def exist(config: ModelConfig) -> bool:
  """Whether a model has tables in host memory."""
  return any(memory.table_memory == 'host' for memory in config.ngram_memories)


def check_processor(config: ModelConfig) -> None:
  """Raises BadInput if a table is in host memory and JAX may not use the processor."""
  for i, memory in enumerate(config.ngram_memories):
    if memory.table_memory != 'host':
      continue
    try:
      processor()
    except RuntimeError as error:
      key = f'model.ngram_memories.{i}.table_memory'
      platforms = jax.config.jax_platforms
      raise errors.BadInput(
        f'{key}="host" computes row numbers on the processor, which JAX_PLATFORMS={platforms} '
        f'excludes: use JAX_PLATFORMS={platforms},cpu, or {key}="device"'
      ) from error


def processor() -> jax.Device:
  """Returns the processor of this process as a device. Raises RuntimeError if JAX has none."""
  return jax.local_devices(backend='cpu')[0]


def names(config: ModelConfig) -> list[str]:
  """Returns the names of the parameters that are tables in host memory."""
  return ['/'.join((*placed.path, 'table')) for placed, _ in placed_memories(config)]


def modules(config: ModelConfig, vocabulary_size: int | None) -> dict[str, NGramMemory]:
  """Returns the module of each table in host memory, by the name of the parameter."""
  placed = placed_memories(config, vocabulary_size)
  return {'/'.join((*memory.path, 'table')): module for memory, module in placed}


def without_tables(config: ModelConfig, variables: Any) -> Any:
  """Returns the variables without those tables."""
  return variables | {'params': parameter_groups.without(variables['params'], names(config))}


def with_one_row(config: ModelConfig, variables: Any) -> Any:
  """Returns variables whose tables in host memory have one row of zeros, with their axis names."""
  params = traverse_util.flatten_dict(variables['params'], sep='/')
  for name in names(config):

    def first_row(array):
      return jnp.zeros((1, *array.shape[1:]), array.dtype)

    params[name] = jax.tree.map(first_row, params[name])
  return variables | {'params': traverse_util.unflatten_dict(params, sep='/')}


def placed_memories(
  config: ModelConfig, vocabulary_size: int | None = None
) -> Iterator[tuple[PlacedMemory, NGramMemory]]:
  """Yields every memory with a table in host memory, and its module."""
  for placed in memories.make(config, vocabulary_size).flatten():
    module = placed.make(parent=None)
    if isinstance(module, NGramMemory):
      if module.options.table_memory == 'host' and module.has_table:
        yield placed, module
