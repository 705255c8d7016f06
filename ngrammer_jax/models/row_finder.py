"""The numbers of the rows that a segment looks up in tables in host memory.

They depend on the token ids of the segment and on those before it, not on anything that the model
computes. The modules of the model compute them on the processor, while the devices still work on
the segment before.

B batch, T segment length, D model width, P tokens whose rows are read, I heads of all orders.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram import host_rows
from ngrammer_jax.layers.state import Memory, State
from ngrammer_jax.models import host_tables

Path = tuple[str, ...]  # of the variables of a memory


def empty_state(config: ModelConfig, batch: int) -> State:
  """Returns the state of a `RowFinder` before the first segment.

  Keys: `document` int32 [B], document number of the last token; `memories`, the state of each
  memory by path.
  """
  states = {}
  for placed, module in host_tables.placed_memories(config):
    states[placed.path] = module.empty_state(batch)
  return {'document': jnp.zeros((batch,), jnp.int32), 'memories': states}


def state_of(config: ModelConfig, memory: Memory) -> State:
  """Returns the state of a `RowFinder` after the segments that a memory of the model has seen."""
  states = {}
  for placed, _ in host_tables.placed_memories(config):
    stored = memory
    if not placed.is_between_blocks:
      stored = memory['layers'][placed.place.block]
    states[placed.path] = stored.get(placed.state_key)
  return {'document': memory['document'], 'memories': states}


class RowFinder:
  """Finds the rows that the segments of a stream look up in tables in host memory.

  Args:
    model: the language model.
    codebook: its codebook.
    state: see `empty_state` and `state_of`.
  """

  def __init__(self, model: Any, codebook: Any, state: State):
    paths = [placed.path for placed, _ in host_tables.placed_memories(model.config)]
    needed = {path: _subtree(codebook, path) for path in paths}
    self._codebooks, self.state = jax.device_put(
      jax.device_get((needed, state)), host_tables.processor()
    )
    self._find = _jitted_find(model)

  def __call__(
    self, tokens_BxT: np.ndarray, starts_BxT: np.ndarray, valid_BxT: np.ndarray | None
  ) -> dict[str, np.ndarray]:
    """Returns the rows, int32 [B, P, I], by the name of the table; advances the state.

    Args:
      tokens_BxT, starts_BxT, valid_BxT: of the segment, see `Context`.
    """
    arrays = jax.device_put((tokens_BxT, starts_BxT, valid_BxT), host_tables.processor())
    rows, self.state = self._find(self._codebooks, *arrays, self.state)
    return {name: np.asarray(each) for name, each in rows.items()}


@functools.lru_cache(maxsize=8)
def _jitted_find(model: Any) -> Callable[..., Any]:
  """Returns the compiled `_find_rows` of a model; equal models share it."""
  return jax.jit(functools.partial(_find_rows, model))


def _find_rows(
  model: Any,
  codebooks: Mapping[Path, Any],
  tokens_BxT: jax.Array,
  starts_BxT: jax.Array,
  valid_BxT: jax.Array | None,
  state: State,
) -> tuple[dict[str, jax.Array], State]:
  """Returns the rows of all tables in host memory by name, and the next state.

  Args:
    model: the language model.
    codebooks: the codebook of each memory by path.
    tokens_BxT, starts_BxT, valid_BxT: of the segment.
    state: the state after the segment before.
  """
  documents_BxT = document_masks.numbers(starts_BxT, state['document'])
  context = Context(
    tokens_BxT=tokens_BxT,
    starts_BxT=starts_BxT,
    documents_BxT=documents_BxT,
    valid_BxT=valid_BxT,
  )
  rows = {}
  states = {}
  for placed, module in host_tables.placed_memories(model.config, model.vocabulary_size):
    variables = {'codebook': codebooks[placed.path]}
    before = state['memories'][placed.path]
    x_BxTxD = jnp.zeros((*tokens_BxT.shape, module.width))  # only ids count
    (_, after), recorded = module.apply(
      variables, x_BxTxD, context, before, mutable=[host_rows.ROWS]
    )
    (rows_BxPxI,) = recorded[host_rows.ROWS]['table']
    rows['/'.join((*placed.path, 'table'))] = rows_BxPxI
    states[placed.path] = before
    if before and after:
      states[placed.path] = before | after
  document_B = document_masks.last_number(starts_BxT, valid_BxT, state['document'])
  return rows, {'document': document_B, 'memories': states}


def abstract_rows(
  model: Any, codebook: Any, state: State, shape: tuple[int, int]
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes [B, P, I] of the rows that a segment looks up, by the name of the table.

  Args:
    model: the language model.
    codebook, state: its codebook, and the state after the segments before; they may be abstract.
    shape: B and T.
  """
  codebooks = {
    placed.path: _subtree(codebook, placed.path)
    for placed, _ in host_tables.placed_memories(model.config)
  }
  dtypes = np.int32, bool, np.float32
  segment = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
  find = functools.partial(_find_rows, model)
  rows, _ = jax.eval_shape(find, codebooks, *segment, state)
  return rows


def distinct(
  rows: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns the distinct rows of each table, ascending, and where each look-up finds its row there.

  Args:
    rows: row numbers, [B, P, I] by the name of the table.

  Returns:
    Both by the name of the table: int32 [at most B P I], and int32 [B, P, I].
  """
  distinct_rows = {}
  positions = {}
  for name, rows_BxPxI in rows.items():
    distinct_rows[name], inverse = np.unique(rows_BxPxI, return_inverse=True)
    positions[name] = inverse.reshape(rows_BxPxI.shape).astype(np.int32)
  return distinct_rows, positions


def _subtree(tree: Any, path: Path) -> Any:
  """Returns the variables at a path of a collection, empty if there are none."""
  for name in path:
    tree = tree.get(name, {})
  return tree
