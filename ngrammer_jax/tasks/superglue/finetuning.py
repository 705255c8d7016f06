"""Fine-tuning of a pre-trained model on SuperGLUE tasks, and its evaluation."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import logging
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs
from ngrammer_jax.checkpoints import reader
from ngrammer_jax.config import memory_blocks
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.system import progress, storage
from ngrammer_jax.tasks.superglue import evaluation, features, formats, registration, submission
from ngrammer_jax.training import init_from, token_codebook, train_task
from ngrammer_jax.training import programs as training_programs
from ngrammer_jax.training import state as train_state

# Prefixes of keys inherited from the checkpoint, without overrides.
INHERITED_KEYS = ('model.', 'data.vocabulary')
# Exceptions that can be overridden: they do not change the model function.
OVERRIDABLE_KEYS = ('model.remat', 'model.scan_layers', 'model.vocabulary_chunk', 'model.kernel')


def resolve_config(
  config: experiment.Config, override_keys: list[str], workdir: pathlib.Path
) -> experiment.Config:
  """Returns the config with the model and the vocabulary of the initial checkpoint.

  The model may have added memories, see `runs.added_memories`.

  Args:
    config: config of the command.
    override_keys: keys set on the command line.
    workdir: run directory of the fine-tuning. If it has a checkpoint, `init_from` is not read.

  Raises:
    BadInput: there is no initial checkpoint, the command line overrides an inherited key, or the
      model does not support the options.
  """
  overridden_memories = set()
  for name in memory_blocks.NAMES:
    if any(key.startswith(f'model.{name}.') for key in override_keys):
      overridden_memories.add(name)
  memory_prefixes = tuple(f'model.{name}.' for name in overridden_memories)
  overridable = (*OVERRIDABLE_KEYS, 'data.vocabulary_path')
  for key in override_keys:
    is_inherited = key.startswith(INHERITED_KEYS) and not key.startswith(memory_prefixes)
    if is_inherited and key not in overridable:
      raise errors.BadInput(
        f'--config.{key}: the model and the vocabulary are inherited from the checkpoint, '
        f'init_from={config.init_from}; omit this flag, or pre-train another model'
      )
  storage.check_reachable(workdir)
  initial_run = _initial_run(config, workdir)
  changes = {name: getattr(config.model, name) for name in overridden_memories}
  model = dataclasses.replace(initial_run.config.model, **changes)
  init_from.check_model(initial_run, dataclasses.replace(config, model=model))
  if config.training.half_loss:
    raise errors.BadInput('training.half_loss=True excludes answers from the loss: use False')
  kind = initial_run.config.data.vocabulary
  path = config.data.vocabulary_path
  if path is not None:
    vocabularies.check_path(kind, path, initial_run.vocabulary, initial_run.workdir)
  config = dataclasses.replace(
    config,
    model=_finetuned_model(config, model, override_keys),
    data=dataclasses.replace(
      config.data,
      corpus='superglue',
      vocabulary=kind,
      vocabulary_size=initial_run.config.data.vocabulary_size,
      vocabulary_path=None,  # it is in the run that training starts from
    ),
    evaluation=dataclasses.replace(config.evaluation, memory=None),
  )
  _check_model(config)
  config.check()
  config.check_groups()
  for name in task_names(config):
    evaluation.resolve_choosing(name, config.finetune.choosing)
  return config


def _initial_run(config: experiment.Config, workdir: pathlib.Path) -> runs.Run:
  """Returns the run of the model and vocabulary: the workdir's run once it has started.

  Raises BadInput without such a run.
  """
  if reader.steps(workdir):
    return runs.load_run(workdir)
  if config.init_from is None:
    raise errors.BadInput('set init_from to the workdir of a trained run: --config.init_from=DIR')
  return init_from.open_initial_run(config.init_from)


def _finetuned_model(
  config: experiment.Config, model: model_config.ModelConfig, override_keys: list[str]
) -> model_config.ModelConfig:
  """Returns the model config of the initial checkpoint with the allowed changes."""
  fields = [key.removeprefix('model.') for key in OVERRIDABLE_KEYS if key in override_keys]
  changes = {field: getattr(config.model, field) for field in fields}
  if config.finetune.dropout is not None:
    changes['dropout'] = config.finetune.dropout
  if model.memory is not None and model.memory.across_documents:  # examples are documents
    changes['memory'] = dataclasses.replace(model.memory, across_documents=False)
  return dataclasses.replace(model, **changes)


def _check_model(config: experiment.Config) -> None:
  """Raises BadInput if the model does not support the options."""
  model = config.model
  inference.check_can_continue(model)
  if config.finetune.prefix == 'bidirectional' and not model.sees_later_tokens:
    key = f'model.position={model.position!r}'
    if model.recurrent:
      key = 'model.recurrent'
    raise errors.BadInput(
      f'finetune.prefix="bidirectional" needs attention to later tokens, but {key} of init_from='
      f'{config.init_from} does not support it: use finetune.prefix="causal"'
    )


class FinetuneTask(train_task.TrainTask):
  """Training and validation data of one task or of the mixture (see `train_task.TrainTask`).

  Args:
    config: config of the fine-tuning, see `resolve_config`.
    workdir: run directory of the fine-tuning.
  """

  best_metric = 'error_percent'
  validation_unit = 'examples'

  def __init__(self, config: experiment.Config, workdir: pathlib.Path):
    self._config = config
    self._workdir = workdir
    self.patience = config.finetune.patience
    self.vocabulary = _initial_run(config, workdir).vocabulary
    names = task_names(config)
    f = config.finetune
    length = config.training.segment_length
    registration.register(example_source(config), self.vocabulary, f.wsc_spans, f.format)
    rows_by_task = {
      name: features.read_training_rows(name, length, f.targets_length, f.packed, f.truncate)
      for name in names
    }
    self._counts = {name: int(rows.starts_BxT.sum()) for name, rows in rows_by_task.items()}
    self._rows = token_batch.map_batches(
      lambda *arrays: np.concatenate(arrays), *rows_by_task.values()
    )
    if f.prefix == 'causal':
      self._rows = self._rows._replace(prefix_BxT=None)
    self._validation = {name: load_examples(config, name, 'validation') for name in names}
    self.content_hash = self._hash_data()
    self._order = functools.lru_cache(maxsize=2)(self._permutation)

  def _hash_data(self) -> str:
    """Returns the hash of the training rows and the validation examples."""
    digest = hashlib.sha256()
    for array in self._rows:
      if array is not None:
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    for example in itertools.chain(*self._validation.values()):  # they select the best checkpoint
      digest.update(repr((example.inputs.tolist(), example.targets.tolist())).encode())
    return digest.hexdigest()

  def _permutation(self, epoch: int) -> np.ndarray:
    """Returns the order of the rows in an epoch."""
    count = len(self._rows.tokens_BxT)
    return np.random.default_rng((self._config.seed, epoch)).permutation(count)

  @property
  def source_dtypes(self) -> Mapping[str, np.dtype]:
    """Dtypes of the parameters of the initial checkpoint by name."""
    return _initial_run(self._config, self._workdir).parameter_dtypes

  def segment(self, step: int, rows: slice) -> token_batch.Batch:
    """Returns the segment of a step. Each epoch has all rows once, in another random order."""
    B = self._config.training.batch_size
    count = len(self._rows.tokens_BxT)
    positions = [divmod(step * B + row, count) for row in range(B)[rows]]
    indices = np.array([self._order(epoch)[position] for epoch, position in positions])
    return token_batch.map_batches(lambda array: array[indices], self._rows)

  def initial_state(self, state: train_state.TrainState) -> train_state.TrainState:
    """Returns the state with the parameters and the codebook of the initial checkpoint.

    See `init_from.initial_state`.
    """
    is_frozen = self._config.finetune.codebook == 'frozen'
    logging.info('codebook: %s', 'frozen' if is_frozen else 'learning')
    codebook = token_codebook.fill(state.codebook, self._config.model, self.vocabulary)
    state = state.replace(codebook=codebook)
    return init_from.initial_state(self._config, self._workdir, state, self.segment)

  def validate(
    self,
    programs: training_programs.Programs,
    state: train_state.TrainState,
    report: Callable[[int], None],
  ) -> dict[str, Any]:
    """Returns the metrics of the task, or of all tasks and their average.

    They cover the first `evaluation.max_examples` examples of each task.
    """
    evaluator = evaluation.TaskEvaluator(programs.engine, self.vocabulary, self._config)
    limit = slice(self._config.evaluation.max_examples)
    results = {}
    for name, examples in self._validation.items():
      results[name], _ = evaluator(state.params, state.codebook, name, examples[limit], report)
    return evaluation.combine_results(results)

  def format_metrics(self, result: dict[str, Any]) -> str:
    """Formats the metrics for the log."""
    return f' {evaluation.format_metrics(result)}'

  def log_summary(self) -> None:
    """Logs the numbers of examples, rows and epochs."""
    t = self._config.training
    rows = len(self._rows.tokens_BxT)
    examples = ', '.join(f'{name} {count:,}' for name, count in self._counts.items())
    logging.info(
      f'data: examples of {examples}, in {rows:,} rows of {t.segment_length:,} tokens, '
      f'{100 * self._rows.valid_BxT.mean():.0f} % filled; {t.steps:,} steps of {t.batch_size:,} '
      f'rows are {t.steps * t.batch_size / rows:.2f} epochs'
    )


def task_names(config: experiment.Config) -> tuple[str, ...]:
  """Returns the names of the jointly trained tasks. Raises BadInput for an unknown name."""
  name = config.finetune.task
  if name == 'mixture':
    return formats.SUPERGLUE_TASKS
  formats.find_task(name)
  return (name,)


def check_examples(
  config: experiment.Config, splits: Sequence[str] = ('train', 'validation')
) -> None:
  """Raises BadInput if examples of these splits are missing or damaged."""
  source = example_source(config)
  for name in task_names(config):
    for split in splits:
      source.examples(formats.find_task(name).config, split)


def example_source(config: experiment.Config) -> registration.ExampleSource:
  """Returns the location of the examples."""
  f = config.finetune
  return registration.ExampleSource(config.data.superglue_dir, f.tfds_dir, f.download)


def load_examples(config: experiment.Config, name: str, split: str) -> list[features.Example]:
  """Returns the examples of a split of a registered task."""
  f = config.finetune
  length = config.training.segment_length
  return features.read_examples(name, split, length, f.targets_length, f.truncate)


def evaluate(
  run: runs.Run, split: str, max_examples: int | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]:
  """Evaluates a run on its task.

  Args:
    run: the run.
    split: train, validation or test.
    max_examples: maximum number of examples of a task, the first ones. None: all.

  Returns:
    The result; the answers to all examples, see `evaluation.describe_answer`; and of the test split
    the texts of the submission files by name.
  """
  config = run.config
  f = config.finetune
  registration.register(example_source(config), run.vocabulary, f.wsc_spans, f.format)
  evaluator = evaluation.TaskEvaluator(run.engine, run.vocabulary, config)
  results = {}
  lines = []
  submissions = {}
  for name in task_names(config):
    examples = load_examples(config, name, split)[:max_examples]
    with progress.Progress(f'evaluating {name}, {split}', len(examples), 'examples') as bar:
      params = run.restored.params
      codebook = run.restored.codebook
      results[name], answers = evaluator(params, codebook, name, examples, bar.advance)
    for example, answer in zip(examples, answers, strict=True):
      lines.append(evaluation.describe_answer(name, example, answer))
    if split == 'test':
      values = [answer.value for answer in answers]
      submissions[submission.file_name(name)] = submission.format_answers(name, examples, values)
  result = {'split': split, 'step': run.restored.step, **evaluation.combine_results(results)}
  return result, lines, submissions
