"""The optimizers of tables equal their formulas, with gradients as rows and as arrays."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.optimizers import row_gradient, schedule
from ngrammer_jax.optimizers import tables as table_optimizers
from tests import checks
from tests.checks import full

V, E, STEPS = 12, 3, 5
CONFIG = experiment.OptimizerConfig(
  learning_rate=0.02,
  schedule='constant',
  warmup_steps=0,
  weight_decay=0.1,
  table=experiment.TableConfig(learning_rate=0.3, accumulator=0.02, epsilon=0.01),
)


def table_of():
  return np.random.default_rng(0).normal(size=(V, E))


def gradient_of(step):
  """Of 8 lookups in the upper 10 rows, one of them without a gradient."""
  random = np.random.default_rng(step)
  rows, values = random.integers(0, V - 2, 8).astype(np.int32), random.normal(size=(8, E))
  values[0] = 0
  dense = np.zeros((V, E))
  np.add.at(dense, rows, values)
  return rows, values, dense


def train(name, as_rows, factor=None):
  """The tables after each step, in double precision."""
  optimizer = table_optimizers.make(name, CONFIG, schedule.make(CONFIG, 10), factor)

  @jax.jit
  def step(params, state, rows, values, dense):
    gradient = row_gradient.combine([(rows, values)], V) if as_rows else dense
    updates, state = optimizer.update({'table': gradient}, state, params)
    assert row_gradient.is_row_gradient(updates['table']) == (
      as_rows and name not in ('adam', 'sinkhorn')
    )
    return row_gradient.apply_updates(params, updates, jax.random.key(0)), state

  params, tables = {'table': jnp.asarray(table_of())}, []
  state = optimizer.init(params)
  for i in range(STEPS):
    params, state = step(params, state, *gradient_of(i))
    tables.append(np.asarray(params['table']))
  return tables


def by_hand(name):
  """The tables after each step of a loop over rows."""
  w, tables, adam, rate = table_of(), [], experiment.AdamConfig(), 5 * CONFIG.learning_rate
  squares, m, v = np.full((V, E), CONFIG.table.accumulator), np.zeros((V, E)), np.zeros((V, E))
  sums = np.full(V, CONFIG.table.accumulator)
  for step in range(STEPS):
    gradient = gradient_of(step)[-1]
    for row, g in enumerate(gradient):
      if name == 'adagrad':
        squares[row] += g**2
        w[row] -= CONFIG.table.learning_rate * g / np.sqrt(squares[row] + CONFIG.table.epsilon)
      elif name == 'row_adagrad':
        sums[row] += (g**2).mean()
        w[row] -= CONFIG.table.learning_rate * g / (np.sqrt(sums[row]) + CONFIG.table.epsilon)
      elif name == 'adam' or (name == 'lazy_adam' and g.any()):
        m[row] = adam.beta1 * m[row] + (1 - adam.beta1) * g
        v[row] = adam.beta2 * v[row] + (1 - adam.beta2) * g**2
        mean, square = (
          m[row] / (1 - adam.beta1 ** (step + 1)),
          v[row] / (1 - adam.beta2 ** (step + 1)),
        )
        w[row] -= rate * mean / (np.sqrt(square) + CONFIG.epsilon)
    tables.append(w.copy())
  return tables


def test_tables_learn_however_small_their_gradients_are():
  """The gradients of a mean loss over a million tokens are tiny; steps have the learning rate."""
  config = experiment.OptimizerConfig(schedule='constant', warmup_steps=0)
  optimizer = table_optimizers.make('adagrad', config, schedule.make(config, 10))
  gradient = jnp.asarray(gradient_of(0)[-1])
  for scale in (1, 1e-7):
    updates, _ = optimizer.update(scale * gradient, optimizer.init(gradient))
    np.testing.assert_allclose(updates, -0.01 * jnp.sign(gradient), rtol=1e-3)


@pytest.mark.parametrize('name', ('adagrad', 'row_adagrad', 'lazy_adam', 'adam', 'frozen'))
def test_rows_and_arrays_give_the_table_of_the_formula(x64, name):
  expected = by_hand(name)
  for as_rows in (True, False):
    np.testing.assert_allclose(train(name, as_rows), expected, rtol=1e-11, atol=1e-12)
  assert (expected[-1][V - 2 :] == table_of()[V - 2 :]).all()


@pytest.mark.full
def test_lazy_adam_is_not_adam():
  assert np.abs(train('lazy_adam', True)[-1] - train('adam', True)[-1]).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
  'name, default', [('adagrad', 1), ('row_adagrad', 1), ('lazy_adam', 5), ('sinkhorn', 5)]
)
def test_the_learning_rate_factor(x64, name, default):
  first = lambda factor: train(name, True, factor)[0] - table_of()
  np.testing.assert_allclose(first(None), first(default), rtol=1e-12)
  np.testing.assert_allclose(first(3 * default), 3 * first(default), rtol=1e-9)


@pytest.mark.parametrize('as_rows', [False, full(True)])
@pytest.mark.parametrize(
  'name', [full('adagrad'), 'row_adagrad', full('lazy_adam'), 'adam', full('sinkhorn')]
)
def test_the_state_of_a_narrow_table_is_float32(name, as_rows):
  """An average with a decay of 0.999 cannot shrink in bfloat16, which rounds it to 1."""
  optimizer = table_optimizers.make(name, CONFIG, schedule.make(CONFIG, 10))
  params = {'table': jnp.asarray(table_of(), jnp.bfloat16)}
  state = optimizer.init(params)
  rows, values, dense = gradient_of(0)
  gradient = jnp.asarray(dense, jnp.bfloat16)
  if as_rows:
    gradient = row_gradient.combine([(rows, values.astype(np.float32))], V)
  _, next_state = optimizer.update({'table': gradient}, state, params)
  for each in (state, next_state):
    arrays = [leaf for leaf in jax.tree.leaves(each) if leaf.ndim]
    assert arrays and all(leaf.dtype == jnp.float32 for leaf in arrays)


def test_row_adagrad_equals_the_official_array(x64):
  """Also if four rows are packed in one, as on TPUs: the state still has one number a row."""
  with np.load(checks.REFERENCE / 'vp_row_adagrad.npz') as f:
    arrays, official = dict(f), json.loads(str(f['config']))
  table = experiment.TableConfig(official['lr'], official['initial'], official['eps'])
  config = experiment.OptimizerConfig(schedule='constant', warmup_steps=0, table=table)
  optimizer = table_optimizers.make('row_adagrad', config, schedule.make(config, 10))
  first_state, update = optimizer.init(arrays['first']), jax.jit(optimizer.update)
  assert [leaf.size for leaf in jax.tree.leaves(first_state) if leaf.ndim] == [official['rows']]
  for P in (1, 4):
    packed = (official['rows'] // P, P * official['width'])
    pack = lambda leaf, P=P: leaf.reshape(-1, P) if leaf.ndim else leaf
    params, state = arrays['first'].reshape(packed), jax.tree.map(pack, first_state)
    for i in range(official['steps']):
      updates, state = update(arrays['gradients'][i].reshape(packed), state)
      params = params + updates
      sums = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
      np.testing.assert_allclose(params.ravel(), arrays['tables'][i].ravel(), rtol=0, atol=1e-12)
      np.testing.assert_allclose(sums[0].ravel(), arrays['sums'][i], rtol=1e-12, atol=1e-12)


def test_sinkhorn_equals_the_official_array(x64):
  with np.load(checks.REFERENCE / 'sinkhorn_tables.npz') as f:
    arrays, official = dict(f), json.loads(str(f['config']))
  config = experiment.OptimizerConfig(
    learning_rate=official['lr'], schedule='constant', warmup_steps=0
  )
  optimizer = table_optimizers.make('sinkhorn', config, schedule.make(config, 10))
  params = jnp.asarray(arrays['weight/0'])
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  for i in range(official['steps']):
    updates, state = update(jnp.asarray(arrays[f'gradient/{i}']), state, params)
    params = params + updates
    (sinkhorn,) = [s for s in state if isinstance(s, table_optimizers.SinkhornState)]
    expected = arrays[f'momentum/{i + 1}'], arrays[f'weight/{i + 1}']
    for actual, each in zip((sinkhorn.momentum, params), expected, strict=True):
      np.testing.assert_allclose(actual, each, rtol=1e-9, atol=1e-12)
    rate = -0.18 * official['lr'] * official['multiplier']
    np.testing.assert_allclose(updates / rate, arrays[f'direction/{i}'], rtol=1e-9, atol=1e-12)
