"""Checks that a training fits into memory, from shapes alone: nothing is allocated.

Two things are compared with the memory of the devices and of the machine. What has to be there
between two steps, the train state and the batch of one call, is known before anything is written.
The temporary arrays of a step, such as activations and gradients, are known once it is compiled.
"""

import logging
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, sharding
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.inference import programs
from ngrammer_jax.models import language_model
from ngrammer_jax.training import state as train_state

# Limits of a container, by version of cgroups. A file holds bytes, or the word max.
CONTAINER_LIMITS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')
TRAINING_ARRAYS = 'parameters, optimizer state, memory and batch'


class MemoryLimit(NamedTuple):
  """The size of the memory of a device or a machine.

  Attributes:
    name: the owner of the memory, for messages: `this machine`.
    size: size in bytes; None: not known.
    devices: number of devices whose shards are in it.
  """

  name: str
  size: int | None
  devices: int


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
  device, machine = device_memory(mesh), machine_memory(mesh)
  on_host = {name: leaf for name, leaf in arrays.items() if sharding.is_on_host(leaf)}
  if device.name == machine.name:  # the devices are the processor
    _check_fits(arrays, machine)
  else:
    _check_fits({name: leaf for name, leaf in arrays.items() if name not in on_host}, device)
    _check_fits(on_host, machine)


def check_parameters(abstract: Any, mesh: jax.sharding.Mesh) -> None:
  """Raises BadInput if parameters, of which shapes and shardings are given, do not fit."""
  _check_fits(checksums.named_leaves(abstract), device_memory(mesh), 'the parameters')


def warn_of_temporaries(state: train_state.TrainState, compiled: jax.stages.Compiled) -> None:
  """Warns if the train state and the temporary arrays of a compiled call exceed the memory."""
  memory = device_memory(state.step.sharding.mesh)
  if memory.size is None or compiled.memory_analysis() is None:  # the backend does not say
    return
  needed = memory.devices * peak_bytes(compiled)
  if needed > memory.size:
    logging.warning(
      'a step needs %s of memory, with activations and gradients, but %s has %s: if it fails, %s',
      *(format_bytes(needed), memory.name, format_bytes(memory.size), errors.LESS_MEMORY),
    )


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes of a device that a program needs: arguments, temporary arrays, results."""
  m = compiled.memory_analysis()
  results = m.output_size_in_bytes - m.alias_size_in_bytes  # others reuse donated arguments
  return m.argument_size_in_bytes + m.temp_size_in_bytes + results


def device_memory(mesh: jax.sharding.Mesh) -> MemoryLimit:
  """Returns the memory of one device of a mesh; on CPU that of the machine, for all of them."""
  device = mesh.local_devices[0]
  if device.platform == 'cpu':
    return machine_memory(mesh)
  stats = device.memory_stats() or {}
  return MemoryLimit(f'a device ({device.device_kind})', stats.get('bytes_limit'), 1)


def machine_memory(mesh: jax.sharding.Mesh) -> MemoryLimit:
  """Returns the memory of this machine, or the part of it that its container may use."""
  sizes = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
  for path in map(pathlib.Path, CONTAINER_LIMITS):
    text = path.read_text().strip() if path.exists() else ''
    sizes += [int(text)] if text.isdecimal() else []
  return MemoryLimit('this machine', min(sizes), len(mesh.local_devices))


def format_bytes(size: float) -> str:
  """Formats a size in GiB, small ones in MiB."""
  return f'{size / 2**20:,.1f} MiB' if size < 2**30 else f'{size / 2**30:,.1f} GiB'


def _check_fits(arrays: dict[str, Any], memory: MemoryLimit, what: str = TRAINING_ARRAYS) -> None:
  needed = memory.devices * sum(map(_shard_bytes, arrays.values()))
  if memory.size is None or needed <= memory.size:
    return
  largest = max(arrays, key=lambda name: _shard_bytes(arrays[name]))
  shape = list(arrays[largest].shape)
  raise errors.BadInput(
    f'{what} need {format_bytes(needed)}, but {memory.name} '
    f'has {format_bytes(memory.size)}: the largest array is {largest} {shape}; use smaller sizes, '
    f'or more devices with mesh.fsdp or mesh.model'
  )


def _shard_bytes(leaf: Any) -> int:
  """Returns the bytes of an array on one device."""
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


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
