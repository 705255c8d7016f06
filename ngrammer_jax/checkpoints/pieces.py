"""Writes and reads large NumPy arrays in pieces, so that a checkpoint needs little more memory.

Orbax copies a NumPy array before it writes it, and keeps all of its compressed chunks in memory
until the last one is on the disk. Here, a piece of rows is on the disk before the next one is
compressed. The files are those of Orbax: either way can read what the other has written.
"""

import asyncio
from collections.abc import Iterator, Sequence
import math
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from ngrammer_jax import host_arrays
from ngrammer_jax.system import hosts

PIECE_BYTES = 2**26  # that are written or read at a time
CHUNK_COLUMNS = 2**8  # of a chunk, which is compressed and read as a whole


class Handler(ocp.type_handlers.NumpyHandler):
  """Saves NumPy arrays without a copy: they must not change until Orbax has finished.

  Of `ProcessRows`, each process writes and reads its own rows; of other arrays, the first process
  writes all.
  """

  async def serialize(
    self,
    values: Sequence[np.ndarray | host_arrays.ProcessRows],
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.SaveArgs] | None = None,
  ) -> Sequence[ocp.future.Future]:
    """Starts to write arrays."""
    return [
      ocp.future.CommitFutureAwaitingContractedSignals(
        self._write_all(values, infos), name='host_arrays'
      )
    ]

  async def _write_all(
    self,
    values: Sequence[np.ndarray | host_arrays.ProcessRows],
    infos: Sequence[ocp.type_handlers.ParamInfo],
  ) -> None:
    for leaf, info in zip(values, infos, strict=True):
      await info.await_path_creation()
      if isinstance(leaf, host_arrays.ProcessRows) or hosts.is_primary():
        await _write(leaf, info)

  async def deserialize(
    self,
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.RestoreArgs] | None = None,
  ) -> Sequence[np.ndarray | host_arrays.ProcessRows]:
    """Reads arrays; only small ones at the same time."""
    args = args or [ocp.RestoreArgs()] * len(infos)
    one_large_array = asyncio.Lock()
    reads = [_read(info, arg, one_large_array) for info, arg in zip(infos, args, strict=True)]
    return await asyncio.gather(*reads)


def registry() -> ocp.type_handlers.TypeHandlerRegistry:
  """Returns the type handlers of Orbax, with `Handler` for NumPy arrays."""
  handlers = [(kind, ocp.type_handlers.get_type_handler(kind)) for kind in (int, float, jax.Array)]
  own = Handler()
  return ocp.type_handlers.create_type_handler_registry(
    (np.ndarray, own), (host_arrays.ProcessRows, own), *handlers
  )


async def _write(
  leaf: np.ndarray | host_arrays.ProcessRows, info: ocp.type_handlers.ParamInfo
) -> None:
  """Writes the rows of an array that this process has, piece by piece."""
  first, array = host_arrays.rows_here(leaf)
  spec = ocp.type_handlers.get_json_tspec_write(
    info,
    use_ocdbt=info.is_ocdbt_checkpoint,
    global_shape=leaf.shape,
    local_shape=leaf.shape,
    dtype=leaf.dtype,
    process_index=jax.process_index(),
  )
  spec['metadata']['chunks'] = list(_chunk_shape(leaf.shape))
  store = await tensorstore.open(
    tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
  )
  own_rows = store
  if array.ndim:
    own_rows = store[first : first + len(array)].translate_to[0]
  for piece in _pieces(array.shape, array.dtype, host_arrays.CHUNK_ROWS):
    await own_rows[piece].write(array[piece], can_reference_source_data_indefinitely=True)


async def _read(
  info: ocp.type_handlers.ParamInfo, arg: ocp.RestoreArgs, one_large_array: asyncio.Lock
) -> np.ndarray | host_arrays.ProcessRows:
  """Returns an array, which is read piece by piece if it is large."""
  await info.await_path_creation()
  spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
  store = await tensorstore.open(tensorstore.Spec(spec), open=True, context=info.ts_context)
  dtype = arg.dtype or store.dtype.numpy_dtype
  if arg.restore_type is host_arrays.ProcessRows:
    rows = host_arrays.rows_of_process(store.shape[0])
    array = await _read_array(store[rows].translate_to[0], dtype, one_large_array)
    return host_arrays.ProcessRows(store.shape, array)
  return await _read_array(store, dtype, one_large_array)


async def _read_array(
  store: tensorstore.TensorStore, dtype: Any, one_large_array: asyncio.Lock
) -> np.ndarray:
  """Returns the values of a store."""
  if math.prod(store.shape) * np.dtype(dtype).itemsize <= PIECE_BYTES:
    values = await store.read()
    return values.astype(dtype, copy=False)
  async with one_large_array:
    array = np.empty(store.shape, dtype)
    for piece in _pieces(store.shape, dtype, store.chunk_layout.read_chunk.shape[0]):
      array[piece] = await store[piece].read()
  return array


def _chunk_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of the chunks of an array."""
  if not shape:
    return ()
  V, *rest = shape
  rows = min(host_arrays.CHUNK_ROWS, host_arrays.rows_per_process(V))
  return rows, *(min(size, CHUNK_COLUMNS) for size in rest)


def _pieces(shape: tuple[int, ...], dtype: Any, chunk_rows: int) -> Iterator[Any]:
  """Yields slices of the rows of an array, of whole chunks and about PIECE_BYTES."""
  if not shape:
    yield ...
    return
  rows, *rest = shape
  row_bytes = max(1, math.prod(rest)) * np.dtype(dtype).itemsize
  count = max(1, PIECE_BYTES // (chunk_rows * row_bytes)) * chunk_rows
  for first in range(0, rows, count):
    yield slice(first, min(first + count, rows))
