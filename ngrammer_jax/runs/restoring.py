"""The checkpoint of a run, and its arrays on the devices."""

import contextlib
import logging
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import numpy as np

from ngrammer_jax import errors, sharding
from ngrammer_jax.checkpoints import checksums, frozen, manifest, reader
from ngrammer_jax.config import mesh as mesh_config
from ngrammer_jax.models import host_tables, model_variables
from ngrammer_jax.runs import exported
from ngrammer_jax.runs.opened_run import OpenedRun
from ngrammer_jax.system import hosts


def make_mesh(config: mesh_config.MeshConfig) -> jax.sharding.Mesh:
  """Returns the mesh of a config, or one with all devices along `data` if they do not fit."""
  try:
    return sharding.make_mesh(config.data, config.fsdp, config.model)
  except errors.BadInput as error:
    logging.info('%s; using all of them along mesh.data', error)
    return sharding.make_mesh()


def find_checkpoint(run: OpenedRun) -> int | None:
  """Returns the step of the checkpoint; see `Run.find_checkpoint`."""
  workdir = run.workdir
  if run.is_exported:
    return None
  steps, best = hosts.broadcast([reader.steps(workdir), reader.best_step(workdir)])
  if not steps:
    raise errors.BadInput(f'--workdir={workdir} has no checkpoint yet')
  step = {'newest': steps[-1], 'best': best}.get(run.step, run.step)
  if step not in steps:
    raise errors.BadInput(
      f'--step={run.step}: --workdir={workdir} has no such checkpoint; available: '
      f'{", ".join(map(str, steps))}'
    )
  return step


def parameter_dtypes(run: OpenedRun) -> dict[str, np.dtype]:
  """Returns the dtype of each parameter by name."""
  params = checksums.named_leaves(nn.unbox(run.abstract_parameters))
  dtypes = {name: leaf.dtype for name, leaf in params.items()}
  return dtypes | frozen.dtypes(run.workdir)


def abstract_variables(run: OpenedRun) -> dict[str, Any]:
  """Returns shapes, dtypes and shardings of the stored `params` and `codebook`."""
  boxed = model_variables.abstract(run.model)
  boxed = {'params': boxed['params'], 'codebook': boxed.get('codebook', {})}
  shardings = sharding.shardings(boxed, run.mesh)
  unboxed = nn.unbox(boxed)
  dtypes = {
    'params': traverse_util.unflatten_dict(run.parameter_dtypes, sep='/'),
    'codebook': jax.tree.map(lambda leaf: leaf.dtype, unboxed['codebook']),
  }

  def as_stored(leaf, dtype, leaf_sharding):
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf_sharding)

  return jax.tree.map(as_stored, unboxed, dtypes, shardings)


def restore_variables(run: OpenedRun) -> model_variables.ModelVariables:
  """Restores only the variables of the checkpoint.

  Raises:
    BadInput: there is no checkpoint, it is damaged, or the devices cannot use its tables.
  """
  state = vars(run).get('state')
  if state is not None:  # it was restored before, and has them
    return model_variables.ModelVariables(int(state.step), state.params, state.codebook)
  step = run.find_checkpoint()
  _ = run.vocabulary  # a damaged one is refused before devices are used
  host_tables.check_processor(run.config.model)
  abstract = abstract_variables(run)
  if step is None:
    return exported.restore(run.workdir, run.step, abstract)
  if run.step == 'newest':
    return reader.restore_newest_variables(run.workdir, abstract)
  with refuse_corrupt(run, step):
    return reader.restore_variables(run.workdir, step, abstract)


def refuse_corrupt(run: OpenedRun, step: int) -> contextlib.AbstractContextManager[None]:
  """Raises BadInput if the checkpoint of an explicitly requested step is damaged."""
  return manifest.refuse_corrupt(
    f'--step={run.step}: checkpoint {step} is damaged', 'use another step'
  )
