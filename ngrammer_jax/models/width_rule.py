"""The width rule `mup`: a learning rate tuned at a base width holds at other widths.

Table 8 of Yang et al. 2022 (arXiv 2203.03466), for Adam; r = base width / width. The output scale
is part of a parameter, so the model itself does not change: the final norm with tied embeddings,
otherwise the output matrix.

  parameter                                        initial value   learning rate
  linear maps with inputs that grow with width     x 1             x r
  embeddings multiplied by sqrt(width)             x 1             x sqrt(r)
  other embeddings                                 x 1 / sqrt(r)   x 1
  output matrix                                    x sqrt(r)       x r
  final norm, tied embeddings x sqrt(width)        x sqrt(r)       x sqrt(r)
  final norm, tied embeddings                      x r             x r
  all others                                       x 1             x 1

Without the rule, matrices have the variance 1 / inputs, and embeddings and the output matrix 1 /
width. Keep the head width constant, or let `model.attention.scale` fall as 1 / head width. Rows of
n-gram tables are like embeddings; their own optimizer is not part of the rule.
"""

import dataclasses
from typing import Any

import jax

from ngrammer_jax import sharding
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.optimizer import OptimizerConfig
from ngrammer_jax.layers import axis_names, parameter_kinds
from ngrammer_jax.models import initialization

_GROWING = ('embed', 'mlp', 'heads')  # axes that grow with the width


@dataclasses.dataclass(frozen=True)
class WidthFactors:
  """Factors of initial values and of learning rates, by parameter name; 1 for all others."""

  initial: dict[str, float]
  rate: dict[str, float]


def factors(model: ModelConfig, optimizer: OptimizerConfig, params: Any) -> WidthFactors:
  """Returns the factors of the rule; empty without `optimizer.width_rule`.

  Args:
    model: the model config.
    optimizer: the optimizer config.
    params: parameters in their `nn.LogicallyPartitioned` boxes, abstract or not.
  """
  result = WidthFactors({}, {})
  if optimizer.width_rule is None:
    return result
  r = optimizer.base_width / model.width
  embedding_rate = r**0.5 if model.scale_embeddings else 1.0
  for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=sharding.is_boxed):
    name = sharding.leaf_name(path)
    if name == 'embedding':
      result.initial[name] = embedding_rate / r**0.5
      result.rate[name] = embedding_rate
    elif name == 'softmax_weight':
      result.initial[name] = r**0.5
      result.rate[name] = r
    elif name.startswith('final_norm/') and model.tie_embeddings:
      result.initial[name] = result.rate[name] = r / embedding_rate
    elif _has_growing_inputs(axis_names.names_of(leaf)):
      result.rate[name] = r
  return result


def _has_growing_inputs(names: tuple[str | None, ...]) -> bool:
  """Whether a parameter with these axes is a linear map with inputs that grow with the width."""
  axes = parameter_kinds.of(names).axes
  return axes is not None and names[axes.inputs[0]] in _GROWING


def scale_initial(model: ModelConfig, factors: WidthFactors, params: Any) -> Any:
  """Returns the initial parameters scaled by the rule."""

  def scale(path, leaf):
    name = '/'.join(initialization.path_names(path))
    factor = factors.initial.get(name, 1.0)
    if name == 'final_norm/scale' and model.norm_offset:  # it holds the weights minus 1
      return factor * (1 + leaf) - 1
    return factor * leaf

  return jax.tree_util.tree_map_with_path(scale, params)
