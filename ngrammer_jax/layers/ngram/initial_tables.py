"""Initial values of n-gram tables."""

from flax import linen as nn
import jax.numpy as jnp

from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers import dense


def initializer(
  options: NGramMemoryConfig, width: int, head_rows: int, model_width: int, dtype: jnp.dtype
) -> nn.initializers.Initializer:
  """Returns the initializer of a table; it draws the same numbers for any dtype of the table.

  Args:
    options: the config of the memory.
    width: E, values of a row.
    head_rows: rows of the first head.
    model_width: D of the model.
    dtype: dtype of the drawn numbers.
  """
  o = options
  E = width
  if o.starts_with_equal_rows:
    draw = nn.initializers.zeros
  elif o.table_initial == 'uniform':
    deviation = o.deviation
    if deviation is None:
      deviation = model_width**-0.5
    draw = dense.symmetric(3**0.5 * deviation)
  elif o.table_initial == 'xavier':
    draw = dense.symmetric((6 / (o.rows[0] + E)) ** 0.5)  # of the rows of one head
  elif o.table_initial == 'xavier_normal':
    draw = nn.initializers.normal((2 / (head_rows + E)) ** 0.5)
  elif o.deviation is None:
    draw = nn.initializers.truncated_normal(E**-0.5, lower=-3, upper=3)
  else:
    draw = nn.initializers.normal(o.deviation)
  mean = 1 if o.join == 'multiply' else 0

  def initialize(key, shape, table_dtype):
    return (mean + draw(key, shape, dtype)).astype(table_dtype)

  return initialize
