"""A trained model is taught the tasks of SuperGLUE: what the training loop asks for."""

from collections.abc import Callable
import dataclasses
import functools
import hashlib
import json
import logging
import math
import pathlib
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, files, hosts, runs
from ngrammer_jax.data import streams
from ngrammer_jax.models import config as model_config
from ngrammer_jax.tasks.superglue import evaluation, features, formats, metrics, registration
from ngrammer_jax.training import programs
from ngrammer_jax.training import state as train_state

BEGUN_WITH = 'begun_with.json'  # which checkpoint, in the workdir
# What a checkpoint says, and a command line may not say otherwise.
GIVEN = ('model.', 'data.vocabulary')
# But how the same numbers are computed.
OURS = ('model.remat', 'model.scan_layers', 'model.vocabulary_chunk')


def config_of(
  config: experiment.Config, said: list[str], workdir: pathlib.Path
) -> experiment.Config:
  """The config with the model and the vocabulary of the checkpoint that it begins with.

  Args:
    config: of the command.
    said: the keys that its command line sets.
    workdir: of the fine-tuning; one that has begun needs its checkpoint no more.

  Raises:
    BadInput: no checkpoint is named, or one of the keys is its to say.
  """
  if config.finetune is None:
    raise errors.BadInput('--config has no finetune section: use configs/superglue.py:TASK')
  for key in said:
    if key.startswith(GIVEN) and key not in OURS:
      raise errors.BadInput(
        f'--config.{key}: the model and the vocabulary are those of the checkpoint, '
        f'init_from={config.init_from}; leave it out, or pre-train another'
      )
  files.reach(workdir)
  if (workdir / 'config.json').exists():
    before = runs.load_run(workdir).config
  elif config.init_from is None:
    raise errors.BadInput('set init_from to the workdir of a trained run: --config.init_from=DIR')
  else:
    before = _pretrained(config.init_from).config
  how = [key.removeprefix('model.') for key in OURS if key in said]
  model = dataclasses.replace(before.model, **{key: getattr(config.model, key) for key in how})
  if config.training.half_loss:
    raise errors.BadInput('training.half_loss=True leaves out answers: use False')
  if config.finetune.dropout is not None:
    model = dataclasses.replace(model, dropout=config.finetune.dropout)
  if model.position in model_config.SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'init_from={config.init_from}: model.position={model.position!r} counts within a segment, '
      f'and an answer is scored apart from its inputs: pre-train with another position'
    )
  if config.finetune.prefix == 'bidirectional' and not model.sees_later_tokens:
    what = 'model.recurrent' if model.recurrent else f'model.position={model.position!r}'
    raise errors.BadInput(
      f'finetune.prefix="bidirectional" sees later tokens, but {what} of init_from='
      f'{config.init_from} has nothing for them: use finetune.prefix="causal"'
    )
  if model.memory is not None and model.memory.across_documents:  # examples are documents
    model = dataclasses.replace(
      model, memory=dataclasses.replace(model.memory, across_documents=False)
    )
  kept = {field: getattr(before.data, field) for field in ('vocabulary', 'vocabulary_size')}
  data = dataclasses.replace(config.data, corpus='superglue', **kept)
  config = dataclasses.replace(
    config, model=model, data=data, evaluation=dataclasses.replace(config.evaluation, memory=None)
  )
  config.check()
  for name in tasks_of(config):
    evaluation.resolve_choosing(name, config.finetune.choosing)
  return config


def _pretrained(workdir: str) -> runs.Run:
  """The run to begin with. Raises BadInput where there is none."""
  if not files.stored(workdir) and not pathlib.Path(workdir).is_dir():
    raise errors.BadInput(f'init_from={workdir}: no such folder; expected the workdir of a run')
  try:
    return runs.load_run(workdir)
  except errors.BadInput as error:
    raise errors.BadInput(f'init_from={workdir}: {error}') from error


