"""Lookups in sharded tables have the same rows and gradients on any mesh."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import hlo
from ngrammer_jax import sharding
from ngrammer_jax.config.ngram import memory
from ngrammer_jax.layers.ngram import table

V, E, B = 64, 4, 16
MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 2, 1), (1, 2, 4)]
# The batch is sharded over one axis or both, the table over none, one or both.
QUICK = [('table', (8, 1, 1)), ('rows', (2, 2, 2)), ('table', (4, 2, 1)), ('auto', (1, 2, 4))]
EVERY = [(exchange, shape) for exchange in memory.EXCHANGE for shape in MESHES]


@functools.cache
def example():
  """A table, rows with repetitions, weights of the output, and the expected gradient."""
  random = np.random.default_rng(0)
  table_VxE = random.normal(size=(V, E)).astype(np.float32)
  rows = random.integers(0, V // 2, (B, 6, 2)).astype(np.int32)
  weights = random.normal(size=(B, 6, 2, E)).astype(np.float32)
  gradient = np.zeros((V, E))
  for index in np.ndindex(rows.shape):
    gradient[rows[index]] += weights[index]
  return table_VxE, rows, weights, gradient


def compiled(arrays, exchange='auto'):
  """The program of a lookup and its gradient."""

  def loss(table_VxE, rows, weights):
    output = table.lookup(table_VxE, rows, exchange)
    return (output * weights).sum(), output

  return jax.jit(jax.grad(loss, has_aux=True)).lower(*arrays).compile()


@pytest.mark.parametrize(
  'exchange, shape',
  [each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in EVERY],
)
def test_rows_and_gradients_are_those_of_one_device(exchange, shape):
  """With `rows` no array of the size of the table, or of a shard of it, is exchanged."""
  *arrays, gradient = example()
  table_VxE, rows, _ = arrays
  mesh = sharding.make_mesh(*shape)
  with sharding.use(mesh):
    program = compiled(arrays, exchange)
    actual_gradient, output = program(*arrays)
  np.testing.assert_array_equal(output, table_VxE[rows])
  # Each of 8 devices rounds its part, and may round each sum.
  error = 0.05 if exchange == 'table_bfloat16' else 2e-6
  np.testing.assert_allclose(actual_gradient, gradient, atol=error)
  if exchange == 'rows':
    with sharding.use(mesh):
      lookup = jax.jit(lambda *args: table.lookup(*args, exchange)).lower(table_VxE, rows).compile()
    kinds = lambda program: [
      each.kind for each in hlo.Program(program.as_text(), dict(mesh.shape)).collectives()
    ]
    gradient_kinds = kinds(program)
    for kind in kinds(lookup):
      gradient_kinds.remove(kind)
    assert set(gradient_kinds) == ({'all-gather'} if shape[0] * shape[1] > 1 else set())


def test_a_gradient_in_bfloat16_is_the_sum_of_rounded_parts():
  """Each of 6 devices looks up a row twice; 1 + 2^-8 rounds to 1, their sum to 6 + 2^-5."""
  table_VxE, rows = np.ones((8, 1), np.float32), np.zeros((8, 2), np.int32)
  weights = np.full((8, 2, 1), 0.5 + 2.0**-9, np.float32)
  weights[6:] = 0
  arrays = table_VxE, rows, weights
  with sharding.use(sharding.make_mesh(8, 1, 1)):
    exact, rounded = (compiled(arrays, name)(*arrays)[0] for name in ('table', 'table_bfloat16'))
  assert (exact[0, 0], rounded[0, 0]) == (6 * (1 + 2.0**-8), 6)


@pytest.mark.parametrize('exchange, shape', [('table', (1, 8, 1)), ('rows', (4, 2, 1))])
def test_rows_of_large_batches_are_exchanged_in_parts(monkeypatch, exchange, shape):
  """24 rows of each of 8 devices, in 5 parts: the last one is padded."""
  *arrays, gradient = example()
  mesh = sharding.make_mesh(*shape)
  monkeypatch.setattr(table, 'MAX_VALUES', 5 * 8 * table.LANES)
  with sharding.use(mesh):
    program = compiled(arrays, exchange)
    actual_gradient, output = program(*arrays)
  np.testing.assert_array_equal(output, arrays[0][arrays[1]])
  np.testing.assert_allclose(actual_gradient, gradient, atol=2e-6)
  collectives = hlo.Program(program.as_text(), dict(mesh.shape)).collectives()
  gathers = {each.times for each in collectives if each.kind == 'all-gather'}
  assert 5 in gathers and 1 not in gathers


@pytest.mark.full
@pytest.mark.parametrize('lookups, kind', [(1024, 'all-gather'), (2048, 'all-reduce')])
def test_auto_exchanges_rows_where_few_are_looked_up(lookups, kind):
  """Up to a quarter of the rows of the table; these are fewer bytes in the compiled program."""
  mesh, size = sharding.make_mesh(8, 1, 1), 4096
  shape = jax.ShapeDtypeStruct
  arrays = (
    shape((size, 8), jnp.float32),
    shape((8, lookups // 8), jnp.int32),
    shape((8, lookups // 8, 8), jnp.float32),
  )

  def collectives(exchange):
    with sharding.use(mesh):
      text = compiled(arrays, exchange).as_text()
    return hlo.Program(text, dict(mesh.shape)).collectives()

  assert {each.kind for each in collectives('auto')} == {kind}
  if kind == 'all-gather':
    sent = lambda exchange: sum(each.bytes_sent for each in collectives(exchange))
    assert sent('auto') == sent('rows') < sent('table') / 7


def test_a_table_of_indivisible_size_is_not_sharded():
  rows = np.arange(36, dtype='float32').reshape(9, 4)
  with sharding.use(sharding.make_mesh(1, 1, 8)):
    output = np.asarray(jax.jit(table.lookup)(rows, np.array([[8], [0]])))
  np.testing.assert_array_equal(output[:, 0], [[32, 33, 34, 35], [0, 1, 2, 3]])


def test_a_lookup_on_one_device_is_nothing_but_a_gather():
  arrays = example()[:2]
  with sharding.use(jax.make_mesh((1, 1, 1), sharding.AXES, devices=jax.devices()[:1])):
    assert 'shard_map' not in str(jax.make_jaxpr(table.lookup)(*arrays))
  assert 'shard_map' not in str(jax.make_jaxpr(table.lookup)(*arrays))


class Lookups(nn.Module):
  """Several lookups in one table."""

  @nn.compact
  def __call__(self, rows):
    table_VxE = self.param('table', nn.initializers.normal(), (V, E))
    return [table.lookup_parameter(self, 'table', table_VxE, each) for each in rows]


def test_every_lookup_of_a_module_is_recorded_and_has_its_own_perturbation():
  table_VxE, rows, weights, _ = example()
  rows, weights = (rows[:, 0], rows[:, 1], rows[:, 2, :1]), jnp.asarray(weights)
  perturbations = weights[:, 0], weights[:, 1], weights[:, 2, :1]
  variables = {'params': {'table': table_VxE}, table.PERTURBATIONS: {'table': perturbations}}
  values, recorded = Lookups().apply(variables, rows, mutable=[table.LOOKUPS])
  for actual, each, perturbation in zip(values, rows, perturbations, strict=True):
    np.testing.assert_array_equal(actual, table_VxE[each] + perturbation)
  lookups = recorded[table.LOOKUPS]['table']
  jax.tree.map(np.testing.assert_array_equal, [each.rows_Bx for each in lookups], list(rows))
