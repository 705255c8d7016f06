"""What of every array lies where, on eight devices."""

import logging
import types

from flax import linen as nn
import jax
import numpy as np
import pytest

from ngrammer_jax import sharding
from tests.checks import bad_input


def boxed(names, *shape):
  return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, np.float32), names)


def test_an_axis_is_spread_where_all_its_mesh_axes_divide_it(caplog):
  """Rows of a table go over `fsdp` and `model` together, or stay whole."""
  caplog.set_level(logging.INFO)
  names = ('ngram_vocab', 'ngram_embed')
  arrays = {
    'even': boxed(names, 8, 6),
    'odd': boxed(names, 6, 8),  # 2 and 2 divide it, 4 does not
    'kernel': boxed(('embed', 'mlp'), 6, 10),
    'scale': boxed(('embed',), 8),
    'plain': jax.ShapeDtypeStruct((8, 8), np.float32),
  }
  placed = sharding.shardings(arrays, sharding.make_mesh(2, 2, 2))
  # How an axis that stays whole is written does not matter.
  shards = {
    name: leaf_sharding.shard_shape(nn.unbox(arrays[name]).shape)
    for name, leaf_sharding in placed.items()
  }
  assert shards == {
    'even': (2, 6), 'odd': (6, 8), 'kernel': (3, 5), 'scale': (8,), 'plain': (8, 8),
  }  # fmt: skip
  assert (
    caplog.messages[-1]
    == 'odd: axis ngram_vocab of size 6 is not divisible by 4 devices, left unsharded'
  )


def test_arrays_with_the_axis_of_the_host_are_in_its_memory():
  names = {'device': 'ngram_embed', 'host': sharding.HOST_MEMORY_AXIS}
  arrays = {kind: boxed(('ngram_vocab', name), 8, 6) for kind, name in names.items()}
  placed = sharding.shardings(arrays, sharding.make_mesh(2, 2, 2))
  assert placed['host'].memory_kind == sharding.HOST_MEMORY_KIND
  assert placed['host'].is_fully_replicated
  assert placed['device'].memory_kind != sharding.HOST_MEMORY_KIND


def test_every_device_gets_its_rows_of_a_batch():
  batch = np.arange(16 * 3).reshape(16, 3)
  for axis, mesh in ((0, (2, 2, 2)), (1, (-1, 1, 1))):
    requests = []

    def make(rows, axis=axis, requests=requests):
      requests.append(rows)
      return np.moveaxis(batch[rows], 0, axis), None

    arrays_of_rows, nothing = sharding.global_rows(sharding.make_mesh(*mesh), 16, make, axis)
    np.testing.assert_array_equal(np.asarray(arrays_of_rows), np.moveaxis(batch, 0, axis))
    assert nothing is None
    shards = 4 if axis == 0 else 8
    assert requests == [slice(0, 16)]  # at once, for all devices of the host
    for shard in arrays_of_rows.addressable_shards:
      assert shard.data.shape[axis] == 16 // shards


def test_a_host_whose_devices_have_rows_apart_makes_no_others(monkeypatch):
  shards, requests = [slice(8, 10), slice(2, 4), slice(4, 6), slice(8, 10)], []
  indices = {device: (rows,) for device, rows in enumerate(shards)}
  fake = types.SimpleNamespace(addressable_devices_indices_map=lambda shape: indices)
  monkeypatch.setattr(sharding, 'rows_sharding', lambda mesh, axis: fake)
  collect = lambda shape, fake, shard: [shard(index).tolist() for index in indices.values()]
  monkeypatch.setattr(jax, 'make_array_from_callback', collect)
  made = sharding.global_rows(None, 16, lambda rows: requests.append(rows) or np.arange(16)[rows])
  assert made == [[8, 9], [2, 3], [4, 5], [8, 9]] and requests == [slice(2, 6), slice(8, 10)]


@pytest.mark.parametrize(
  'error',
  [
    RuntimeError("Backend 'bogus' is not in the list of known backends: ['cpu', 'tpu']"),
    AssertionError(),  # of cuda without its plugin
    RuntimeError("Unable to initialize backend 'tpu': NOT_FOUND: No jellyfish device found."),
    RuntimeError("Unable to initialize backend 'cuda': INTERNAL: CUDA_ERROR_NO_DEVICE"),
  ],
)
def test_an_unknown_platform_is_named(monkeypatch, error):
  def fails():
    raise error

  monkeypatch.setattr(jax, 'devices', fails)
  with bad_input(
    f'JAX_PLATFORMS={jax.config.jax_platforms}: JAX has no such platform here; unset it, or '
    f'install the plugin of the platform where its devices are'
  ):
    sharding.make_mesh()


def test_a_device_in_use_is_no_bad_input(monkeypatch):
  """Another try may help."""

  def fails():
    raise RuntimeError('The TPU is already in use by process with pid 3')

  monkeypatch.setattr(jax, 'devices', fails)
  with pytest.raises(RuntimeError, match='already in use'):
    sharding.make_mesh()
