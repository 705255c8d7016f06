"""Initial values of n-gram tables: their means, deviations and bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers.ngram import initial_tables
from tests.loops import each

E, ROWS, D = 8, 3000, 25
IN_FEED_FORWARD = {'layers': (0,), 'point': 'feed_forward', 'join': 'multiply'}


def draw(fields, dtype='float32'):
  """An initial table of three heads of 1,000 rows."""
  options = NGramMemoryConfig(rows=(1000,), width=E, **fields)
  initialize = initial_tables.initializer(
    options, width=E, head_rows=1000, model_width=D, dtype=jnp.dtype('float32')
  )
  return np.asarray(initialize(jax.random.key(0), (ROWS, E), jnp.dtype(dtype)), 'float32')


@each(
  'fields, mean, deviation, bound',
  [
    ({'deviation': 0.3}, 0, 0.3, None),
    ({'deviation': None}, 0, 0.986 * E**-0.5, 3 * E**-0.5),
    ({'table_initial': 'uniform', 'deviation': 0.3}, 0, 0.3, 3**0.5 * 0.3),
    ({'table_initial': 'uniform', 'deviation': None}, 0, D**-0.5, 3**0.5 * D**-0.5),
    ({'table_initial': 'xavier'}, 0, (2 / (1000 + E)) ** 0.5, (6 / (1000 + E)) ** 0.5),
    ({'table_initial': 'xavier_normal'}, 0, (2 / (1000 + E)) ** 0.5, None),
    (IN_FEED_FORWARD | {'deviation': 0.3}, 1, 0.3, None),
  ],
)
def test_mean_deviation_and_bound(fields, mean, deviation, bound):
  table = draw(fields)
  assert table.mean() == pytest.approx(mean, abs=4 * deviation * table.size**-0.5)
  assert table.std() == pytest.approx(deviation, rel=0.02)
  largest = np.abs(table - mean).max()
  if bound is None:
    assert largest > 3 * deviation
  else:
    assert 0.97 * bound < largest <= bound * (1 + 1e-6)


def test_a_deviation_of_zero_is_neutral():
  """Rows that are added start at 0, rows that multiply at 1."""
  np.testing.assert_array_equal(draw({'deviation': 0.0}), 0)
  np.testing.assert_array_equal(draw(IN_FEED_FORWARD | {'deviation': 0.0}), 1)


def test_a_table_in_bfloat16_has_the_same_numbers_rounded():
  rounded = draw({}).astype(jnp.bfloat16).astype('float32')
  np.testing.assert_array_equal(draw({}, 'bfloat16'), rounded)
