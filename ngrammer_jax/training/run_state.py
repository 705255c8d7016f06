"""The train state of a run, with optimizer state and memory: `Run.state`."""

import jax.numpy as jnp

from ngrammer_jax import sharding
from ngrammer_jax.checkpoints import frozen, reader
from ngrammer_jax.runs import restoring
from ngrammer_jax.runs.opened_run import OpenedRun
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training.state import TrainState


def restore(run: OpenedRun) -> TrainState:
  """Restores the whole train state of the checkpoint of a run.

  An exported run and a published model have no optimizer state and no memory.

  Raises:
    BadInput: there is no checkpoint, or it is damaged.
  """
  step = run.find_checkpoint()
  if step is None:
    number, params, codebook = run.restored
    return TrainState(jnp.int32(number), params, codebook, {}, {})
  base = frozen.dtypes(run.workdir)
  programs = training_programs.Programs(run.config, run.vocabulary_size, run.mesh, base)
  # The batch size of training need not be divisible by the devices of an evaluation.
  memory = sharding.abstract(programs.abstract.memory, sharding.replicated(run.mesh))
  abstract = programs.abstract.replace(memory=memory)
  if run.step == 'newest':
    _, state = reader.restore_newest(run.workdir, abstract)
    return state
  with restoring.refuse_corrupt(run, step):
    return reader.restore(run.workdir, step, abstract)
