"""Preparation of training before its first step: data, devices and programs."""

import dataclasses
import logging
import pathlib

import jax

import ngrammer_jax
from ngrammer_jax import config as experiment
from ngrammer_jax import errors, sharding
from ngrammer_jax.checkpoints import frozen, reader, workdirs
from ngrammer_jax.config import kernels
from ngrammer_jax.layers.attention import fused
from ngrammer_jax.models import precision
from ngrammer_jax.system import hosts
from ngrammer_jax.training import capacity, compiler, losses, train_task, trained_parts
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training.records import wandb_run


def prepare(
  config: experiment.Config, workdir: pathlib.Path, make_task: train_task.MakeTask
) -> tuple[experiment.Config, train_task.TrainTask, training_programs.Programs]:
  """Returns the config, the data and the programs of a run, after all checks of the input.

  The config has the name of the loss of the task.

  Raises:
    BadInput: the input is invalid.
  """
  if 'wandb' in config.training.log_to:
    wandb_run.check_package()
  # Data: checked and tokenised before any device is touched.
  if hosts.is_primary():
    for warning in config.warnings():
      logging.warning('%s', warning)
  with hosts.collective_errors():
    workdirs.check_workdir(workdir, config)
    task = make_task(config)
    config = _with_loss_name(config, train_task.loss_name(task))
    workdirs.check_loss(workdir, config)
    task = train_task.add_defaults(task)
    workdirs.check_text(workdir, config, task.content_hash)
    config.model.check_vocabulary(task.vocabulary.size)
    _warn_of_unequal_sizes(config, task.vocabulary.size)

  # Devices and programs.
  has_checkpoint = hosts.broadcast(bool(reader.steps(workdir)))
  with hosts.collective_errors():
    source_dtypes = frozen.dtypes(workdir) if has_checkpoint else task.source_dtypes
    trained_parts.check(config, task.vocabulary.size, source_dtypes)
  mesh = _make_mesh(config)
  compiler.check_options(config.training, mesh)
  loss = task.loss
  if config.training.label_smoothing:
    loss = losses.smoothed(config.training.label_smoothing)
  programs = training_programs.Programs(config, task.vocabulary.size, mesh, source_dtypes, loss)
  with hosts.collective_errors():  # hosts may differ in their memory
    capacity.check_training_fits(config, programs.abstract)
  if hosts.is_primary():
    capacity.warn_of_activations(config, task.vocabulary.size, programs.abstract, programs.frozen)
  return config, task, programs


def _with_loss_name(config: experiment.Config, name: str) -> experiment.Config:
  """Returns the config with the name of the loss of the task.

  Raises:
    BadInput: the config has another name, or smooths labels of a task with a loss of its own.
  """
  t = config.training
  if t.loss not in (None, name):
    raise errors.BadInput(
      f'training.loss={t.loss!r}, but the loss of the task is {name!r}: use that task, or None'
    )
  if t.label_smoothing and name != train_task.DEFAULT_LOSS:
    raise errors.BadInput(
      f'training.label_smoothing={t.label_smoothing} is for the loss of the next token, but the '
      f'task has a loss of its own, {name!r}: use 0, and smooth the labels there'
    )
  return dataclasses.replace(config, training=dataclasses.replace(t, loss=name))


def _warn_of_unequal_sizes(config: experiment.Config, vocabulary_size: int) -> None:
  """Warns if a model no longer matches the size of its comparison models."""
  matched = config.data.matched_vocabulary_size
  if matched not in (None, vocabulary_size) and hosts.is_primary():
    logging.warning(
      'this config has as many parameters as those it is compared with for %s token ids, not for '
      '%s: use --match_parameters (see docs/your_own_text.md)',
      f'{matched:,}',
      f'{vocabulary_size:,}',
    )


def _make_mesh(config: experiment.Config) -> jax.sharding.Mesh:
  """Returns the mesh of all devices. Raises BadInput if the batch or the kernel does not fit it."""
  t = config.training
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
  sharding.check_batch('training.batch_size', t.batch_size, mesh, t.microbatches)
  _check_kernel(config, mesh)
  devices = f'{jax.device_count()} {jax.devices()[0].device_kind}'
  sizes = ' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  logging.info(f'ngrammer_jax {ngrammer_jax.__version__} on {devices}, mesh {sizes}')
  return mesh


def _check_kernel(config: experiment.Config, mesh: jax.sharding.Mesh) -> None:
  """Raises BadInput if the kernel of the config cannot attend to the segments of training.

  Logs options that slow attention down.
  """
  model = config.model
  if model.recurrent is not None:
    return
  needs, workload = _attention(config, mesh)
  reason = model.kernel and kernels.unsupported_reason(model.kernel, needs, workload)
  if reason:
    raise errors.BadInput(
      f'model.kernel={model.kernel!r} {reason}: use None for automatic selection'
    )
  for note in speed_notes(config, mesh):
    logging.info('%s', note)


def speed_notes(config: experiment.Config, mesh: jax.sharding.Mesh) -> list[str]:
  """Returns one sentence for each option that slows the attention of a Transformer down."""
  model = config.model
  return kernels.speed_notes(model.kernel, *_attention(config, mesh), model.scan_layers)


def _attention(
  config: experiment.Config, mesh: jax.sharding.Mesh
) -> tuple[frozenset[str], kernels.Workload]:
  """Returns the required attention features in training, and the workload."""
  model = config.model
  t = config.training
  needs = frozenset(model.attention_needs())
  shape = t.batch_size // t.microbatches, t.segment_length, model.heads, model.head_features
  with sharding.use(mesh):
    query = jax.ShapeDtypeStruct(shape, precision.compute_dtype(model))
    asks_for_cudnn = kernels.asks_for_cudnn(model.kernel, needs)
    workload = fused.workload(query, 0, model.context_key_heads, asks_for_cudnn)
  return needs, workload
