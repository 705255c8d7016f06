"""Checks that training fits into memory, from shapes alone without allocation.

Two sizes are compared with the memory of the devices and of the machine. The first is the train
state and the batch of one call, known before anything is written. The second is the temporary
arrays of a step, such as activations and gradients, known after compilation.
For a large batch they are estimated before.
"""

from collections.abc import Collection
import logging
import math
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, host_arrays, memory_limits, sharding
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.inference import programs
from ngrammer_jax.models import language_model, parameter_groups
from ngrammer_jax.training import state as train_state

SPARE_SHARE = 0.03  # of a device, for memory not counted by a compiled program
# Of the memory: a batch with larger logits and inputs of blocks is traced for its activations.
TRACED_SHARE = 0.1
TRAINING_ARRAYS = 'parameters, optimizer state, memory and batch'


def check_training_fits(config: experiment.Config, state: train_state.TrainState) -> None:
  """Raises BadInput for a model or a batch that is too large.

  Args:
    config: the experiment.
    state: the abstract train state, with shardings.
  """
  mesh = state.step.sharding.mesh
  t = config.training
  shape = t.segments_per_call, t.batch_size, t.segment_length
  batch = programs.abstract_segment(shape, sharding.rows_sharding(mesh, axis=1))
  call = checksums.named_leaves({'batch': batch})
  arrays = checksums.named_leaves(state) | call | _validation_arrays(config, mesh)
  device = memory_limits.device_memory(mesh)
  machine = memory_limits.machine_memory(mesh)
  if memory_limits.devices_are_processor(mesh):
    memory_limits.check_fits(arrays, machine, TRAINING_ARRAYS)
    return
  on_host = {name: leaf for name, leaf in arrays.items() if host_arrays.is_on_host(leaf)}
  on_device = {name: leaf for name, leaf in arrays.items() if name not in on_host}
  memory_limits.check_fits(on_device, device, TRAINING_ARRAYS)
  memory_limits.check_fits(on_host, machine, TRAINING_ARRAYS)


def warn_of_activations(
  config: experiment.Config,
  vocabulary_size: int,
  state: train_state.TrainState,
  frozen: Collection[str],
) -> None:
  """Warns before compilation if a step will probably exceed the memory.

  Args: see `estimate_step_bytes`, which is only called for a large batch.
  """
  mesh = state.step.sharding.mesh
  memory = memory_limits.device_memory(mesh)
  if memory.size is None:
    return
  if config.model.remat == 'auto' and not memory_limits.devices_are_processor(mesh):
    return  # `auto` compiles what fits
  t = config.training
  model = config.model
  logits = min(vocabulary_size, model.vocabulary_chunk or vocabulary_size)
  features = logits + model.layers * model.width
  tokens = t.tokens_per_step // t.microbatches
  available = memory.size * mesh.size / memory.devices
  if 4 * tokens * features < TRACED_SHARE * available:
    return
  needed = estimate_step_bytes(config, vocabulary_size, state, frozen)
  if needed > available:
    logging.warning(
      'a step will need about %s of memory for the train state, gradients and activations, but %s '
      'has %s: lower training.batch_size=%s or training.segment_length=%s',
      memory_limits.format_bytes(needed * memory.devices / mesh.size),
      memory.name,
      memory_limits.format_bytes(memory.size),
      t.batch_size,
      f'{t.segment_length:,}',
    )


def estimate_step_bytes(
  config: experiment.Config,
  vocabulary_size: int,
  state: train_state.TrainState,
  frozen: Collection[str],
) -> int:
  """Returns the bytes of the arrays of a step on all devices, from shapes alone.

  The arrays are the train state, the gradient, and the residuals of the backward pass. Replicated
  arrays count once; a compiled program may keep fewer or more. Tables in host memory count if the
  devices are the processor.

  Args:
    config: the experiment.
    vocabulary_size: V.
    state: the abstract train state, with shardings.
    frozen: names of the frozen parameters.
  """
  mesh = state.step.sharding.mesh
  model = language_model.build(config.model, vocabulary_size, jit_layers=True)
  variables = state.variables
  trained = parameter_groups.without(variables['params'], frozen)
  t = config.training
  rows = t.batch_size // t.microbatches
  memory = jax.eval_shape(lambda: language_model.empty_memory(config.model, rows))
  tokens = jax.ShapeDtypeStruct((rows, t.segment_length), np.int32)

  def read_by_backward(variables, trained, memory, tokens_BxT):
    def loss(trained):
      params = parameter_groups.merge(variables['params'], trained)
      (hidden, *_), _ = model.apply(
        variables | {'params': params},
        tokens_BxT,
        memory,
        train=True,
        rngs={'dropout': jax.random.key(0)},
        mutable=['codebook'],
      )
      scores = model.apply({'params': params}, hidden, tokens_BxT, method='scores', train=True)
      return scores.nll_BxT.sum()

    _, pull_back = jax.vjp(loss, trained)
    return jax.tree.leaves(pull_back)

  with sharding.use(mesh):
    shapes = sharding.abstract((variables, trained), None)
    residuals = jax.eval_shape(read_by_backward, *shapes, memory, tokens)
  updated = jax.tree.leaves((state.opt_state, trained))
  if not memory_limits.devices_are_processor(mesh):
    updated = [leaf for leaf in updated if not host_arrays.is_on_host(leaf)]
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (*residuals, *updated))


def warn_of_temporaries(state: train_state.TrainState, compiled: jax.stages.Compiled) -> None:
  """Warns if the train state and the temporary arrays of a compiled call exceed the memory."""
  memory = memory_limits.device_memory(state.step.sharding.mesh)
  if memory.size is None or compiled.memory_analysis() is None:  # the backend does not say
    return
  needed = memory.devices * peak_bytes(compiled)
  if needed > memory.size:
    logging.warning(
      'a step needs %s of memory, with activations and gradients, but %s has %s: if it fails, %s',
      memory_limits.format_bytes(needed),
      memory.name,
      memory_limits.format_bytes(memory.size),
      errors.LESS_MEMORY,
    )


def fits(compiled: jax.stages.Compiled, memory: memory_limits.MemoryLimit) -> bool:
  """Whether a program leaves SPARE_SHARE of the memory of a device."""
  return peak_bytes(compiled) <= (1 - SPARE_SHARE) * memory.size


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes of a program on a device: arguments, temporary arrays, results."""
  analysis = compiled.memory_analysis()
  # The other results reuse donated arguments.
  results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + results


def _validation_arrays(config: experiment.Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """Returns the abstract arrays of a segment of validation and of its memory, by name."""
  model = config.evaluation_model()
  rows = sharding.round_rows(min(config.training.batch_size, config.evaluation.streams), mesh)
  by_row = sharding.rows_sharding(mesh)
  segment = programs.abstract_segment((rows, config.evaluation_length()), by_row)
  memory = {}
  # Learned spans shorten the cache: its size is not known yet.
  if model.memory is not None and model.span is None and model.memory.length > 0:
    slots = model.memory.length
    memory = jax.eval_shape(lambda: language_model.empty_memory(model, rows, slots))
  arrays = checksums.named_leaves({'evaluation': sharding.abstract(memory, by_row)})
  return arrays | checksums.named_leaves({'evaluation': segment})
