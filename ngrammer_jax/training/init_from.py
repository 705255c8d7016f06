"""Starts a training from another run, `init_from`: its parameters and codebooks, a new optimizer.

The model may have more memories than the other one, see `runs.added_memories`.

`init_from` is what `runs.source` resolves: the workdir of a run, `pretrained:NAME`, or the folder
of a published model, with or without `hf:` before it.

<workdir>/begun_with.json   run and step of the checkpoint that the training started from
<workdir>/published.json    family, token ids and settings of a published model, for an export
"""

from collections.abc import Callable, Collection, Mapping
import functools
import json
import logging
import pathlib
from typing import Any

from flax import traverse_util
import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs, sharding
from ngrammer_jax.checkpoints import reader, workdirs
from ngrammer_jax.config import conversion, fields, memory_blocks
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.rows import streams
from ngrammer_jax.models import language_model, memories, model_variables
from ngrammer_jax.runs import added_memories, load
from ngrammer_jax.system import file_errors, files, hosts, json_files
from ngrammer_jax.training import centroids
from ngrammer_jax.training import state as train_state

RECORD = 'begun_with.json'


def complete(
  values: dict[str, Any],
  overrides: Collection[str],
  present: Collection[str],
  workdir: pathlib.Path | None = None,
) -> None:
  """Sets what is open in memories that the model of `init_from` does not have.

  If the run in the workdir has started, its config decides, and that model need not be there.

  Args:
    values, overrides, present: see `added_memories.complete`.
    workdir: run directory.

  Raises:
    BadInput: there is no run to start from, or its model cannot have a memory.
  """
  has_started = workdir is not None and bool(reader.steps(workdir))
  source = runs.load_run(workdir) if has_started else load.open_named(values['init_from'])
  sizes = source.vocabulary_size, model_variables.count_elements(source.abstract_parameters)
  added_memories.complete(values, overrides, present, source.config.model, *sizes)


def initial_state(
  config: experiment.Config,
  workdir: pathlib.Path,
  state: train_state.TrainState,
  segment: Callable[[int, slice], streams.Batch] | None = None,
) -> train_state.TrainState:
  """Returns a new state with the parameters and the codebook of the newest checkpoint of a run.

  Step, optimizer state and memory stay new, and so does what the run does not have. The step of the
  checkpoint is recorded in the workdir, so that a repeated start uses the same checkpoint even if
  there is a newer one.

  Args:
    config: the experiment, with the run to start from.
    workdir: workdir of the run that starts.
    state: a randomly initialised state.
    segment: rows of the batch of a step, from which new centroids are drawn.

  Raises:
    BadInput: the run has a parameter that the model does not have.
  """
  init_from = config.init_from
  source = load.open_named(init_from, _recorded_step(init_from, workdir))
  hosts.on_primary(workdirs.write_origin, workdir, source.origin)
  if source.published is not None:
    logging.info('starting from %s', init_from)
    leaves = traverse_util.flatten_dict(state.params)
    own = {path: leaves[path] for path in traverse_util.flatten_dict(source.abstract_parameters)}
    params, codebook = source.load(traverse_util.unflatten_dict(own)), {}
  else:
    step, params, codebook = source.restored
    record = {'init_from': init_from, 'step': step}
    hosts.on_primary(files.write, workdir / RECORD, json.dumps(record) + '\n')
    message = 'starting from step %s of %s, with a new optimizer state'
    logging.info(message, f'{record["step"]:,}', init_from)
  state = state.replace(
    params=_merge(init_from, state.params, params),
    codebook=_merge(init_from, state.codebook, codebook),
  )
  quantizers = {path[:-2] for path in traverse_util.flatten_dict(codebook)}
  drawn = [
    path
    for path, module in memories.ngram_modules(config.model)
    if module.options.initial == 'hidden' and path not in quantizers
  ]
  if not drawn or segment is None:
    return state
  model = language_model.build(config.model, source.model.vocabulary_size)
  mesh, t = state.step.sharding.mesh, config.training
  read = lambda step: sharding.global_rows(mesh, t.batch_size, functools.partial(segment, step))
  codebook = centroids.draw(model, state, drawn, read, config.seed, t.microbatches)
  return state.replace(codebook=codebook)


