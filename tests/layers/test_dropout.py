import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import dropout


def test_the_mean_is_kept():
  drop = jax.jit(lambda x: dropout.drop(x, 0.25, jax.random.key(0)))
  values, counts = np.unique(drop(np.ones(10_000, 'float32')), return_counts=True)
  np.testing.assert_allclose(values, [0, 1 / 0.75], rtol=1e-6)
  assert abs(counts[0] / 10_000 - 0.25) < 0.02


def test_only_a_tpu_keeps_the_mask_apart():
  """XLA fuses the numbers into each of their uses otherwise, and takes minutes for one."""
  traced = jax.jit(lambda x: dropout.drop(x, 0.25, jax.random.key(0))).trace(np.ones(8, 'float32'))
  programs = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ('tpu', 'cpu')}
  assert 'optimization_barrier' in programs['tpu']
  assert 'optimization_barrier' not in programs['cpu']


@pytest.mark.parametrize('x64', [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_block_of_what_is_kept_is_that_of_the_whole(x64):
  with jax.enable_x64(x64):
    key, rate = jax.random.key(3), 0.3
    full_mask = np.asarray(dropout.drop(jnp.ones((2, 3, 5, 7)), rate, key)).reshape(-1, 7)
    rows, columns = np.array([[4, 5, 6], [19, 20, 21]]), np.arange(2, 6)
    block = dropout.block_mask(key, rate, rows, columns, 7)
    np.testing.assert_allclose(block, full_mask[rows][..., columns], rtol=1e-6)
    assert len(np.unique(block)) == 2


@pytest.mark.full
def test_rows_beyond_32_bits_have_numbers_of_their_own():
  """Row 2 begins at element 2^32, whose lower 32 bits are those of row 0."""
  rows, columns = np.array([[0, 2]]), np.arange(64)
  first, second = dropout.block_mask(jax.random.key(0), 0.5, rows, columns, 2**31)[0]
  assert (first != second).any()


def test_without_a_key_nothing_is_dropped():
  x = np.ones(3)
  assert dropout.drop(x, 0.5, None) is x
