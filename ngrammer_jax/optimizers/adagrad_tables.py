"""An optimizer for your own model with n-gram tables."""

from typing import Any

import jax
import optax

from ngrammer_jax.layers import axis_names
from ngrammer_jax.layers.ngram import table


def with_adagrad_tables(
  dense: optax.GradientTransformation,
  params: Any,
  learning_rate: optax.ScalarOrSchedule = 0.01,
) -> optax.GradientTransformation:
  """Returns an optimizer with Adagrad for n-gram tables and another optimizer for the rest.

  Adagrad has an accumulator from 0 and an epsilon of 1e-20: with Optax's defaults, 0.1 and 1e-7,
  tables hardly learn, as their gradients are much smaller.

  Args:
    dense: the optimizer of all other parameters.
    params: parameters with their logical axis names, as returned by `init` of a Linen module, or
      `nnx.state(model, nnx.Param)`. The optimizer itself takes them with or without names. With
      names, its state has them too, so `nn.get_partition_spec` gives its sharding.
    learning_rate: learning rate of the tables. The default is low: on small texts, 0.03 to 1 were
      best.

  Raises:
    ValueError: no parameter is an n-gram table.
  """
  tables = set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=axis_names.has_names):
    if table.is_table(leaf):
      tables.add(_dict_keys(path))
  if not tables:
    raise ValueError(
      f'no parameter has the logical axis {table.AXES[0]}: pass the parameters returned by '
      f'`init`, before nn.unbox'
    )

  def label(path, leaf):
    del leaf
    if _dict_keys(path) in tables:
      return 'table'
    return 'dense'

  def label_all(params):
    return jax.tree_util.tree_map_with_path(label, params, is_leaf=axis_names.has_names)

  adagrad = optax.adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-20)
  return optax.partition({'dense': dense, 'table': adagrad}, label_all)


def _dict_keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
  """Returns the keys of a path, without the value key of a box or an NNX variable."""
  return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
