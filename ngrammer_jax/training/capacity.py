"""Checks that a training fits into memory, from shapes alone: nothing is allocated.

Two things are compared with the memory of the devices and of the machine. What has to be there
between two steps, the train state and the batch of one call, is known before anything is written.
The temporary arrays of a step, such as activations and gradients, are known once it is compiled.
"""

import logging
from typing import Any

import jax

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, memory_limits, sharding
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.inference import programs
from ngrammer_jax.models import language_model
from ngrammer_jax.training import state as train_state

TRAINING_ARRAYS = 'parameters, optimizer state, memory and batch'


def check(config: experiment.Config, state: train_state.TrainState) -> None:
  """Raises BadInput for a model or a batch that is too large.

  Args:
    config: the experiment.
    state: the abstract train state, with shardings.
  """
  mesh = state.step.sharding.mesh
  t, by_row = config.training, sharding.rows_sharding(mesh, axis=1)
  shape = t.segments_per_call, t.batch_size, t.segment_length
  call = checksums.named_leaves({'batch': programs.abstract_segment(shape, by_row)})
  arrays = checksums.named_leaves(state) | call | _evaluation(config, mesh)
  device, machine = memory_limits.device_memory(mesh), memory_limits.machine_memory(mesh)
  on_host = {name: leaf for name, leaf in arrays.items() if sharding.is_on_host(leaf)}
  if device.name == machine.name:  # the devices are the processor
    memory_limits.check_fits(arrays, machine, TRAINING_ARRAYS)
  else:
    on_device = {name: leaf for name, leaf in arrays.items() if name not in on_host}
    memory_limits.check_fits(on_device, device, TRAINING_ARRAYS)
    memory_limits.check_fits(on_host, machine, TRAINING_ARRAYS)


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


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes of a device that a program needs: arguments, temporary arrays, results."""
  m = compiled.memory_analysis()
  results = m.output_size_in_bytes - m.alias_size_in_bytes  # others reuse donated arguments
  return m.argument_size_in_bytes + m.temp_size_in_bytes + results


def _evaluation(config: experiment.Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """Returns the abstract arrays of a segment of validation and of its memory, by name."""
  model, by_row = config.evaluation_model(), sharding.rows_sharding(mesh)
  rows = sharding.round_rows(min(config.training.batch_size, config.evaluation.streams), mesh)
  # Learned spans shorten the cache: its size is not known yet.
  slots = 0 if model.memory is None or model.span is not None else model.memory.length
  memory = jax.eval_shape(lambda: language_model.empty_memory(model, rows, slots) if slots else {})
  segment = programs.abstract_segment((rows, config.evaluation_length()), by_row)
  arrays = checksums.named_leaves({'evaluation': sharding.abstract(memory, by_row)})
  return arrays | checksums.named_leaves({'evaluation': segment})
