"""A checksum sees every bit of an array and the place of every element, not where they lie."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import host_arrays
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.system import hosts

VALUES = {
  'float32': [0.0, 1.0, -1.0, 3e-39, np.nan, np.inf],
  'float64': [0.0, 1.0, -1.0, 5e-324, np.nan, np.inf],
  'bfloat16': [0.0, 1.0, -1.0, 0.375, np.nan, np.inf],
  'int32': [0, 1, -1, 2**31 - 1, -(2**31), 7],
  'uint8': [0, 1, 255, 128, 7, 64],
  'bool': [False, True, True, False, True, False],
}


@pytest.fixture(params=VALUES)
def array(request, monkeypatch):
  """Six elements of every dtype that a train state may hold, in two chunks."""
  monkeypatch.setattr(checksums, 'CHUNK', 4)
  with jax.enable_x64(request.param == 'float64'):
    yield np.asarray(jnp.asarray(VALUES[request.param], request.param))


def test_the_size_of_chunks_does_not_count(monkeypatch):
  array = np.random.default_rng(0).normal(size=(2, 150_001)).astype(np.float32)
  sums = set()
  for size in (2**10, 2**14, 2**18):
    monkeypatch.setattr(checksums, 'CHUNK', size)
    sums.add(checksum(array))
  assert len(sums) == 1


def checksum(array):
  (value,) = checksums.checksums({'x': array}).values()
  return value


def flipped(array, element, bit):
  changed = array.copy()
  changed.view(np.uint8).reshape(array.size, -1)[element, bit // 8] ^= 1 << bit % 8
  return changed


@pytest.mark.full
def test_every_bit_counts(array):
  bits = 1 if array.dtype == bool else 8 * array.itemsize  # of a bool, only the last is one
  places = list(itertools.product(range(array.size), range(bits)))
  all_checksums = {checksum(jnp.asarray(flipped(array, *place))) for place in places}
  assert len(all_checksums | {checksum(jnp.asarray(array))}) == len(places) + 1


def test_every_place_counts(array):
  before = checksum(jnp.asarray(array))
  words = array.view(f'uint{8 * array.itemsize}')
  for i, j in itertools.combinations(range(array.size), 2):
    swapped = array.copy()
    swapped[[i, j]] = array[[j, i]]
    assert (checksum(jnp.asarray(swapped)) != before) == (words[i] != words[j]), (i, j)


@pytest.mark.full
@pytest.mark.parametrize('dtype', ['float32', 'bool'])
@pytest.mark.parametrize('sizes', [(8, 1), (2, 4)])
def test_no_sharding_changes_it(sizes, dtype):
  array = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)).round(), dtype)
  mesh = jax.make_mesh(sizes, ('x', 'y'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  for rows, columns in itertools.product([None, 'x', 'y', ('x', 'y')], repeat=2):
    if rows is None or columns is None or {rows, columns} == {'x', 'y'}:
      place = jax.NamedSharding(mesh, jax.P(rows, columns))
      assert checksum(jax.device_put(array, place)) == checksum(np.asarray(array)), place


def test_scalars_and_empty_arrays_have_one():
  assert len({checksum(jnp.int32(step)) for step in range(100)}) == 100
  assert checksum(jnp.zeros((0, 3))) == '0' * 16


def slowly(words):
  """The checksum in Python integers; checkpoints that are already on disk rely on it."""
  sums = []
  for multiplier in checksums.MULTIPLIERS:
    total = 0
    for index, word in enumerate(words, 1):
      place = index * multiplier % 2**32
      mixed = word ^ (place ^ place >> 15) * 0xC2B2AE3D % 2**32
      mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
      mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
      total += mixed ^ mixed >> 16
    sums.append(total % 2**32)
  return '{:08x}{:08x}'.format(*sums)


def test_the_checksum_is_that_of_python_integers(array):
  words = array.view(f'uint{8 * min(array.itemsize, 4)}').tolist()
  assert checksum(jnp.asarray(array)) == checksum(jnp.asarray(array.reshape(2, 3))) == slowly(words)
  assert slowly(range(6)) == 'd58da6f7e9e959f0'


def test_every_leaf_has_a_name():
  tree = {'params': {'kernel': jnp.ones(3)}, 'memory': (jnp.zeros(2), jnp.zeros(2))}
  assert list(checksums.checksums(tree)) == ['memory/0', 'memory/1', 'params/kernel']


@pytest.mark.full
def test_on_the_device_as_on_the_host(monkeypatch):
  """Two ways to the same sums: an accelerator computes its own, a host needs few programs."""
  shapes = [(), (0, 3), (7,), (3, 5, 2)]
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    draw = lambda shape, dtype: np.asarray(jnp.asarray(rng.integers(-100, 100, shape), dtype))
    arrays = [draw(shape, dtype) for dtype in VALUES for shape in shapes]
    arrays += [draw((2, 150_001), dtype) for dtype in ('float32', 'float64')]
    on_host = checksums.checksums(arrays)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'an accelerator')
    monkeypatch.setattr(checksums, '_sum_on_host', None)
    on_device = checksums.checksums([jnp.asarray(array) for array in arrays])
    for name, array in enumerate(arrays):
      assert on_device[str(name)] == on_host[str(name)], (array.dtype, array.shape)


def test_rows_of_several_processes_have_the_checksum_of_the_whole_array(array, monkeypatch):
  """Each adds the words of its rows."""
  whole = np.tile(array, (7, 1))
  sums = []

  def add(own):
    sums.append(own)
    return [own]

  monkeypatch.setattr(hosts, 'all_gather', add)
  for index in range(3):
    monkeypatch.setitem(hosts._process, 'index', index)
    monkeypatch.setitem(hosts._process, 'count', 3)
    rows = whole[host_arrays.rows_of_process(7)]
    checksums.checksums({'table': host_arrays.ProcessRows(whole.shape, rows)})
  total = np.array(sums, np.uint32).sum(axis=0, dtype=np.uint32)
  monkeypatch.setitem(hosts._process, 'count', 1)
  assert checksums.checksums({'table': whole})['table'] == '{:08x}{:08x}'.format(*total)
