"""Rows of a table in host memory. A module reads them from collections, not by a lookup.

  VALUES  the rows of all n-grams of a segment, [B, T, I, E]
  ROWS    their places in a smaller table, with only the rows of the segment
  TERMS   one array [L, E] for each device; their sum is the smaller table. Without TERMS, the
          parameter is the smaller table

If ROWS is mutable, a module records there which rows it would look up. In KEYS, `init` records the
key of the initial values, from which `models.table_drawing` draws the same table in host memory.
See `models.host_tables`.
"""

from flax import linen as nn
import jax

from ngrammer_jax.layers.ngram import table

AXES = ('ngram_vocab', 'host_ngram_embed')  # logical axes of a table in host memory
VALUES = 'table_values'
ROWS = 'table_rows'
TERMS = 'table_terms'
KEYS = 'table_keys'


def read(module: nn.Module, name: str, exchange: str) -> jax.Array | None:
  """Returns the rows of a segment, [B, T, I, E]; None: the collections have none.

  Args:
    module: the module of the table.
    name: name of the table.
    exchange: see `table.TableSharding`.
  """
  if module.has_variable(VALUES, name):
    return module.get_variable(VALUES, name)
  if not module.has_variable(ROWS, name):
    return None
  places_BxTxI = module.get_variable(ROWS, name)
  if module.has_variable(TERMS, name):
    rows_LxE = module.get_variable(TERMS, name).sum(axis=0)
    return table.lookup(rows_LxE, places_BxTxI, exchange)
  rows_LxE = nn.unbox(module.get_variable('params', name))
  return table.lookup_parameter(module, name, rows_LxE, places_BxTxI, exchange)


def keep_key(
  module: nn.Module, name: str, initialize: nn.initializers.Initializer
) -> nn.initializers.Initializer:
  """Returns an initializer of a table that also records its key in KEYS."""

  def initialize_and_record(key, shape, dtype):
    if module.is_mutable_collection(KEYS):
      module.put_variable(KEYS, name, jax.random.key_data(key))
    return initialize(key, shape, dtype)

  return initialize_and_record
