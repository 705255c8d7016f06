"""Tables in the memory of the host: NumPy arrays, of which a device sees the rows of a segment.

The rows of a segment depend on its token ids and on those before it, not on anything that the model
computes. A `RowFinder` computes their numbers on the processor, by the modules of the model, while
the devices still work on the segment before; `take` and `put` read and write them.

B batch, T segment length, D model width, P tokens whose rows are read, I heads of all orders, E
width of a row, V rows of a table, L rows that are read or written.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
import functools
import os
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, sharding
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.layers.state import Memory, State
from ngrammer_jax.models import memories, parameter_groups, table_drawing
from ngrammer_jax.models.memories import PlacedMemory

Path = tuple[str, ...]  # of the variables of a memory
PIECE_ROWS = 2**14  # that a thread reads or writes at a time


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
  return ['/'.join((*placed.path, 'table')) for placed, _ in _memories(config)]


def modules(config: ModelConfig, vocabulary_size: int | None) -> dict[str, NGramMemory]:
  """Returns the module of each table in host memory, by the name of the parameter."""
  placed = _memories(config, vocabulary_size)
  return {'/'.join((*memory.path, 'table')): module for memory, module in placed}


def without_tables(config: ModelConfig, variables: Any) -> Any:
  """Returns the variables without those tables."""
  return variables | {'params': parameter_groups.without(variables['params'], names(config))}


def on_host(tree: Any) -> dict[str, Any]:
  """Returns the arrays of a tree that are in host memory, abstract or not, by name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {sharding.leaf_name(path): leaf for path, leaf in leaves if sharding.is_on_host(leaf)}


def split(tree: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
  """Returns a tree with None in place of some arrays, and these by name."""
  arrays = {}

  def remove(path, leaf):
    name = sharding.leaf_name(path)
    if name not in names:
      return leaf
    arrays[name] = leaf
    return None

  return jax.tree_util.tree_map_with_path(remove, tree), arrays


def join(tree: Any, arrays: Mapping[str, Any]) -> Any:
  """Returns a tree with arrays, by name, where it has None."""

  def insert(path, leaf):
    return arrays.get(sharding.leaf_name(path), leaf)

  return jax.tree_util.tree_map_with_path(insert, tree, is_leaf=lambda leaf: leaf is None)


def with_one_row(config: ModelConfig, variables: Any) -> Any:
  """Returns variables whose tables in host memory have one row of zeros, with their axis names."""
  params = traverse_util.flatten_dict(variables['params'], sep='/')
  for name in names(config):

    def first_row(array):
      return jnp.zeros((1, *array.shape[1:]), array.dtype)

    params[name] = jax.tree.map(first_row, params[name])
  return variables | {'params': traverse_util.unflatten_dict(params, sep='/')}


def create(
  model: Any, one_row: Any, abstract: Any, keys: Any, replaced: Collection[str] = ()
) -> Any:
  """Returns a train state whose arrays in host memory are made there, from one with a row of each.

  Args:
    model: the language model.
    one_row: the state of `with_one_row`, on the devices.
    abstract: shapes and dtypes of the state.
    keys: the collection `table.KEYS` of the initial variables.
    replaced: names of parameters that another run replaces: they are 0.
  """
  shapes = on_host(abstract)
  keys = traverse_util.flatten_dict(keys, sep='/')
  tables = {f'params/{name}': name for name in names(model.config)}
  by_name = modules(model.config, model.vocabulary_size)

  def make(path, leaf):
    name = sharding.leaf_name(path)
    if name not in shapes:
      return leaf
    shape = shapes[name]
    parameter = tables.get(name)
    if parameter is not None and parameter not in replaced:
      key = np.asarray(keys[parameter])
      return table_drawing.draw(by_name[parameter], key, shape.dtype, processor())
    array = np.empty(shape.shape, shape.dtype)
    array[:] = np.asarray(leaf)
    return array

  return jax.tree_util.tree_map_with_path(make, one_row)


def empty_state(config: ModelConfig, batch: int) -> State:
  """Returns what a `RowFinder` needs to know of the segments before the first one.

  Keys: `document` int32 [B], document number of the last token; `memories`, the state of each
  memory by path.
  """
  states = {placed.path: module.empty_state(batch) for placed, module in _memories(config)}
  return {'document': jnp.zeros((batch,), jnp.int32), 'memories': states}


def state_of(config: ModelConfig, memory: Memory) -> State:
  """Returns the same of the segments that a memory of the model has seen."""
  states = {}
  for placed, _ in _memories(config):
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
    paths = [placed.path for placed, _ in _memories(model.config)]
    needed = {path: _subtree(codebook, path) for path in paths}
    self._codebooks, self.state = jax.device_put(jax.device_get((needed, state)), processor())
    self._find = _jitted_find(model)

  def __call__(self, segment: token_batch.Batch) -> dict[str, np.ndarray]:
    """Returns the rows, int32 [B, P, I], by the name of the table; advances the state.

    Args:
      segment: `tokens_BxT`, `starts_BxT` and `valid_BxT` as NumPy arrays.
    """
    arrays = segment.tokens_BxT, segment.starts_BxT, segment.valid_BxT
    arrays = jax.device_put(arrays, processor())
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
  valid_BxT: jax.Array,
  state: State,
) -> tuple[dict[str, jax.Array], State]:
  """Returns the rows of all tables in host memory by name, and the next state.

  Args:
    model: the language model.
    codebooks: the codebook of each memory by path.
    tokens_BxT, starts_BxT, valid_BxT: of the segment.
    state: that of the segment before.
  """
  documents_BxT = document_masks.numbers(starts_BxT, state['document'])
  context = Context(
    tokens_BxT=tokens_BxT,
    starts_BxT=starts_BxT,
    documents_BxT=documents_BxT,
    valid_BxT=valid_BxT,
  )
  found = {}
  states = {}
  for placed, module in _memories(model.config, model.vocabulary_size):
    variables = {'codebook': codebooks[placed.path]}
    before = state['memories'][placed.path]
    x_BxTxD = jnp.zeros((*tokens_BxT.shape, module.width))  # only ids count
    (_, after), recorded = module.apply(variables, x_BxTxD, context, before, mutable=[table.ROWS])
    (rows_BxPxI,) = recorded[table.ROWS]['table']
    found['/'.join((*placed.path, 'table'))] = rows_BxPxI
    states[placed.path] = before
    if before and after:
      states[placed.path] = before | after
  document_B = document_masks.last_number(starts_BxT, valid_BxT, state['document'])
  return found, {'document': document_B, 'memories': states}