def _merge(init_from: str, new: Any, old: Any) -> Any:
  """Returns a tree with the arrays of another run, in its own shards and dtypes, and its others."""
  leaves = traverse_util.flatten_dict(new, keep_empty_nodes=True)
  for path, leaf in traverse_util.flatten_dict(old).items():
    if path not in leaves or leaves[path].shape != leaf.shape:
      raise errors.BadInput(
        f'init_from={init_from} has {"/".join(path)} of the shape {list(leaf.shape)}, which this '
        f'model does not have: use the model of that run'
      )
    leaves[path] = jax.device_put(leaf.astype(leaves[path].dtype), sharding.placement(leaves[path]))
  return traverse_util.unflatten_dict(leaves)


def _recorded_step(init_from: str, workdir: pathlib.Path) -> int | str:
  """Returns the step that an earlier start from this run used, else `newest`."""
  if not (workdir / RECORD).exists():
    return 'newest'
  with file_errors.translate_damage(workdir / RECORD, 'delete it to start from the newest'):
    record = json_files.read(workdir / RECORD)
    # Without a checkpoint, this may be the record of another start.
    return record['step'] if record.get('init_from', init_from) == init_from else 'newest'


def check_model(source: runs.Run, config: experiment.Config) -> None:
  """Raises BadInput for a model that is not the one to start from, maybe with more memories.

  Values that are `free_on_init` may differ. Logs what is new.

  Args:
    source: the run to start from.
    config: the experiment.
  """
  model, init_from = source.config.model, config.init_from
  new = memory_blocks.added(model, config.model)
  may_differ = lambda key: key.free_on_resume or key.free_on_init
  for key, old, value in fields.differences(model, config.model, 'model.', may_differ):
    if key.path in new:
      continue
    was, now = fields.format_value(old), fields.format_value(value)
    remedy = 'the old value' if config.finetune else f'--config={init_from}'
    problem = f'was trained with {key.path}={was}, now it is {now}: use {remedy}'
    if preset := getattr(old, 'preset', None):  # of a memory that is missing
      problem = f'has {key.path}, which is missing: add --config.{key.path}.preset={preset}'
    raise errors.BadInput(f'init_from={init_from} {problem}, or omit init_from')
  added_memories.check_neutral(model, config)
  if new:
    built = language_model.build(config.model, source.vocabulary_size)
    before = model_variables.count_elements(source.abstract_parameters)
    after = model_variables.count_elements(model_variables.abstract(built)['params'])
    message = 'new: %s, with %s parameters; %.1f %% of the %s that were there'
    share = 100 * (after - before) / before
    logging.info(message, ', '.join(new), f'{after - before:,}', share, f'{before:,}')


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
      self._source = load.open_named(config.init_from)
      check_model(self._source, config)

  def check_vocabulary(self, vocabulary: vocabularies.Vocabulary) -> None:
    """Raises BadInput if the other run has another vocabulary."""
    if self._source is None or self._source.vocabulary.definition == vocabulary.definition:
      return
    init_from = self._config.init_from
    own, remedy = conversion.stored_vocabulary(self._source.workdir), f'--config={init_from}'
    if own is not None and self._source.published is None:
      remedy = f'--config.data.vocabulary_path={own} and --config.data.vocabulary_size=None'
    raise errors.BadInput(
      f'init_from={init_from} has another vocabulary, of '
      f'{self._source.vocabulary.size:,} token ids instead of {vocabulary.size:,}: use {remedy}, '
      f'or omit init_from'
    )

  def source_dtypes(self) -> Mapping[str, np.dtype]:
    """Returns the dtype of every parameter that the other run has, by name."""
    return self._source.parameter_dtypes

  def __call__(
    self,
    state: train_state.TrainState,
    segment: Callable[[int, slice], streams.Batch] | None = None,
  ) -> train_state.TrainState:
    """Returns the state that training starts from, see `initial_state`."""
    return initial_state(self._config, self._workdir, state, segment)
