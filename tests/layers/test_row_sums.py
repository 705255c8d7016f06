import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.layers import row_sums
from ngrammer_jax.optimizers import row_gradient
from ngrammer_jax.training import programs
from tests import jaxprs
from tests.checks import assert_close, full, mesh_of

V = 8


@pytest.fixture
def gpu(monkeypatch):
  """What is lowered for GPUs, on this CPU."""
  monkeypatch.setattr(row_sums, 'on_gpu', lambda *arrays, gpu, default: gpu(*arrays))


def random_rows(*shape):
  """Many of few rows, and none of row 3."""
  rows = np.random.default_rng(0).choice([0, 1, 2, 4, 7], shape)
  return rows.astype('int32')


@pytest.mark.parametrize('shape', [(), (3,), (2, 3)])
def test_sums_equal_a_loop(x64, gpu, shape):
  """Also of the first and last row, and of a row that is dropped; of one row and of one vector."""
  rng = np.random.default_rng(1)
  for rows in (random_rows(13), np.full(1, 7, 'int32')):
    rows[: len(rows) // 6] = V
    array, values = rng.normal(size=(V, *shape)), rng.normal(size=(len(rows), *shape))
    expected = array.copy()
    for row, value in zip(rows, values, strict=True):
      if row < V:
        expected[row] += value
    assert_close(jax.jit(row_sums.add)(array, rows, values), expected, 1e-14)


def test_bfloat16_is_added_in_float32(gpu):
  """A scatter would round after each addition: 256 + 1 is 256 in bfloat16."""
  rows, values = np.zeros(3, 'int32'), jnp.array([256, 1, 1], jnp.bfloat16)
  total = jax.jit(lambda *lookup: row_sums.totals((2,), *lookup))(rows, values)
  assert total.dtype == jnp.bfloat16
  assert float(total[0]) == 258


@pytest.mark.parametrize('mesh', [(8,), (2, 2, 2), (1, 1, 1)])
def test_the_gradient_of_a_look_up_equals_that_of_jax_on_meshes(x64, gpu, mesh):
  """Of a batch over `data` and `fsdp`, and rows over `model`; also if 8 divides neither."""
  rng = np.random.default_rng(2)
  for batch, size in ((8, V), (3, 9)):
    array, rows = rng.normal(size=(size, 4)), random_rows(batch, 5)
    dy = rng.normal(size=(batch, 5, 4))
    (expected,) = jax.vjp(lambda array, rows=rows: array[rows], array)[1](dy)
    with sharding.use(mesh_of(*mesh)):
      take = lambda array, rows, dy: jax.vjp(lambda a: row_sums.take(a, rows), array)[1](dy)
      (actual,) = jax.jit(take)(array, rows, dy)
    assert_close(actual, expected, 1e-14)


def test_rows_of_a_table_equal_those_of_a_scatter(x64, gpu):
  """Which are in other places: between the rows are unused entries."""
  rows, values = random_rows(4, 6), np.random.default_rng(3).normal(size=(4, 6, 2))
  values[0, 0] = 0
  gradient = jax.jit(lambda *lookup: row_gradient.combine([lookup], V))(rows, values)
  expected = np.zeros((V, 2))
  np.add.at(expected, rows, values)
  assert_close(gradient.dense(jnp.zeros((V, 2))), expected, 1e-14)
  used = np.asarray(gradient.rows)[np.asarray(gradient.rows) < V]
  assert len(used) == len(set(used.tolist()))


@pytest.mark.parametrize('exchange', ['rows', full('table')])
def test_a_step_on_a_gpu_has_no_scatter_whose_indices_may_repeat(tiny, exchange):
  """XLA would turn it into a loop, see `layers.row_sums`: of embedding, table and codebook."""
  ngram = model_config.NGramConfig(clusters=8, vocabulary_size=64, dim=4, exchange=exchange)
  config = tiny({'ngram': ngram})
  step, _ = programs.Programs(config, 256, mesh_of(1)).trace_program('train')
  scatters = jaxprs.scatters(step.lower(lowering_platforms=('cuda',)).as_text())
  assert len(scatters) >= 4
  assert all('unique_indices = true' in scatter for scatter in scatters)
