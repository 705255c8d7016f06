"""Starts training from another run, `init_from`: its parameters and codebooks, a new optimizer.

The model may have additional memories, see `runs.added_memories`.

`runs.model_source` resolves `init_from`: the workdir of a run, `pretrained:NAME`, or the folder of
a published model, optionally with the prefix `hf:`.

<workdir>/begun_with.json   run and step of the initial checkpoint, and the number of steps
                            with skipped text, see `data.continue_text`
<workdir>/published.json    family, token ids and settings of a published model, for an export
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
import json
import logging
import pathlib
from typing import Any

from flax import traverse_util
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, host_arrays, runs, sharding
from ngrammer_jax.checkpoints import reader, workdirs
from ngrammer_jax.config import conversion, fields, memory_blocks, resume
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.models import language_model, memories, model_variables
from ngrammer_jax.runs import added_memories, model_source
from ngrammer_jax.system import file_errors, files, hosts, json_files
from ngrammer_jax.training import centroids
from ngrammer_jax.training import state as train_state

RECORD = 'begun_with.json'
# Keys that decide which tokens a row reads, besides the text: see `Start.text_step`.
READING_KEYS = {
  'training': ('batch_size', 'segment_length'),
  'data': ('shuffle', 'begin_of_text'),
}

# Returns rows of the batch of a step, see `train_task.TrainTask.segment`.
ReadSegment = Callable[[int, slice], token_batch.Batch]


def open_initial_run(init_from: str, step: int | str = 'newest') -> runs.Run:
  """Opens the run to start from. Raises BadInput if there is none."""
  return model_source.resolve(init_from, 'init_from').open(step)


def complete(
  values: dict[str, Any],
  overrides: Collection[str],
  present: Collection[str],
  workdir: pathlib.Path | None = None,
) -> None:
  """Fills unset fields of memories missing in the model of `init_from`.

  If the run in the workdir has started, its config decides, without the source model.

  Args:
    values, overrides, present: see `added_memories.complete`.
    workdir: run directory.

  Raises:
    BadInput: there is no run to start from, or its model does not support a memory.
  """
  if workdir is not None and reader.steps(workdir):
    run = runs.load_run(workdir)
  else:
    run = open_initial_run(values['init_from'])
  num_parameters = model_variables.count_elements(run.abstract_parameters)
  added_memories.complete(
    values, overrides, present, run.config.model, run.vocabulary_size, num_parameters
  )


def initial_state(
  config: experiment.Config,
  workdir: pathlib.Path,
  state: train_state.TrainState,
  segment: ReadSegment | None = None,
  step: int | None = None,
  text_step: int = 0,
) -> train_state.TrainState:
  """Returns a new state with the parameters and the codebook of the newest checkpoint of a run.

  Step, optimizer state, memory and additional parameters stay new. The step of the checkpoint is
  recorded in the workdir: a repeated start uses the same checkpoint even if there is a newer one.

  Args:
    config: the experiment, with the run to start from.
    workdir: workdir of the new run.
    state: a randomly initialised state.
    segment: rows of the batch of a step, for drawing new centroids.
    step: step of the checkpoint. None: of an earlier start from this run, or the newest.
    text_step: see `Start.text_step`; it is recorded too.

  Raises:
    BadInput: the run has a parameter missing in the model.
  """
  init_from = config.init_from
  if step is None:
    step = _recorded_step(init_from, workdir)
  initial_run = open_initial_run(init_from, step)
  hosts.on_primary(workdirs.write_origin, workdir, initial_run.origin)
  if initial_run.published is not None:
    logging.info('starting from %s', init_from)
    params = _load_published(initial_run, state.params)
    codebook = {}
  else:
    step, params, codebook = initial_run.restored
    record = {'init_from': init_from, 'step': step}
    if text_step:
      record['text_step'] = text_step
    hosts.on_primary(files.write, workdir / RECORD, json.dumps(record) + '\n')
    message = 'starting from step %s of %s, with a new optimizer state'
    logging.info(message, f'{step:,}', init_from)
  state = state.replace(
    params=_merge(init_from, state.params, params),
    codebook=_merge(init_from, state.codebook, codebook),
  )
  drawn = _quantizers_to_draw(config, codebook)
  if not drawn or segment is None:
    return state
  model = language_model.build(config.model, initial_run.model.vocabulary_size)
  return state.replace(codebook=_draw_centroids(config, model, state, drawn, segment))


def _load_published(run: runs.Run, params: Any) -> Any:
  """Returns the parameters of a published model, in the dtypes and shards of the new model."""
  leaves = traverse_util.flatten_dict(params)
  names = traverse_util.flatten_dict(run.abstract_parameters)
  return run.load(traverse_util.unflatten_dict({name: leaves[name] for name in names}))


def _quantizers_to_draw(config: experiment.Config, codebook: Any) -> list[tuple[str, ...]]:
  """Returns the paths of the n-gram modules with centroids from hidden states.

  Args:
    config: the experiment.
    codebook: codebook of the other run; its centroids are kept.
  """
  trained = {path[:-2] for path in traverse_util.flatten_dict(codebook)}
  return [
    path
    for path, module in memories.ngram_modules(config.model)
    if module.options.initial == 'hidden' and path not in trained
  ]


def _draw_centroids(
  config: experiment.Config,
  model: language_model.LanguageModel,
  state: train_state.TrainState,
  drawn: list[tuple[str, ...]],
  segment: ReadSegment,
) -> Any:
  """Returns the codebook with new centroids in some n-gram modules, see `centroids.draw`."""
  t = config.training

  def read(step: int) -> token_batch.Batch:
    rows = functools.partial(segment, step)
    return sharding.global_rows(state.step.sharding.mesh, t.batch_size, rows)

  return centroids.draw(model, state, drawn, read, config.seed, t.microbatches)


def _merge(init_from: str, new: Any, old: Any) -> Any:
  """Returns a tree updated by the arrays of another run, in its own shards and dtypes."""
  leaves = traverse_util.flatten_dict(new, keep_empty_nodes=True)
  for path, leaf in traverse_util.flatten_dict(old).items():
    if path not in leaves or leaves[path].shape != leaf.shape:
      raise errors.BadInput(
        f'init_from={init_from} has {"/".join(path)} of the shape {list(leaf.shape)}, but this '
        f'model does not: use the model of that run'
      )
    leaves[path] = host_arrays.place_like(leaf, leaves[path])
  return traverse_util.unflatten_dict(leaves)


def _recorded_step(init_from: str, workdir: pathlib.Path) -> int | str:
  """Returns the step of an earlier start from this run, or `newest`."""
  if not (workdir / RECORD).exists():
    return 'newest'
  with file_errors.translate_damage(workdir / RECORD, 'delete it to start from the newest'):
    record = json_files.read(workdir / RECORD)
    # Without a checkpoint, this may be the record of another start.
    return record['step'] if record.get('init_from', init_from) == init_from else 'newest'


def _recorded_text_step(workdir: pathlib.Path) -> int:
  """Returns the `Start.text_step` of a training that has started."""
  with file_errors.translate_damage(workdir / RECORD, workdirs.REMEDY):
    return json_files.read(workdir / RECORD).get('text_step', 0)


def check_model(initial_run: runs.Run, config: experiment.Config) -> None:
  """Raises BadInput if a model differs from the source by more than added memories.

  Values that are `free_on_init` may differ. Logs added memories.

  Args:
    initial_run: the run to start from.
    config: the experiment.
  """
  model = initial_run.config.model
  added = memory_blocks.added(model, config.model)
  for key, old, new in resume.differences(model, config.model, 'model.', resume.keeps_parameters):
    if key.path not in added:
      raise errors.BadInput(_difference_message(key.path, old, new, config))
  added_memories.check_neutral(model, config)
  if added:
    _log_added(added, initial_run, config)


def _difference_message(path: str, old: Any, new: Any, config: experiment.Config) -> str:
  """Returns the message for a key that must not differ.

  Args:
    path: the key.
    old: its value in the run to start from.
    new: its value now.
    config: the experiment.
  """
  init_from = config.init_from
  preset = getattr(old, 'preset', None)
  if preset:  # of a missing memory
    problem = f'has {path}, which is missing: add --config.{path}.preset={preset}'
  else:
    was = fields.format_value(old)
    now = fields.format_value(new)
    remedy = 'the old value' if config.finetune else f'--config={init_from}'
    problem = f'was trained with {path}={was}, now it is {now}: use {remedy}'
  return f'init_from={init_from} {problem}, or omit init_from'


def _log_added(added: Collection[str], initial_run: runs.Run, config: experiment.Config) -> None:
  """Logs the added memories, and their number of parameters."""
  model = language_model.build(config.model, initial_run.vocabulary_size)
  before = model_variables.count_elements(initial_run.abstract_parameters)
  after = model_variables.count_elements(model_variables.abstract(model)['params'])
  message = 'new: %s, with %s parameters, %.1f %% of the %s of the trained model'
  share = 100 * (after - before) / before
  logging.info(message, ', '.join(added), f'{after - before:,}', share, f'{before:,}')


class Start:
  """The start of a language model from another run (see `train_task.CorpusTask`).

  Args:
    config: the experiment, with `init_from`.
    workdir: workdir of the new run. If it has a checkpoint, the other run is not read.

  Raises:
    BadInput: `init_from` is no run, or a run of another model.
  """

  def __init__(self, config: experiment.Config, workdir: pathlib.Path):
    self._config = config
    self._workdir = workdir
    self._initial_run: runs.Run | None = None
    self._step: int | None = None
    self._text_step = 0
    if not reader.steps(workdir):
      self._initial_run = open_initial_run(config.init_from)
      check_model(self._initial_run, config)

  def check_vocabulary(self, vocabulary: vocabularies.Vocabulary) -> None:
    """Raises BadInput if the other run has another vocabulary."""
    run = self._initial_run
    if run is None or run.vocabulary.definition == vocabulary.definition:
      return
    init_from = self._config.init_from
    stored = conversion.stored_vocabulary(run.workdir)
    if stored is not None and run.published is None:
      remedy = f'--config.data.vocabulary_path={stored} and --config.data.vocabulary_size=None'
    else:
      remedy = f'--config={init_from}'
    raise errors.BadInput(
      f'init_from={init_from} has another vocabulary, of {run.vocabulary.size:,} token ids instead '
      f'of {vocabulary.size:,}: use {remedy}, or omit init_from'
    )

  def text_step(self, content_hash: str) -> int:
    """Returns the first step of this training in the text: 0, or after the other run.

    With `data.continue_text`, the text continues at the end of the other run.

    Args:
      content_hash: hash of the text of this training.

    Raises:
      BadInput: the other run read another text, or other segments.
    """
    if not self._config.data.continue_text:
      return 0
    if self._initial_run is None:
      return _recorded_text_step(self._workdir)
    self._check_same_text(content_hash)
    run = self._initial_run
    recorded = _recorded_step(self._config.init_from, self._workdir)
    self._step = dataclasses.replace(run, step=recorded).find_checkpoint()
    self._text_step = self._step
    if run.config.data.continue_text:
      self._text_step += _recorded_text_step(run.workdir)
    return self._text_step

  def _check_same_text(self, content_hash: str) -> None:
    """Raises BadInput if the text of the other run cannot be continued."""
    run = self._initial_run
    init_from = self._config.init_from
    key = f'data.continue_text=True with init_from={init_from}'
    if run.published is not None or run.is_exported:
      raise errors.BadInput(
        f'{key} needs a run directory, because the text of init_from is unknown: use False'
      )
    for section, names in READING_KEYS.items():
      for name in names:
        before = getattr(getattr(run.config, section), name)
        now = getattr(getattr(self._config, section), name)
        if before != now:
          raise errors.BadInput(
            f'{key} needs {section}.{name}={before}, as that run has, not {now}: each row '
            f'continues at its last token'
          )
    if run.content_hash is None or not content_hash.startswith(run.content_hash):
      raise errors.BadInput(f'{key} needs the text of that run: use its text, or False')

  def row_states(self) -> Any:
    """Returns the row states of streamed text saved by the other run."""
    return reader.read_rows(self._initial_run.workdir, self._step)

  def log_text(self) -> None:
    """Logs where the text starts."""
    if self._config.data.continue_text:
      logging.info('the text continues after the %s steps read before', f'{self._text_step:,}')
    else:
      logging.info(
        'the text starts at its first token; with data.continue_text=True, it continues after the '
        'text of the other run'
      )

  def source_dtypes(self) -> Mapping[str, np.dtype]:
    """Returns the dtype of every parameter of the other run, by name."""
    return self._initial_run.parameter_dtypes

  def __call__(
    self, state: train_state.TrainState, segment: ReadSegment | None = None
  ) -> train_state.TrainState:
    """Returns the initial train state, see `initial_state`."""
    return initial_state(self._config, self._workdir, state, segment, self._step, self._text_step)
