"""NumPy arrays in host memory; threads read and write their rows.

With several processes, each holds a part of the rows of every array.

V rows of an array, L rows of a read or a write.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent import futures
import dataclasses
import functools
import math
import os
from typing import Any

import jax
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.system import hosts

PIECE_ROWS = 2**14  # that a thread reads or writes at a time
CHUNK_ROWS = 2**16  # of a chunk of a checkpoint: no two processes have rows of the same chunk


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessRows:
  """An array of which several processes have the rows; this one those of `rows_of_process`.

  Attributes:
    shape: shape of the whole array, [V, ...].
    rows: the rows of this process.
  """

  shape: tuple[int, ...]
  rows: np.ndarray

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the values."""
    return self.rows.dtype

  @property
  def size(self) -> int:
    """The number of values of the whole array."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """The bytes in this process."""
    return self.rows.nbytes


def rows_per_process(V: int) -> int:
  """Returns the number of rows of each process but the last ones, which may have fewer."""
  count = -(-V // hosts.process_count())
  if count > CHUNK_ROWS:
    count = -(-count // CHUNK_ROWS) * CHUNK_ROWS
  return count


def rows_of_process(V: int) -> slice:
  """Returns which of V rows this process has."""
  count = rows_per_process(V)
  first = min(V, count * hosts.process_index())
  return slice(first, min(V, first + count))


def from_rows(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | ProcessRows:
  """Returns an array of a shape, from the rows of this process; of one process, the rows."""
  if not hosts.is_multiprocess():
    return rows
  return ProcessRows(shape, rows)


def rows_here(leaf: np.ndarray | ProcessRows) -> tuple[int, np.ndarray]:
  """Returns the rows of an array that this process has, after the number of the first of them."""
  if isinstance(leaf, ProcessRows):
    return rows_of_process(leaf.shape[0]).start, leaf.rows
  return 0, leaf


def is_on_host(leaf: Any) -> bool:
  """Whether an array, concrete or abstract, is in the memory of the hosts."""
  if isinstance(leaf, np.ndarray | ProcessRows):
    return True
  return getattr(leaf.sharding, 'memory_kind', None) == sharding.HOST_MEMORY_KIND


def place_like(array: Any, like: Any) -> Any:
  """Returns an array where another one is, on its devices or in host memory, with its dtype.

  All processes have to call it, with the same arrays.
  """
  if not is_on_host(like):
    if isinstance(array, ProcessRows):
      array = _whole(array)
    return jax.device_put(array.astype(like.dtype), like.sharding)
  if isinstance(array, ProcessRows):
    return ProcessRows(array.shape, array.rows.astype(like.dtype))
  rows = _whole(array)[rows_of_process(len(array))]
  return from_rows(np.array(rows, like.dtype), array.shape)


def _whole(array: Any) -> Any:
  """Returns an array that this process can read whole."""
  if isinstance(array, ProcessRows):
    V, *rest = array.shape
    padded = np.zeros((rows_per_process(V), *rest), array.dtype)
    padded[: len(array.rows)] = array.rows
    return hosts.gather_arrays(padded)[:V]
  if isinstance(array, jax.Array) and not array.is_fully_replicated and hosts.is_multiprocess():
    return hosts.gather_arrays(array)
  return array


def by_name(tree: Any) -> dict[str, Any]:
  """Returns the arrays of a tree that are in host memory, abstract or not, by name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {sharding.leaf_name(path): leaf for path, leaf in leaves if is_on_host(leaf)}


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


def take(array_Vx: np.ndarray, rows_Lx: np.ndarray) -> np.ndarray:
  """Returns rows of an array, [L, ...], read by several threads."""
  rows_L = rows_Lx.reshape(-1)
  result_Lx = np.empty((rows_L.size, *array_Vx.shape[1:]), array_Vx.dtype)
  _take_into(result_Lx, array_Vx, rows_L)
  return result_Lx.reshape(*rows_Lx.shape, *array_Vx.shape[1:])


def take_here(leaf: np.ndarray | ProcessRows, rows: np.ndarray, count: int) -> np.ndarray:
  """Returns rows of an array, [count, ...]; those of other processes are 0, and all beyond.

  Args:
    leaf: the array.
    rows: numbers of rows of the whole array, ascending; at most `count`.
    count: number of rows of the result.
  """
  first, array = rows_here(leaf)
  here = _here(first, array, rows)
  result = np.zeros((count, *leaf.shape[1:]), leaf.dtype)
  _take_into(result[here], array, rows[here] - first)
  return result


def put_here(leaf: np.ndarray | ProcessRows, rows: np.ndarray, values: np.ndarray) -> None:
  """Writes the rows of an array that this process has.

  Args:
    leaf: the array.
    rows: numbers of different rows of the whole array, ascending.
    values: their new values, of all of them.
  """
  first, array = rows_here(leaf)
  here = _here(first, array, rows)
  put(array, rows[here] - first, values[here])


def _here(first: int, array: np.ndarray, rows: np.ndarray) -> slice:
  """Returns which ones of ascending row numbers are those of an array with a first row."""
  start, stop = np.searchsorted(rows, [first, first + len(array)])
  return slice(start, stop)


def _take_into(result_Lx: np.ndarray, array_Vx: np.ndarray, rows_L: np.ndarray) -> None:
  """Reads rows of an array into another one."""

  def read(piece: slice) -> None:
    # All row numbers are inside: without a mode, NumPy would buffer the result.
    np.take(array_Vx, rows_L[piece], axis=0, out=result_Lx[piece], mode='clip')

  _in_pieces(read, rows_L.size)


def put(array_Vx: np.ndarray, rows_L: np.ndarray, values_Lx: np.ndarray) -> None:
  """Writes different rows of an array, by several threads."""

  def write(piece: slice) -> None:
    array_Vx[rows_L[piece]] = values_Lx[piece]

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
  return futures.ThreadPoolExecutor(os.cpu_count(), 'host_arrays')
