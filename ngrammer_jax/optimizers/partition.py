"""One optimizer for each parameter label, with a shared schedule shape."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import optax

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.config import product_memory
from ngrammer_jax.config.ngram import memory as ngram_memory
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.optimizer import RateConfig
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.layers.ngram import table
from ngrammer_jax.models import parameter_groups, spans
from ngrammer_jax.optimizers import dense, muon, row_gradient, schedule, tables

DENSE = 'dense'
TABLE = 'ngram_table'
FROZEN = 'frozen'

TableMemoryConfig = NGramMemoryConfig | ProductMemoryConfig


def labels(
  params: Any, memories: Sequence[TableMemoryConfig] = (), frozen: Collection[str] = ()
) -> Any:
  """Returns the label of every parameter.

  Labels: `dense`; `ngram_table` for tables (parameters with an axis `ngram_vocab`), or the name of
  the memory (see `models.memories`) or shared table if it has its own optimizer; `frozen`.

  Args:
    params: parameters in their `nn.LogicallyPartitioned` boxes, abstract or not.
    memories: memories of the model with tables, see `ModelConfig.table_memories`.
    frozen: names of the frozen parameters.

  Raises:
    ValueError: a parameter has no logical axis names.
  """
  table_labels = table_optimizers(memories)

  def label(path, leaf):
    name = sharding.leaf_name(path)
    if not sharding.is_boxed(leaf):
      raise ValueError(f'parameter {name} has no axis names: use nn.with_logical_partitioning')
    if name in frozen:
      return FROZEN
    if not table.is_table(leaf):
      return DENSE
    for entry in path:
      if entry.key in table_labels:
        return entry.key
    return TABLE

  return jax.tree_util.tree_map_with_path(label, params, is_leaf=sharding.is_boxed)


def table_optimizers(memories: Sequence[TableMemoryConfig]) -> dict[str, str]:
  """Returns the name of the optimizer of each label of tables."""
  optimizers = {TABLE: 'adagrad'}
  for i, memory in enumerate(memories):
    if has_own_optimizer(memory):
      optimizers[_module_name(i, memory)] = memory.optimizer
  return optimizers


def _module_name(number: int, memory: TableMemoryConfig) -> str:
  """Returns the name of the module with the table of a memory."""
  if isinstance(memory, ProductMemoryConfig):
    return product_memory.NAME
  return ngram_memory.table_module(number, memory)


def has_own_optimizer(memory: TableMemoryConfig) -> bool:
  """Whether a memory has an optimizer other than `ngram_table`."""
  return memory.optimizer != 'adagrad' or memory.learning_rate_factor is not None


def make(
  config: experiment.OptimizerConfig,
  steps: int,
  labels: Any,
  memories: Sequence[TableMemoryConfig] = (),
  decay_mask: Any = None,
  matrices: Mapping[str, muon.Kernel] | None = None,
  rate_factors: Mapping[str, float] | None = None,
) -> optax.GradientTransformation:
  """Returns the optimizer: clipped gradients for dense weights, Adagrad for most n-gram tables.

  The clipped norm excludes table gradients: the layer norm of tiny table rows multiplies them by
  hundreds, and clipping would scale the dense gradients to almost 0. Spans are clipped to [0, 1].

  Args:
    config: the optimizer config.
    steps: number of steps of the run, for the schedule.
    labels: label of every trained parameter.
    memories: memories of the model with tables; each may have its own optimizer.
    decay_mask: whether each trained parameter decays, see `weight_decay.mask`. None: all dense
      weights do.
    matrices: the matrices of Muon, see `muon.find_matrices`; None for another algorithm.
    rate_factors: factors of the learning rates of parameters, by name, see `models.width_rule`.
  """
  fraction = schedule.make(config, steps)
  optimizers = {
    DENSE: dense.make(config, fraction, decay_mask, matrices, rate_factors or {}),
    TABLE: tables.make('adagrad', config, fraction),
  }
  for i, memory in enumerate(memories):
    if has_own_optimizer(memory):
      optimizers[_module_name(i, memory)] = tables.make(
        memory.optimizer, config, fraction, memory.learning_rate_factor
      )

  partition = optax.partition(optimizers, labels)
  clip_spans = optax.stateless(spans.clip_updates)
  if not config.rates:
    return optax.chain(partition, clip_spans)
  return optax.chain(partition, _scale_groups(config.rates), clip_spans)


def _scale_groups(rates: Sequence[RateConfig]) -> optax.GradientTransformation:
  """Multiplies the updates of parameter groups by their learning rate factors."""
  factors = {rate.part: rate.factor for rate in rates}

  def scale(path, update):
    group = parameter_groups.group_of(sharding.leaf_name(path))
    factor = factors.get(group, 1)
    if row_gradient.is_row_gradient(update):
      return update.replace(values=factor * update.values)
    return factor * update

  def scale_all(updates, params=None):
    del params
    is_leaf = row_gradient.is_row_gradient
    return jax.tree_util.tree_map_with_path(scale, updates, is_leaf=is_leaf)

  return optax.stateless(scale_all)


def leaves_by_label(labels: Any, tree: Any) -> dict[str, list[Any]]:
  """Groups the leaves of a tree of parameters or gradients by their labels."""
  groups: dict[str, list[Any]] = {}

  def add(label, leaf):
    groups.setdefault(label, []).append(leaf)

  jax.tree.map(add, labels, tree)
  return groups
