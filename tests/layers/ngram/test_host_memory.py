"""Rows of arrays in host memory are read and written as NumPy does."""

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.layers.ngram import host_memory, table
from tests.checks import mesh_of
from tests.loops import each

V, E = 8, 3
ON_HOST = jax.P(None)


def on_host(array):
  place = jax.sharding.NamedSharding(mesh_of(1), ON_HOST, memory_kind=sharding.HOST_MEMORY_KIND)
  return jax.device_put(array, place)


def test_rows_are_taken_and_those_outside_are_zeros():
  array = np.random.default_rng(0).normal(size=(V, E)).astype(np.float32)
  rows = np.array([[3, V], [0, 7]], np.int32)
  values = jax.jit(table.take)(on_host(array), rows)
  assert values.sharding.memory_kind == 'device'
  expected = np.concatenate([array, np.zeros((1, E))])[rows]
  np.testing.assert_array_equal(values, expected)


@each('rows', [(5, 2, V, V), (V, 5, V, 2), (0, V, V, V), (V, V, V, V), (4, 0, 7, 1)])
def test_rows_are_put_and_unused_entries_change_nothing(rows):
  array = np.random.default_rng(0).normal(size=(V, E)).astype(np.float32)
  values = np.random.default_rng(1).normal(size=(4, E))
  place = on_host(array).sharding
  put = jax.jit(host_memory.put, out_shardings=place, donate_argnums=0)
  result = put(on_host(array), np.array(rows, np.int32), values)
  for row, value in zip(rows, values, strict=True):
    if row < V:
      array[row] = value
  np.testing.assert_array_equal(result, array)
  assert result.sharding.memory_kind == 'pinned_host'


def test_traced_arrays_know_their_memory():
  seen = []
  is_seen = lambda array: seen.append(host_memory.contains(array)) or 0
  jax.jit(is_seen)(on_host(np.zeros(2)))
  jax.jit(is_seen)(jnp.zeros(2))
  assert seen == [True, False]
