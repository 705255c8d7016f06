import jax
import numpy as np

from ngrammer_jax.layers import dropout


def test_the_mean_is_kept():
  drop = jax.jit(lambda x: dropout.drop(x, 0.25, jax.random.key(0)))
  values, counts = np.unique(drop(np.ones(10_000, 'float32')), return_counts=True)
  np.testing.assert_allclose(values, [0, 1 / 0.75], rtol=1e-6)
  assert abs(counts[0] / 10_000 - 0.25) < 0.02


def test_without_a_key_nothing_is_dropped():
  x = np.ones(3)
  assert dropout.drop(x, 0.5, None) is x
