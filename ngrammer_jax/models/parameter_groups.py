"""Groups of parameters by name, to freeze or to give their own learning rate.

A group is `embedding`, `blocks`, `head`, or the name of a memory (anywhere in the model) or of a
shared table.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from flax import traverse_util
import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config.model import placed_blocks
from ngrammer_jax.config.ngram import memory as ngram_memory

# Groups by a module at any depth, where the name of the module is not that of the block.
MODULES = {'ngrammer': 'ngram'}
# The names of their modules are the name of the block, alone or with a suffix: its place.
BLOCKS = (*placed_blocks(), 'persistent', 'span')
EMBEDDINGS = ('embedding', 'absolute_position')
HEAD = ('final_norm', 'softmax', 'adaptive')  # prefixes


def group_of(name: str) -> str:
  """Returns the group of a parameter, such as `layer_0/attention/query/kernel`."""
  for key in name.split('/'):
    group = _group_of_module(key)
    if group is not None:
      return group
  module = name.split('/')[0]
  if module in EMBEDDINGS:
    return 'embedding'
  if module.startswith(HEAD):
    return 'head'
  return 'blocks'


def memory_of(name: str) -> str | None:
  """Returns the module name of a parameter's memory; None outside of memories."""
  keys = name.split('/')
  for i, key in enumerate(keys):
    if _group_of_module(key) is not None:
      return '/'.join(keys[: i + 1])
  return None


def _group_of_module(module: str) -> str | None:
  """Returns the group of a memory by the name of its module; None for other modules."""
  if module.startswith((ngram_memory.PREFIX, ngram_memory.TABLE_PREFIX)):
    return module
  if module in MODULES:
    return MODULES[module]
  for block in BLOCKS:
    if module == block or module.startswith(f'{block}_'):
      return block
  return None


def frozen(
  train: Iterable[str], params: Any, source: Mapping[str, np.dtype]
) -> dict[str, np.dtype]:
  """Returns the dtype of every frozen parameter, by name.

  Args:
    train: `optimizer.train`.
    params: the parameters, abstract or not.
    source: dtype of every parameter of `init_from`, by name; empty without it. The others are new.

  Raises:
    BadInput: no parameter would be trained.
  """
  if 'all' in train or (tuple(train) == ('new',) and not source):
    return {}
  names = traverse_util.flatten_dict(params, sep='/')
  dtypes = {}
  for name in names:
    is_new = 'new' in train and name not in source
    if not is_new and group_of(name) not in train:
      dtypes[name] = source.get(name, np.dtype(np.float32))
  if len(dtypes) == len(names):
    groups = sorted({group_of(name) for name in names})
    raise errors.BadInput(
      f'optimizer.train={tuple(train)} trains nothing: init_from has all parameters; name some of '
      f'{", ".join(groups)}'
    )
  return dtypes


def check_names(named: Iterable[str], params: Any) -> None:
  """Raises BadInput for a part without parameters in `optimizer.train` or `rates`."""
  groups = {group_of(name) for name in traverse_util.flatten_dict(params, sep='/')}
  for name in named:
    if name not in groups and name not in ('all', 'new'):
      raise errors.BadInput(
        f'optimizer names the part {name!r}, but it has no parameters in this model: use '
        f'{", ".join(sorted(groups))}'
      )


def without(params: Any, names: Iterable[str]) -> Any:
  """Returns a nested dict of parameters (or of values for each) without some names."""
  names = set(names)
  if not names:
    return params
  leaves = traverse_util.flatten_dict(params, keep_empty_nodes=True, sep='/')
  others = {name: leaf for name, leaf in leaves.items() if name not in names}
  return traverse_util.unflatten_dict(others, sep='/')


def select(params: Any, names: Iterable[str]) -> Any:
  """Returns the parameters with some names."""
  leaves = traverse_util.flatten_dict(params, sep='/')
  return traverse_util.unflatten_dict({name: leaves[name] for name in names}, sep='/')


def merge(params: Any, others: Any) -> Any:
  """Returns the parameters of both trees; the second tree takes precedence."""
  leaves = traverse_util.flatten_dict(params, keep_empty_nodes=True)
  leaves |= traverse_util.flatten_dict(others, keep_empty_nodes=True)
  return traverse_util.unflatten_dict(leaves)
