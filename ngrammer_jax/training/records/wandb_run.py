"""The Weights & Biases run with the values of metrics.jsonl.

<workdir>/wandb.json   id of the run, and its workdir
<workdir>/wandb/       files of wandb, all records of a run in offline mode (WANDB_MODE=offline)

A resumed run has the same id; a copy of the workdir, such as another decay of one trunk, gets its
own run. On resume metrics.jsonl is cut to the restored step. wandb cannot delete values, so
repeated steps are not uploaded again: they have the same values.
"""

from collections.abc import Collection
import dataclasses
import importlib.util
import json
import logging
import os
import pathlib
import subprocess
import uuid

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.system import file_errors, files, json_files, storage

FILE = 'wandb.json'
PROJECT = 'ngrammer_jax'  # unless WANDB_PROJECT names another one


def check_package() -> None:
  """Raises BadInput if wandb is not installed."""
  if importlib.util.find_spec('wandb') is None:
    raise errors.BadInput(
      "training.log_to needs wandb, but it is not installed: pip install 'ngrammer_jax[wandb]', or "
      'leave it out'
    )


class WandbRun:
  """A run of wandb, new or resumed. The steps are its x axis.

  Args:
    workdir: run directory.
    folder: local folder for the files of wandb.
    config: the experiment.
    recorded: step and name of each value in the run beyond the restored step.

  Raises:
    BadInput: wandb is not set up, such as without an API key. Other failures to start, such as of
      the network, are warnings, so a restarted run continues.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    folder: pathlib.Path,
    config: experiment.Config,
    recorded: Collection[tuple[int, str]],
  ):
    import wandb  # an extra

    run_id, is_new = _run_id(workdir)
    self._recorded = set() if is_new else set(recorded)
    settings = dataclasses.asdict(config)
    commit = _git_commit()
    if commit is not None:
      settings['git_commit'] = commit
    try:
      self._run = wandb.init(
        project=os.environ.get('WANDB_PROJECT', PROJECT),
        name=os.environ.get('WANDB_NAME', workdir.name),
        id=run_id,
        resume='allow',
        dir=str(folder),
        config=settings,
        allow_val_change=True,
        settings=wandb.Settings(console='off'),
      )
      self._run.define_metric('step')
      self._run.define_metric('*', step_metric='step')
    except wandb.errors.UsageError as error:
      raise errors.BadInput(
        f'wandb cannot start: {error}; run `wandb login`, set WANDB_MODE=offline, or leave it out '
        f'of training.log_to'
      ) from error
    except Exception as error:  # it raises many classes
      logging.warning('wandb cannot start, and gets no values: %s', error)
      self._run = None

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Writes the values of a step that are not in the run yet."""
    new = {name: value for name, value in values.items() if (step, name) not in self._recorded}
    if new and self._run is not None:
      try:
        self._run.log({'step': step, **new})
      except Exception as error:  # it must not end the training
        logging.warning('wandb gets no further values: %s', error)
        self._run = None

  def close(self) -> None:
    """Uploads the remaining values."""
    if self._run is not None:
      try:
        self._run.finish()
      except Exception as error:  # this must not change the exit status
        logging.warning('wandb cannot be closed: %s', error)


def _run_id(workdir: pathlib.Path) -> tuple[str, bool]:
  """Returns the id of the run of a workdir, and whether it is new."""
  path = workdir / FILE
  if not storage.is_remote(workdir):
    workdir = workdir.resolve()
  location = str(workdir)
  stored = {}
  if path.exists():
    with file_errors.translate_damage(path, 'remove it to start another run of wandb'):
      stored = json_files.read(path)
  if stored.get('workdir') == location:
    return stored['id'], False
  run_id = uuid.uuid4().hex[:8]
  files.write(path, json.dumps({'id': run_id, 'workdir': location}) + '\n')
  return run_id, True


def _git_commit() -> str | None:
  """Returns the commit of the working folder; None if it is no git repository."""
  try:
    command = ['git', 'rev-parse', 'HEAD']
    result = subprocess.run(command, capture_output=True, check=True, text=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return result.stdout.strip()
