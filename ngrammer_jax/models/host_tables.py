"""Looks up the rows of tables in host memory in a program of its own, ahead of the model.

The rows of a segment depend on its token ids and on those before it, not on anything that the model
computes: they can be on their way while the model still works on the segment before.

B batch, T segment length, D model width, I heads of all orders, E width of a row.
"""

from collections.abc import Iterator
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from ngrammer_jax import sharding
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.state import State
from ngrammer_jax.models import memories, parameter_groups

Path = tuple[str, ...]  # of the variables of a memory


def exist(config: ModelConfig) -> bool:
  """Whether a model has tables in host memory."""
  return any(memory.table_memory == 'host' for memory in config.ngram_memories)


def check_mesh(config: ModelConfig, mesh: jax.sharding.Mesh) -> None:
  """Raises BadInput if a table is in host memory, which the devices of a mesh cannot use."""
  for i, memory in enumerate(config.ngram_memories):
    if memory.table_memory == 'host':
      sharding.check_host_memory(f'model.ngram_memories.{i}.table_memory', mesh)


def without_tables(config: ModelConfig, variables: Any) -> Any:
  """Returns the variables without those tables."""
  names = ['/'.join((*path, 'table')) for path, _ in _memories(config)]
  return variables | {'params': parameter_groups.without(variables['params'], names)}


def empty_state(config: ModelConfig, batch: int) -> State:
  """Returns what `look_up` needs to know of the segments before the first one.

  Keys: `document` int32 [B], document number of the last token; `memories`, the state of each
  memory by path.
  """
  states = {path: memory.empty_state(batch) for path, memory in _memories(config)}
  return {'document': jnp.zeros((batch,), jnp.int32), 'memories': states}


def look_up(model: Any, variables: Any, segment: Any, state: State) -> tuple[Any, State]:
  """Returns the rows of all tables in host memory, and the next state.

  The rows are the collection `table.VALUES`, with which the model does not read these tables.

  Args:
    model: the language model.
    variables: `params` and `codebook`.
    segment: with `tokens_BxT`, `starts_BxT` and `valid_BxT`.
    state: that of the segment before, or `empty_state`.
  """
  documents_BxT = document_masks.numbers(segment.starts_BxT, state['document'])
  context = Context(
    tokens_BxT=segment.tokens_BxT,
    starts_BxT=segment.starts_BxT,
    documents_BxT=documents_BxT,
    valid_BxT=segment.valid_BxT,
  )
  values = {}
  states = {}
  for path, memory in _memories(model.config, model.vocabulary_size):
    memory_variables = {name: _subtree(tree, path) for name, tree in variables.items()}
    before = state['memories'][path]
    x_BxTxD = jnp.zeros((*segment.tokens_BxT.shape, memory.width))  # only ids count
    (_, after), recorded = memory.apply(
      memory_variables, x_BxTxD, context, before, mutable=[table.VALUES]
    )
    (rows_BxTxIxE,) = recorded[table.VALUES]['table']
    values[*path, 'table'] = rows_BxTxIxE
    states[path] = before
    if before and after:
      states[path] = before | after
  document_B = document_masks.last_number(segment.starts_BxT, segment.valid_BxT, state['document'])
  next_state = {'document': document_B, 'memories': states}
  return traverse_util.unflatten_dict(values), next_state


def _subtree(tree: Any, path: Path) -> Any:
  """Returns the variables at a path of a collection, empty if there are none."""
  for name in path:
    tree = tree.get(name, {})
  return tree


def _memories(
  config: ModelConfig, vocabulary_size: int | None = None
) -> Iterator[tuple[Path, NGramMemory]]:
  """Yields the path and the module of every memory with a table in host memory."""
  for path, memory in memories.ngram_modules(config, vocabulary_size):
    if memory.options.table_memory == 'host' and memory.has_table:
      yield path, memory
