"""Looks up the rows of tables in host memory in a program of its own, ahead of the model.

The rows of a segment depend on its token ids and on those before it, not on anything that the model
computes: they can be on their way while the model still works on the segment before.

B batch, T segment length, D model width.
"""

import functools
from typing import Any

from flax import traverse_util
import jax.numpy as jnp

from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.layers.state import State
from ngrammer_jax.models import memories, parameter_groups

Path = tuple[str, ...]  # of the variables of a memory


def exist(config: ModelConfig) -> bool:
  """Whether a model has tables in host memory."""
  return any(memory.table_memory == 'host' for memory in config.ngram_memories)


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
  config, V = model.config, model.vocabulary_size
  documents_BxT = document_masks.numbers(segment.starts_BxT, state['document'])
  context = Context(
    tokens_BxT=segment.tokens_BxT,
    starts_BxT=segment.starts_BxT,
    documents_BxT=documents_BxT,
    valid_BxT=segment.valid_BxT,
  )
  values, states = {}, {}
  for path, memory in _memories(config, V):
    in_memory = lambda tree, path=path: functools.reduce(lambda t, k: t.get(k, {}), path, tree)
    own = {name: in_memory(collection) for name, collection in variables.items()}
    before = state['memories'][path]
    x_BxTxD = jnp.zeros((*segment.tokens_BxT.shape, memory.width))  # only ids count
    (_, after), recorded = memory.apply(own, x_BxTxD, context, before, mutable=[table.VALUES])
    (values[(*path, 'table')],) = recorded[table.VALUES]['table']
    states[path] = before and before | (after or {})
  starts_BxT, valid_BxT = segment.starts_BxT, segment.valid_BxT
  counted_BxT = starts_BxT if valid_BxT is None else starts_BxT & (valid_BxT > 0)
  document_B = document_masks.numbers(counted_BxT, state['document'])[:, -1]
  next_state = {'document': document_B, 'memories': states}
  return traverse_util.unflatten_dict(values), next_state


def _memories(config, vocabulary_size=None):
  """Yields the path and the module of every memory with a table in host memory."""
  for path, memory in memories.ngram_modules(config, vocabulary_size):
    if memory.options.table_memory == 'host':
      yield path, memory
