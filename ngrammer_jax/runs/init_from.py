"""Starts a training from another run, `init_from`: its parameters and codebooks, a new optimizer.

`init_from` is the workdir of a run, `pretrained:NAME` (see `pretrained_models`), or the folder of a
published model, with or without `hf:` before it.

<workdir>/begun_with.json   run and step of the checkpoint that the training started from
<workdir>/published.json    what else a published model says, for an export of the training
"""

from collections.abc import Mapping
import json
import logging
import pathlib

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, pretrained_models, runs
from ngrammer_jax.checkpoints import reader, workdirs
from ngrammer_jax.config import command_line, fields
from ngrammer_jax.data import vocabularies
from ngrammer_jax.runs import huggingface
from ngrammer_jax.system import files, hosts
from ngrammer_jax.training import state as train_state

RECORD = 'begun_with.json'


def open_run(init_from: str, step: int | str = 'newest') -> runs.Run:
  """Opens the run to start from. Raises BadInput if there is none."""
  init_from = init_from.removeprefix(command_line.PUBLISHED)
  name = init_from.removeprefix(pretrained_models.PREFIX)
  is_local = name == init_from and not files.is_remote(init_from)
  if is_local and not files.path(init_from).exists():
    raise errors.BadInput(f'init_from={init_from}: no such folder; expected the workdir of a run')
  try:
    return runs.load_run(name, step) if name == init_from else runs.load_pretrained(name)
  except errors.BadInput as error:
    raise errors.BadInput(f'init_from={init_from}: {error}') from error


def initial_state(
  init_from: str, workdir: pathlib.Path, state: train_state.TrainState
) -> train_state.TrainState:
  """Returns a new state with the parameters and the codebook of the newest checkpoint of a run.

  Step, optimizer state and memory stay new. The step of the checkpoint is recorded in the workdir,
  so that a repeated start uses the same checkpoint even if there is a newer one.

  Args:
    init_from: workdir of the run to start from, or `pretrained:NAME`.
    workdir: workdir of the run that starts.
    state: a randomly initialised state.
  """
  source = open_run(init_from, _recorded_step(init_from, workdir))
  if hosts.is_primary():
    workdirs.write_origin(workdir, source.origin)
  if isinstance(source, huggingface.PublishedRun):
    logging.info('starting from %s', init_from)
    return state.replace(params=source.load(state.params))
  pretrained = source.state
  record = {'init_from': init_from, 'step': int(pretrained.step)}
  if hosts.is_primary():
    files.write(workdir / RECORD, json.dumps(record) + '\n')
  message = 'starting from step %s of %s, with a new optimizer state'
  logging.info(message, f'{record["step"]:,}', init_from)
  # With the sharding and dtypes of this run, not of the other.
  reshard = lambda new, old: jax.device_put(old.astype(new.dtype), new.sharding)
  return state.replace(
    params=jax.tree.map(reshard, state.params, pretrained.params),
    codebook=jax.tree.map(reshard, state.codebook, pretrained.codebook),
  )


def _recorded_step(init_from: str, workdir: pathlib.Path) -> int | str:
  """Returns the step that an earlier start from this run used, else `newest`."""
  if not (workdir / RECORD).exists():
    return 'newest'
  with files.translate_damage(workdir / RECORD, 'delete it to start from the newest'):
    record = files.read_json(workdir / RECORD)
    # Without a checkpoint, this may be the record of another start.
    return record['step'] if record.get('init_from', init_from) == init_from else 'newest'


class Start:
  """The start of a language model from another run (see `train_task.CorpusTask`).

  Args:
    config: the experiment, with `init_from`.
    workdir: workdir of the run that starts. If it has a checkpoint, the other run is not read.

  Raises:
    BadInput: `init_from` is no run, or one of another model.
  """

  def __init__(self, config: experiment.Config, workdir: pathlib.Path):
    self._config, self._workdir, self._source = config, workdir, None
    if not reader.steps(workdir):
      self._source = open_run(config.init_from)
      self._check_model(self._source.config)

  @property
  def _source_config(self) -> str | None:
    """The flag that gives the config of a model; None: the other run is a training."""
    init_from = self._config.init_from
    if init_from.startswith(pretrained_models.PREFIX):
      return f'--config={init_from}'
    is_published = isinstance(self._source, huggingface.PublishedRun)
    return f'--config={command_line.PUBLISHED}{self._source.workdir}' if is_published else None

  def _check_model(self, source: experiment.Config) -> None:
    """Raises BadInput for another model; values that are `free_on_init` may differ."""
    init_from = self._config.init_from
    may_differ = lambda key: key.free_on_resume or key.free_on_init
    differences = fields.differences(source.model, self._config.model, 'model.', may_differ)
    for key, old, new in differences:
      raise errors.BadInput(
        f'init_from={init_from} was trained with {key.path}={old!r}, now it is {new!r}: use '
        f'{self._source_config or "the old value"}, or omit init_from'
      )

  def check_vocabulary(self, vocabulary: vocabularies.Vocabulary) -> None:
    """Raises BadInput if the other run has another vocabulary."""
    if self._source is None or self._source.vocabulary.definition == vocabulary.definition:
      return
    remedy = self._source_config or (
      f'the same text, data.vocabulary_path={self._source.workdir}/vocabulary.model of a run with '
      f'"sentencepiece"'
    )
    raise errors.BadInput(
      f'init_from={self._config.init_from} has another vocabulary, of '
      f'{self._source.vocabulary.size:,} token ids instead of {vocabulary.size:,}: use {remedy}, '
      f'or omit init_from'
    )

  def source_dtypes(self) -> Mapping[str, np.dtype]:
    """Returns the dtype of every parameter that the other run has, by name."""
    return self._source.parameter_dtypes

  def __call__(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns the state that training starts from, see `initial_state`."""
    return initial_state(self._config.init_from, self._workdir, state)
