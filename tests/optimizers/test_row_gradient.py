"""Gradients of tables as rows equal dense ones, and no step makes an array as large as a table."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import hlo
from ngrammer_jax import sharding
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.optimizers import row_gradient
from ngrammer_jax.training import accumulation
from tests.checks import full, mesh_of
from tests.optimizers import table_model

MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2)]


def close(actual, expected):
  """Equal to 1e-12."""
  compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
  jax.tree.map(compare, actual, expected)


def lookups_of(V):
  """Rows of two lookups with repetitions, and gradients, some of them 0."""
  random = np.random.default_rng(0)
  lookups = []
  for shape in ((8, 5), (8, 2, 3)):
    values = random.normal(size=(*shape, 4)) * (random.random((*shape, 1)) < 0.7)
    lookups.append((random.integers(0, V // 2, shape).astype(np.int32), values))
  dense = np.zeros((V, 4))
  for rows, values in lookups:
    for index in np.ndindex(rows.shape):
      dense[rows[index]] += values[index]
  return lookups, dense


@pytest.mark.parametrize('V', [32, full(27)])
def test_lookups_are_combined_to_the_dense_gradient_on_any_mesh(x64, V):
  """Also if the rows of a table are not divisible by the mesh."""
  lookups, dense = lookups_of(V)
  array = np.random.default_rng(1).normal(size=(V, 4))

  @jax.jit
  def run(lookups, array):
    gradient = row_gradient.combine(lookups, V)
    taken = gradient.take(array)
    tree = {'table': gradient, 'other': jnp.ones(3)}
    ones = jnp.ones_like(taken)
    added = gradient.add_to(array, jax.random.key(0))
    results = gradient.dense(array), added, gradient.put(array, taken + ones)
    return gradient, row_gradient.norm(tree), *results

  first = None
  for shape in MESHES:
    with sharding.use(mesh_of(*shape)):
      gradient, norm, same, added, put = jax.device_get(run(lookups, array))
    close(same, dense)
    close(added, array + dense)
    is_visited = (dense != 0).any(axis=-1, keepdims=True)
    close(put, array + is_visited)
    close(norm, np.sqrt((dense**2).sum() + 3))
    used = gradient.rows[gradient.rows < V]
    assert sorted(used) == np.flatnonzero(is_visited).tolist()
    assert (gradient.values[gradient.rows >= V] == 0).all()
    first = same if first is None else first
    np.testing.assert_array_equal(same, first)  # added in the order of the batch


class Lookup(nn.Module):
  """Rows of a table, twice."""

  exchange: str = 'rows'

  @nn.compact
  def __call__(self, rows):
    table_VxE = self.param('table', nn.initializers.normal(), (64, 4), float)
    return [table.lookup_parameter(self, 'table', table_VxE, each, self.exchange) for each in rows]


@pytest.mark.parametrize('exchange', ['rows', 'auto', 'table'])
def test_lookups_in_a_module_have_their_own_gradients_and_keep_their_bits(x64, exchange):
  """Also those of negative zeros, and rematerialised; `init` makes parameters only."""
  model = nn.remat(Lookup)(exchange)
  rows = [np.array([[3, 1], [3, 0]]), np.array([[[0], [3]], [[3], [15]]])]
  variables = model.init(jax.random.key(0), rows)
  assert list(variables) == ['params']
  params = {'table': variables['params']['table'].at[3].set(-0.0)}

  def loss(params, perturbations):
    values, updated = model.apply(
      {'params': params, **perturbations}, rows, mutable=[table.LOOKUPS]
    )
    total = sum((i + 1) * jnp.sin(3 * value).sum() for i, value in enumerate(values))
    return total, (updated.pop(table.LOOKUPS, {}), values)

  gradient, lookups, (values,) = row_gradient.grad(loss, params, 1)
  for actual, each in zip(values, rows, strict=True):
    assert np.asarray(actual).tobytes() == np.asarray(params['table'])[each].tobytes()
  path, is_rows = ('table',), exchange != 'table'
  assert (path in lookups, path in gradient) == (is_rows, not is_rows)
  dense, _ = jax.grad(loss, has_aux=True)(params, {})
  joined = row_gradient.join(gradient, lookups, params)['table']
  assert row_gradient.is_row_gradient(joined) == is_rows
  close(joined.dense(params['table']) if is_rows else joined, dense['table'])
  # These are an eighth of the rows of the table; in two parts, a quarter.
  assert (path in row_gradient.grad(loss, params, 2)[1]) == (exchange == 'rows')
  assert not row_gradient.grad(loss, params, 0)[1]


def run(shape, optimizer, parts=None, **fields):
  """State and metrics of a few steps on a mesh."""
  mesh = mesh_of(*shape)
  parts = None if parts is None else accumulation.GradientAccumulation(parts, mesh)
  call, create = table_model.compile_call(mesh, optimizer, parts, **fields)
  segments = table_model.segments()
  rows = lambda row_slice: token_batch.map_batches(lambda array: array[:, row_slice], segments)
  with sharding.use(mesh):
    placed = sharding.global_rows(mesh, table_model.B, rows, axis=1)
    # The last step is skipped.
    return jax.device_get(call(create(), placed, np.int32(table_model.STEPS - 1)))


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', ['adagrad', 'row_adagrad', 'lazy_adam'])
def test_a_run_by_rows_equals_a_dense_one_on_any_mesh_and_in_parts(x64, optimizer):
  """Parameters, moments, and the norms of gradient and update; rows without visits keep theirs."""
  dense = run((1, 1, 1), optimizer, exchange='table', V=4096)
  state, metrics = dense
  assert metrics['update_norm'][:-1].all() and not metrics['update_norm'][-1]
  assert {'gradient_norm/dense', 'loss'} < set(metrics)
  others = [((1, 1, 1), None), ((2, 2, 2), 2)]
  if 'adagrad' in optimizer:
    others += [((1, 1, 1), 2), ((2, 2, 2), None)]
  for shape, parts in others:
    close(run(shape, optimizer, parts, V=4096), dense)


@pytest.mark.slow
def test_rows_that_were_never_visited_do_not_decay(x64):
  """With weight decay of the dense weights, and every optimizer; frozen tables keep all rows."""
  _, create, _ = table_model.make_step(mesh_of(1, 1, 1))
  first = np.asarray(create().params['ngram_memory_0']['table'])
  segments = table_model.segments()
  rows = segments.tokens_BxT[:-1][segments.valid_BxT[:-1] > 0] * 5 % 64
  visited = np.union1d(rows, [rows // 2, rows // 3])
  for optimizer in ('adam', 'sinkhorn', 'frozen'):
    state, _ = run((1, 1, 1), optimizer)
    changed = (state.params['ngram_memory_0']['table'] != first).any(axis=-1)
    assert np.flatnonzero(changed).tolist() == ([] if optimizer == 'frozen' else visited.tolist())


@pytest.mark.full
@pytest.mark.parametrize('optimizer', ['adagrad', 'row_adagrad', 'lazy_adam'])
def test_temporaries_do_not_grow_with_the_rows_of_a_table(optimizer):
  """Of the call of many steps, with the state that it donates; adam shows that they can."""
  temporaries = lambda V, name: (
    table_model.compile_call(mesh_of(1, 1, 1), name, V=V, exchange='auto')[0]
    .memory_analysis()
    .temp_size_in_bytes
  )
  small = temporaries(2**16, optimizer)
  assert temporaries(2**20, optimizer) == small < 2**16
  if optimizer == 'lazy_adam':
    assert temporaries(2**16, 'adam') > 4 * 2**16 * table_model.E


@pytest.mark.slow
@pytest.mark.parametrize('parts', [None, 2])
def test_devices_exchange_lookups_and_never_a_table(parts):
  mesh = mesh_of(2, 2, 2)
  parts = parts and accumulation.GradientAccumulation(parts, mesh)
  program, _ = table_model.compile_call(mesh, 'adagrad', parts, V=2**16, exchange='auto')
  assert program.memory_analysis().temp_size_in_bytes < 2**16
  collectives = hlo.Program(program.as_text(), dict(mesh.shape)).collectives()
  assert 'all-gather' in {each.kind for each in collectives}
  assert max(each.bytes_sent for each in collectives) < 2**16
