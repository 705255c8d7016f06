"""The trained and the frozen parts of a model, by the names in its config."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, sharding
from ngrammer_jax.models import language_model, model_variables, parameter_groups
from ngrammer_jax.optimizers import muon


def check(
  config: experiment.Config, vocabulary_size: int, source_dtypes: Mapping[str, np.dtype]
) -> None:
  """Checks the trained parts of the model, without a device.

  Args:
    config: the experiment.
    vocabulary_size: V.
    source_dtypes: dtype of every initial parameter from another run, by name.

  Raises:
    BadInput: the model lacks a part named in the config, nothing is trained, or Muon has no matrix
      to train.
  """
  optimizer = config.optimizer
  if not optimizer.rates and 'all' in optimizer.train:
    return  # blocks have matrices
  model_config = dataclasses.replace(config.model, dtype='float32')  # `auto` asks for the device
  with sharding.without_devices():
    model = language_model.build(model_config, vocabulary_size)
    params = model_variables.abstract(model)['params']
  frozen = frozen_parameters(optimizer, params, source_dtypes)
  matrices(optimizer, params, frozen)


def matrices(
  optimizer: experiment.OptimizerConfig, params: Any, frozen: Mapping[str, np.dtype]
) -> dict[str, muon.Kernel] | None:
  """Returns the matrices trained by Muon; None for other algorithms.

  Raises:
    BadInput: Muon has no matrix to train.
  """
  if optimizer.algorithm != 'muon':
    return None
  trained_matrices = muon.find_matrices(params, frozen)
  if not trained_matrices:
    raise errors.BadInput(
      f"optimizer.algorithm='muon' is for the matrices of blocks, and "
      f"optimizer.train={optimizer.train} has none: use 'adam', or name blocks in optimizer.train"
    )
  return trained_matrices


def frozen_parameters(
  optimizer: experiment.OptimizerConfig, params: Any, source_dtypes: Mapping[str, np.dtype]
) -> dict[str, np.dtype]:
  """Returns the dtype of every frozen parameter, by name.

  Args:
    optimizer: config of the optimizer, with the names of trained parts.
    params: the abstract parameters.
    source_dtypes: dtype of every initial parameter from another run, by name.

  Raises:
    BadInput: the model does not have a part named in the config.
  """
  parts = [*optimizer.train, *(rate.part for rate in optimizer.rates)]
  parameter_groups.check_names(parts, params)
  return parameter_groups.frozen(optimizer.train, params, source_dtypes)
