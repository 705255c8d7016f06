"""Lookups in tables that are spread over devices: the same rows and gradients on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.analysis import hlo
from ngrammer_jax.layers import table

V, E, B = 64, 4, 16
MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 2, 1), (1, 2, 4)]


@pytest.fixture(scope='module')
def given():
  """A table, rows with repetitions, what the found is weighted with, and the gradient wanted."""
  random = np.random.default_rng(0)
  table_VxE = random.normal(size=(V, E)).astype(np.float32)
  rows = random.integers(0, V // 2, (B, 6, 2)).astype(np.int32)
  weights = random.normal(size=(B, 6, 2, E)).astype(np.float32)
  gradient = np.zeros((V, E))
  for place in np.ndindex(rows.shape):
    gradient[rows[place]] += weights[place]
  return table_VxE, rows, weights, gradient


def compiled(given, exchange='auto'):
  """The program of a lookup's gradient."""
  table_VxE, rows, weights, _ = given
  loss = lambda table_VxE, rows, weights: (table.lookup(table_VxE, rows, exchange) * weights).sum()
  return jax.jit(jax.grad(loss)).lower(table_VxE, rows, jnp.asarray(weights)).compile()


@pytest.mark.parametrize('exchange', table.EXCHANGE)
@pytest.mark.parametrize('shape', MESHES)
def test_rows_and_gradients_are_those_of_one_device(shape, exchange, given):
  table_VxE, rows, weights, gradient = given
  with sharding.use(sharding.make_mesh(*shape)):
    found = jax.jit(lambda *of: table.lookup(*of, exchange))(table_VxE, rows)
    got = compiled(given, exchange)(table_VxE, rows, weights)
  np.testing.assert_array_equal(found, table_VxE[rows])
  np.testing.assert_allclose(got, gradient, atol=2e-6)


@pytest.mark.parametrize('shape', MESHES)
def test_by_rows_no_array_as_large_as_the_table_is_sent(shape, given):
  """Its own part of the table is all that a device ever sums with others, and not even that."""
  mesh = sharding.make_mesh(*shape)
  with sharding.use(mesh):
    text = compiled(given, 'rows').as_text()
  kinds = {each.kind for each in hlo.Program(text, dict(mesh.shape)).collectives()}
  assert kinds == ({'all-gather'} if shape[0] * shape[1] > 1 else set())


def test_what_takes_less_time_is_exchanged():
  """Few rows of a large table are sent; of a small one its gradient is."""
  mesh = sharding.make_mesh(8, 1, 1)
  size = 8 * 1024 * table.ADDING // 64  # rows of a table as expensive as 1,024 rows of a device

  def kinds(rows):
    table_VxE, looked_up = jnp.zeros((size, 8)), jnp.zeros((8, rows), jnp.int32)
    with sharding.use(mesh):
      made = compiled((table_VxE, looked_up, jnp.ones((8, rows, 8)), None))
    return {each.kind for each in hlo.Program(made.as_text(), dict(mesh.shape)).collectives()}

  assert kinds(512) == {'all-gather'}
  assert kinds(2048) == {'all-reduce'}


def test_where_the_rows_do_not_divide_the_table_is_looked_up_as_a_whole():
  with sharding.use(sharding.make_mesh(1, 1, 8)):
    found = jax.jit(table.lookup)(jnp.arange(36.0).reshape(9, 4), jnp.array([[8], [0]]))
  np.testing.assert_array_equal(found[:, 0], [[32, 33, 34, 35], [0, 1, 2, 3]])


def test_a_lookup_on_one_device_is_nothing_but_a_gather(given):
  with sharding.use(jax.make_mesh((1, 1, 1), sharding.AXES, devices=jax.devices()[:1])):
    assert 'shard_map' not in str(jax.make_jaxpr(table.lookup)(*given[:2]))
  assert 'shard_map' not in str(jax.make_jaxpr(table.lookup)(*given[:2]))
