"""Parameters with weight decay, `optimizer.weight_decay_on`.

It names kinds of parameters, see `layers.parameter_kinds`. Tables and spans do not decay; spans
have their own penalty.
"""

from typing import Any

import jax

from ngrammer_jax import sharding
from ngrammer_jax.config.optimizer import DEFAULT_DECAYING, OptimizerConfig
from ngrammer_jax.layers import axis_names, parameter_kinds
from ngrammer_jax.models import spans
from ngrammer_jax.optimizers import muon

KINDS = {  # that decay, by `optimizer.weight_decay_on`
  'matrices': ('matrix',),
  'matrices_and_embeddings': ('matrix', 'embedding'),
  'all': ('matrix', 'embedding', 'vector'),
}


def mask(config: OptimizerConfig, params: Any) -> Any:
  """Returns whether each parameter decays; all False without a weight decay.

  Args:
    config: the optimizer config.
    params: parameters in their `nn.LogicallyPartitioned` boxes, abstract or not.
  """
  kinds = KINDS[config.weight_decay_on or DEFAULT_DECAYING]

  def decays(path, leaf):
    if muon.is_matrix(path, leaf) and config.algorithm == 'muon':
      return of_matrices(config) > 0
    if not config.weight_decay or spans.is_span(path):
      return False
    return parameter_kinds.of(axis_names.names_of(leaf)).name in kinds

  return jax.tree_util.tree_map_with_path(decays, params, is_leaf=sharding.is_boxed)


def of_matrices(config: OptimizerConfig) -> float:
  """Returns the weight decay of Muon's matrices."""
  if config.muon is None or config.muon.weight_decay is None:
    return config.weight_decay
  return config.muon.weight_decay
