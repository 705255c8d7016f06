"""Updates of tables in bfloat16 are rounded stochastically: a function of step and row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.optimizers import row_gradient, tables
from tests.checks import full, mesh_of

V, E, STEPS, SEEDS = 24, 8, 100, 20


def table_of():
  return np.random.default_rng(0).normal(size=(V, E)).astype(jnp.bfloat16)


@pytest.fixture(scope='module')
def rounded():
  """Values, and each of them rounded with 2,000 keys, in one program."""
  values = np.array([[1.001, -1.001, 3.3e-5, -7e20, 0.0, 1.0, -0.75, 1e-40]], np.float32)
  keys = jax.random.split(jax.random.key(0), 2_000)
  round_one = lambda key: row_gradient.round_stochastically(values, jnp.zeros(1, int), key)
  return values[0], np.asarray(jax.jit(jax.vmap(round_one))(keys)[:, 0], np.float64)


def test_the_mean_of_the_two_neighbours_is_the_value(rounded):
  values, results = rounded
  for value, each in zip(values, results.T, strict=True):
    neighbours = set(each)
    nearest = float(value.astype(jnp.bfloat16))
    if nearest == value:
      assert neighbours == {value}
      continue
    low, high = sorted(neighbours)
    assert low < value < high and nearest in neighbours
    # Four standard errors of a mean of 2,000.
    assert abs(each.mean() - value) < 4 * (high - low) / 2 / 2_000**0.5
    assert abs(each.mean() - value) < abs(nearest - value)


@pytest.mark.full
def test_infinity_and_nan_stay():
  values = np.array([[np.inf, -np.inf, np.nan]], np.float32)
  result = row_gradient.round_stochastically(values, jnp.zeros(1, int), jax.random.key(1))
  np.testing.assert_array_equal(np.asarray(result, np.float32), values)


def test_the_noise_is_a_function_of_key_and_row():
  values = np.full((4, E), 1.001, np.float32)
  run = lambda rows, seed: np.asarray(
    row_gradient.round_stochastically(values, jnp.array(rows), jax.random.key(seed))
  )
  first, other = run([3, 1, 0, 2], 0), run([0, 1, 2, 3], 0)
  np.testing.assert_array_equal(first, other[[3, 1, 0, 2]])
  assert len({row.tobytes() for row in first}) == 4  # rows differ
  assert not np.array_equal(run([3, 1, 0, 2], 1), first)  # and steps


@pytest.mark.parametrize('shape', [(1, 1, 1), full((8, 1, 1)), full((2, 2, 2))])
def test_rows_and_whole_tables_have_the_same_bits_on_any_mesh(shape):
  """Rows that were not looked up stay as they are."""
  rng = np.random.default_rng(1)
  rows = rng.permutation(V)[:16].reshape(8, 2).astype(np.int32)
  update = np.zeros((V, E), np.float32)
  update[rows] = 1e-3 * rng.normal(size=(8, 2, E))
  params, key = {'t': table_of()}, jax.random.key(5)

  @jax.jit
  def run(params):
    by_rows = {'t': row_gradient.combine([(rows, update[rows])], V)}
    return [row_gradient.apply_updates(params, each, key)['t'] for each in (by_rows, {'t': update})]

  with sharding.use(mesh_of(*shape)):
    sparse, dense = (np.asarray(each) for each in run(params))
  assert sparse.dtype == dense.dtype == jnp.bfloat16
  np.testing.assert_array_equal(sparse, dense)
  changed = (dense != table_of()).any(axis=1)
  assert set(np.flatnonzero(changed)) <= set(rows.ravel()) and changed.sum() > 10
  expected = row_gradient.apply_updates(params, {'t': update}, key)['t']
  np.testing.assert_array_equal(dense, np.asarray(expected))


@pytest.mark.full
@pytest.mark.parametrize('name', ['adagrad', 'lazy_adam'])
def test_tables_move_as_far_along_the_direction_of_float32(name):
  """The updates are less than half the distance of neighbours; their gradients are the same."""
  settings = experiment.OptimizerConfig(
    learning_rate=2e-4, table=experiment.TableConfig(learning_rate=1e-3)
  )
  optimizer = tables.make(name, settings, lambda step: jnp.ones(()))
  mean = np.random.default_rng(2).normal(size=(V, E))

  def train(params, seed):
    state = optimizer.init(params)

    def step(carry, i):
      params, state = carry
      noise = jax.random.normal(jax.random.fold_in(jax.random.key(99), i), (V, E))
      gradient = {'t': jnp.asarray(mean, jnp.float32) + noise}
      updates, state = optimizer.update(gradient, state, params)
      key = jax.random.fold_in(jax.random.key(seed), i)
      return (row_gradient.apply_updates(params, updates, key), state), None

    (params, _), _ = jax.lax.scan(step, (params, state), jnp.arange(STEPS))
    return params['t'].astype(jnp.float32)

  start = jnp.asarray(table_of())
  move = jax.jit(lambda dtype_of, seed: train({'t': dtype_of}, seed) - start.astype(jnp.float32))
  direction = np.asarray(move(start.astype(jnp.float32), 0), np.float64)
  moved = np.asarray(jax.jit(jax.vmap(move, (None, 0)))(start, jnp.arange(SEEDS)), np.float64)
  shares = (moved * direction).sum((1, 2)) / (direction**2).sum()
  assert abs(shares.mean() - 1) < 0.05, shares
  assert np.abs(moved).mean() > 0.8 * np.abs(direction).mean()
