"""The size of a model without allocation: parameters, parameters in tables, FLOPs per token."""

import dataclasses
import functools
from typing import NamedTuple

from flax import linen as nn

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import flops


class ModelSize(NamedTuple):
  """The size of a model.

  Attributes:
    parameters: number of parameters. Values without gradient, such as centroids, are not counted.
    in_tables: number of parameters in tables (looked up instead of multiplied).
  """

  parameters: int
  in_tables: int

  def format(self) -> str:
    """Formats both numbers."""
    return f'{self.parameters:,}, {self.in_tables:,} of them in tables'


@functools.lru_cache
def count(config: model_config.ModelConfig, vocabulary_size: int) -> ModelSize:
  """Returns the size of a model, from the shapes of its parameters."""
  with sharding.without_devices():
    # `auto` asks for the device
    model = language_model.build(dataclasses.replace(config, dtype='float32'), vocabulary_size)
    params = model_variables.abstract(model)['params']
  labels = partition.labels(params, config.table_memories())
  groups = partition.leaves_by_label(labels, nn.unbox(params))
  total = model_variables.count_elements(params)
  dense = model_variables.count_elements(groups.get(partition.DENSE, []))
  return ModelSize(total, total - dense)


@functools.lru_cache
def count_flops(
  config: model_config.ModelConfig, vocabulary_size: int, batch_size: int, length: int
) -> flops.ModelFlops:
  """Returns the FLOPs of a model on rows of a segment, see `flops.count`."""
  model = language_model.build(config, vocabulary_size)
  return flops.count(model, model_variables.abstract(model), batch_size, length)


def format_flops(flops_of_model: flops.ModelFlops, model: model_config.ModelConfig) -> str:
  """Formats the FLOPs of a token, such as '5.58 MFLOPs in the forward pass'."""
  number = float(flops_of_model.forward())
  note = ' in the forward pass'
  if model.span is not None:
    note += ', with the whole span'
  for unit, size in (('T', 1e12), ('G', 1e9), ('M', 1e6)):
    if number >= size:
      return f'{number / size:.3g} {unit}FLOPs{note}'
  return f'{number:,.0f} FLOPs{note}'
