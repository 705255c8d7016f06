"""Large tables, copied to and from their shards a range of rows at a time.

Host memory then needs little more than the table itself.
"""

from collections.abc import Callable, Iterable, Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.interop import row_files

Blocks = Iterable[tuple[int, np.ndarray]]  # first row of each block, and its rows


def fill(
  read: Callable[[int, int], np.ndarray],
  shape: Sequence[int],
  dtype: np.dtype,
  sharding: jax.sharding.Sharding | None,
) -> jax.Array:
  """Returns a table with rows from `read(start, stop)`.

  Each process reads only the rows of its own devices.

  Args:
    read: returns a range of rows of the table.
    shape: the shape of the table.
    dtype: its dtype.
    sharding: its sharding. None: on the first device.
  """
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shards = []
  for device, (row_slice, columns) in sharding.addressable_devices_indices_map(shape).items():
    start, stop, _ = row_slice.indices(shape[0])
    width = len(range(*columns.indices(shape[1])))
    ranges = row_files.blocks(start, stop, shape[1] * dtype.itemsize)
    blocks = ((low - start, read(low, high)[:, columns]) for low, high in ranges)
    fill_shard = _fill_on_host
    if _is_device_memory(sharding, device):
      fill_shard = _fill_on_device
    device_sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    shards.append(fill_shard(blocks, (stop - start, width), dtype, device_sharding))
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def rows(table: jax.Array | np.ndarray, start: int, stop: int) -> np.ndarray:
  """Returns rows of a possibly sharded table; copies no other rows from its devices."""
  if isinstance(table, np.ndarray):
    return table[start:stop]
  values = np.empty((stop - start, table.shape[1]), table.dtype)
  for shard in table.addressable_shards:
    row_slice, columns = shard.index
    first, last, _ = row_slice.indices(len(table))
    low = max(start, first)
    high = min(stop, last)
    if shard.replica_id == 0 and low < high:  # a replica would only be read twice
      if _is_device_memory(shard.data.sharding, shard.device):
        block = jax.lax.dynamic_slice_in_dim(shard.data, low - first, high - low)
      else:
        block = np.asarray(shard.data)[low - first : high - first]
      values[low - start : high - start, columns] = block
  return values


def _fill_on_device(
  blocks: Blocks,
  shape: tuple[int, int],
  dtype: np.dtype,
  device_sharding: jax.sharding.SingleDeviceSharding,
) -> jax.Array:
  """Returns an array of the blocks, written one by one."""
  values = jnp.zeros(shape, dtype, device=device_sharding)
  for first, block in blocks:
    values = _update_rows(values, block, first).block_until_ready()  # or blocks would queue up
  return values


def _fill_on_host(
  blocks: Blocks,
  shape: tuple[int, int],
  dtype: np.dtype,
  device_sharding: jax.sharding.SingleDeviceSharding,
) -> jax.Array:
  """Returns an array of the blocks in host memory, not writable by computations."""
  values = np.empty(shape, dtype)
  for first, block in blocks:
    values[first : first + len(block)] = block
  return jax.device_put(values, device_sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _update_rows(values: jax.Array, block: jax.Array, first: jax.Array) -> jax.Array:
  """Returns the values with other rows, in the same memory."""
  return jax.lax.dynamic_update_slice_in_dim(values, block, first, 0)


def _is_device_memory(sharding: jax.sharding.Sharding, device: jax.Device) -> bool:
  """Returns whether arrays of this sharding are in device memory."""
  return sharding.memory_kind in (None, device.default_memory().kind)
