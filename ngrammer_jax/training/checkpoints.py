"""Checkpoints of the train state: written in the background, restored onto any mesh."""

import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from ngrammer_jax import errors


class Checkpoints:
  """The checkpoints of a run, in `<workdir>/checkpoints/<step>`."""

  def __init__(self, workdir: pathlib.Path, keep: int = 3):
    self._folder = workdir / 'checkpoints'
    policy = ocp.checkpoint_managers.LatestN(keep)
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    self._manager = ocp.CheckpointManager(self._folder.resolve(), options=options)

  def latest(self) -> int | None:
    """The newest complete step, or None."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any) -> None:
    """Starts writing a checkpoint and returns; the state may be donated afterwards."""
    if step == self._manager.latest_step():
      return
    if jax.default_backend() == 'cpu':
      # On CPU the "copy to the host" is the device buffer itself, which a donated call
      # would overwrite while it is being written.
      state = jax.tree.map(jnp.copy, state)
    self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))

  def restore(self, step: int, abstract: Any) -> Any:
    """The state of a step, on the shardings of the abstract state.

    Raises:
      BadInput: the checkpoint cannot be read, or is of another model.
    """
    logging.info('restoring step %d from %s', step, self._folder)
    try:
      args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
      return self._manager.restore(step, args=args)['state']
    except (ValueError, KeyError, OSError) as error:
      reason = str(error).strip().splitlines()
      raise errors.BadInput(
        f'{self._folder}/{step} cannot be restored, it is damaged or of another model: '
        f'{reason[0] if reason else type(error).__name__}. Without that folder the run goes on '
        f'from the checkpoint before'
      ) from error

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *exception) -> None:
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()
    self._manager.close()