def abstract_rows(
  model: Any, codebook: Any, state: State, shape: tuple[int, int]
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes [B, P, I] of the rows that a segment looks up, by the name of the table.

  Args:
    model: the language model.
    codebook, state: its codebook, and what is known of the segments before; they may be abstract.
    shape: B and T.
  """
  codebooks = {
    placed.path: _subtree(codebook, placed.path) for placed, _ in _memories(model.config)
  }
  dtypes = np.int32, bool, np.float32
  segment = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
  find = functools.partial(_find_rows, model)
  rows, _ = jax.eval_shape(find, codebooks, *segment, state)
  return rows


def _subtree(tree: Any, path: Path) -> Any:
  """Returns the variables at a path of a collection, empty if there are none."""
  for name in path:
    tree = tree.get(name, {})
  return tree


def _memories(
  config: ModelConfig, vocabulary_size: int | None = None
) -> Iterator[tuple[PlacedMemory, NGramMemory]]:
  """Yields every memory with a table in host memory, and its module."""
  for placed in memories.make(config, vocabulary_size).flatten():
    module = placed.make(parent=None)
    if isinstance(module, NGramMemory):
      if module.options.table_memory == 'host' and module.has_table:
        yield placed, module


class RowReader:
  """Gives a model the rows of tables in host memory for the segments of a batch of streams.

  Call it where no mesh is active, such as in a thread of its own.

  Args:
    model: the language model.
    mesh: device mesh.
    variables: `params`, with the tables as NumPy arrays, and `codebook`.
    rows: number of streams.
  """

  def __init__(self, model: Any, mesh: jax.sharding.Mesh, variables: Any, rows: int):
    self._model = model
    self._mesh = mesh
    self._rows = rows
    params = traverse_util.flatten_dict(variables['params'], sep='/')
    self._tables = {name: np.asarray(params[name]) for name in names(model.config)}
    self._codebook = variables.get('codebook', {})
    self._on_devices = without_tables(model.config, variables)
    self._finders: dict[int, RowFinder] = {}  # by the first row

  def __call__(self, parts: Mapping[int, token_batch.Batch]) -> Any:
    """Returns the variables of the model for the next segment, with `table.VALUES`.

    Args:
      parts: rows of the segment as NumPy arrays, by the number of the first row: all those that the
        devices of this process have.
    """
    found = {first: self._finder(first, part)(part) for first, part in parts.items()}
    return self._on_devices | {table.VALUES: self._values(found)}

  def peek(self, segments: Sequence[token_batch.Batch]) -> Any:
    """Returns `table.VALUES` of segments that might come next, stacked [K, ...].

    Args:
      segments: K segments of all rows.
    """
    (finder,) = self._finders.values()
    state = finder.state
    found = []
    for segment in segments:
      found.append(finder(segment))
      finder.state = state
    stacked = {name: np.stack([rows[name] for rows in found], axis=1) for name in found[0]}
    values = self._values({0: stacked})
    return jax.tree.map(lambda values_BxKx: jnp.swapaxes(values_BxKx, 0, 1), values)

  def _finder(self, first: int, part: token_batch.Batch) -> RowFinder:
    """Returns what finds the rows of a part of the batch."""
    if first not in self._finders:
      state = empty_state(self._model.config, len(part.tokens_BxT))
      self._finders[first] = RowFinder(self._model, self._codebook, state)
    return self._finders[first]

  def _values(self, found: Mapping[int, Mapping[str, np.ndarray]]) -> Any:
    """Returns the values of rows, by the first row of a part and by table, on the devices."""

    def load(rows: slice) -> dict[str, np.ndarray]:
      first = max(number for number in found if number <= rows.start)
      part = slice(rows.start - first, rows.stop - first)
      return {name: take(self._tables[name], each[part]) for name, each in found[first].items()}

    values = sharding.global_rows(self._mesh, self._rows, load)
    return traverse_util.unflatten_dict(values, sep='/')


def abstract_values(
  model: Any, codebook: Any, shape: tuple[int, int], row_sharding: jax.sharding.Sharding
) -> Any:
  """Returns `table.VALUES` of a segment, [B, T], without values."""
  state = jax.eval_shape(lambda: empty_state(model.config, shape[0]))
  by_name = modules(model.config, model.vocabulary_size)
  values = {}
  for name, rows in abstract_rows(model, codebook, state, shape).items():
    width = by_name[name].table_shape()[1]
    values[name] = jax.ShapeDtypeStruct(
      (*rows.shape, width), by_name[name].table_dtype, sharding=row_sharding
    )
  return traverse_util.unflatten_dict(values, sep='/')


def take(table_VxE: np.ndarray, rows_Lx: np.ndarray, count: int | None = None) -> np.ndarray:
  """Returns rows of a table, [L, ..., E], read by several threads.

  Args:
    table_VxE: the table.
    rows_Lx: numbers of its rows.
    count: rows of the result, of which those after the first L are 0. None: L.
  """
  rows_L = rows_Lx.reshape(-1)
  total = rows_L.size if count is None else count
  result_LxE = np.empty((total, *table_VxE.shape[1:]), table_VxE.dtype)
  result_LxE[rows_L.size :] = 0

  def read(piece: slice) -> None:
    # The row numbers are known to be inside: without a mode, NumPy would buffer the result.
    np.take(table_VxE, rows_L[piece], axis=0, out=result_LxE[piece], mode='clip')

  _in_pieces(read, rows_L.size)
  if count is not None:
    return result_LxE
  return result_LxE.reshape(*rows_Lx.shape, *table_VxE.shape[1:])


def put(table_VxE: np.ndarray, rows_L: np.ndarray, values_LxE: np.ndarray) -> None:
  """Writes different rows of a table, by several threads."""

  def write(piece: slice) -> None:
    table_VxE[rows_L[piece]] = values_LxE[piece]

  _in_pieces(write, rows_L.size)


def _in_pieces(function: Callable[[slice], None], size: int) -> None:
  """Calls a function with slices of so many rows, in several threads if there are many."""
  pieces = [slice(first, min(first + PIECE_ROWS, size)) for first in range(0, size, PIECE_ROWS)]
  if len(pieces) < 2:
    for piece in pieces:
      function(piece)
  else:
    list(_threads().map(function, pieces))


@functools.cache
def _threads() -> futures.ThreadPoolExecutor:
  return futures.ThreadPoolExecutor(os.cpu_count(), 'host_tables')