class Finetuning:
  """The training examples of a task or of all, and the validation (see `material.Material`)."""

  judged_by = 'error_percent'

  def __init__(self, config: experiment.Config, workdir: pathlib.Path):
    self._config, self.patience = config, config.finetune.patience
    self._begun_with = workdir / BEGUN_WITH
    begun = (workdir / 'vocabulary.json').exists()
    self.vocabulary = runs.load_run(workdir if begun else config.init_from).vocabulary
    registration.register(source_of(config), self.vocabulary)
    self.tasks = tasks_of(config)
    f, length = config.finetune, config.training.segment_length
    given = length, f.targets_length, f.packed, f.truncate
    self._parts = {name: features.read_training_rows(name, *given) for name in self.tasks}
    stack = lambda parts: np.concatenate(parts)
    self._rows = streams.Segment(*map(stack, zip(*self._parts.values(), strict=True)))
    if f.prefix == 'causal':
      self._rows = self._rows._replace(prefix_BxT=None)
    self._validation = {name: examples_of(config, name, 'validation') for name in self.tasks}
    digest = hashlib.sha256()
    for array in (a for a in self._rows if a is not None):
      digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    for example in sum(self._validation.values(), []):  # what is the best depends on it
      digest.update(repr((example.inputs.tolist(), example.targets.tolist())).encode())
    self.content_hash = digest.hexdigest()
    self._order = functools.lru_cache(maxsize=2)(self._permuted)
    self._evaluators: dict[Any, evaluation.Evaluator] = {}  # by windows, each is compiled

  def _permuted(self, epoch):
    count = len(self._rows.tokens_BxT)
    return np.random.default_rng((self._config.seed, epoch)).permutation(count)

  def segment(self, step: int, rows: slice) -> streams.Segment:
    """All rows once in an epoch, in an order of its own."""
    B, count = self._config.training.batch_size, len(self._rows.tokens_BxT)
    places = [divmod(step * B + row, count) for row in range(B)[rows]]
    chosen = np.array([self._order(epoch)[place] for epoch, place in places])
    return streams.map_segments(lambda array: array[chosen], self._rows)

  def first(self, state: train_state.TrainState) -> train_state.TrainState:
    """Parameters and codebook of the checkpoint; the optimiser begins anew.

    A start that was killed is repeated with the same one, where there are newer ones by now too.
    """
    step: int | str = 'newest'
    if self._begun_with.exists():
      step = json.loads(self._begun_with.read_text(encoding='utf-8'))['step']
    before = runs.load_run(self._config.init_from, step).state
    known = {'init_from': self._config.init_from, 'step': int(before.step)}
    if hosts.first():
      files.write(self._begun_with, json.dumps(known) + '\n')
    logging.info(
      'from step %s of %s; the state of the optimiser is new, the codebook %s',
      f'{int(before.step):,}',
      self._config.init_from,
      'is kept as it is' if self._config.finetune.codebook == 'frozen' else 'goes on learning',
    )
    # Where this run has them, and not that one.
    place = lambda new, old: jax.device_put(old, new.sharding)
    return state.replace(
      params=jax.tree.map(place, state.params, before.params),
      codebook=jax.tree.map(place, state.codebook, before.codebook),
    )

  def validate(
    self, run: programs.Programs, state: train_state.TrainState, report: Callable[[int], None]
  ) -> dict[str, Any]:
    """The metrics of the task, or of each and their average."""
    model = run.evaluated(state)
    if model.windows not in self._evaluators:
      self._evaluators[model.windows] = evaluator_of(self._config, model, run.mesh, self.vocabulary)
    answer = self._evaluators[model.windows]
    results = {
      name: answer(
        state.params, state.codebook, name, examples, self._config.finetune.choosing, report
      )[0]
      for name, examples in self._validation.items()
    }
    return joined(results)

  def said(self, result: dict[str, Any]) -> str:
    """The metrics."""
    parts = result.get('tasks', {result['task']: result}).values()
    average = result.get('average')
    said = '; '.join(map(evaluation.format_metrics, parts))
    return f' {said}' + ('' if average is None else f'; average {average:.2f}')

  def describe(self) -> None:
    """Examples, rows and epochs."""
    t, rows = self._config.training, len(self._rows.tokens_BxT)
    counts = [f'{name} {int(_examples(part)):,}' for name, part in self._parts.items()]
    logging.info(
      'data: examples of %s, in %s rows of %s tokens; %s steps of %s rows are %.2f epochs',
      ', '.join(counts),
      f'{rows:,}',
      f'{t.segment_length:,}',
      f'{t.steps:,}',
      f'{t.batch_size:,}',
      t.steps * t.batch_size / rows,
    )


def _examples(part):
  return part.starts_BxT.sum()


def tasks_of(config: experiment.Config) -> tuple[str, ...]:
  """The names of the tasks that are trained on at once. Raises BadInput for an unknown one."""
  name = config.finetune.task
  if name == 'mixture':
    return formats.SUPERGLUE_TASKS
  formats.find_task(name)
  return (name,)


def check_examples(config: experiment.Config) -> None:
  """Raises BadInput where the examples that fine-tuning needs are not there, or not whole."""
  source = source_of(config)
  for name in tasks_of(config):
    for split in ('train', 'validation'):
      source.examples(formats.find_task(name).config, split)


def source_of(config: experiment.Config) -> registration.Source:
  """Where the config says that the examples are."""
  path = lambda text: None if text is None else pathlib.Path(text).expanduser()
  f = config.finetune
  return registration.Source(path(config.data.superglue_dir), path(f.tfds_dir), f.download)


def examples_of(config: experiment.Config, name: str, split: str) -> list[features.Example]:
  """The examples of a split, of a task that is registered."""
  f = config.finetune
  inputs = config.training.segment_length - f.targets_length
  return list(features.read_examples(name, split, inputs, f.targets_length, f.truncate))


def evaluator_of(config: experiment.Config, model: Any, mesh: Any, vocabulary: Any) -> Any:
  """The evaluator of the config."""
  t, f = config.training, config.finetune
  given = t.batch_size, t.segment_length, f.targets_length, f.prefix == 'bidirectional'
  return evaluation.Evaluator(model, mesh, vocabulary, *given)


def joined(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """The result of one task, or that of several with their average error."""
  if len(results) == 1:
    return next(iter(results.values()))
  error = math.fsum(result['error_percent'] for result in results.values()) / len(results)
  average = metrics.average(results)
  known = {} if average is None else {'average': average}
  return {'task': 'mixture', 'tasks': results, 'error_percent': error, **known}


def table(result: dict[str, Any]) -> str:
  """What `evaluate` found, to read."""
  results = result.get('tasks', {result['task']: result})
  if not all(map(metrics.select_metrics, results.values())):
    return '\n'.join(map(evaluation.format_metrics, results.values()))
  sizes = {name: of_task['n'] for name, of_task in results.items()}
  return metrics.format_table(
    {name: metrics.select_metrics(r) for name, r in results.items()}, sizes
  )


def evaluate(run: runs.Run, split: str) -> dict[str, Any]:
  """Evaluates a fine-tuned run, and writes its answers of the test split for the benchmark."""
  config = run.config
  registration.register(source_of(config), run.vocabulary)
  answer = evaluator_of(config, run.evaluated, run.mesh, run.vocabulary)
  results = {}
  for name in tasks_of(config):
    examples = examples_of(config, name, split)
    given = run.state.params, run.state.codebook, name, examples, config.finetune.choosing
    results[name], answers = answer(*given)
    if split == 'test' and hosts.first():
      path = evaluation.write_submission(name, examples, answers, run.workdir / 'evaluation')
      logging.info('answers for the benchmark: %s', path)
  if all('error_percent' in result for result in results.values()):
    results = joined(results)
  elif len(results) == 1:
    results = next(iter(results.values()))
  else:
    results = {'task': 'mixture', 'tasks': results}
  return {'split': split, 'step': int(run.state.step), **results}
