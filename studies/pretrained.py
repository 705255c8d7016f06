"""SmolLM2 with memories: fine-tuning on SuperGLUE, and continued training on WikiText-2.

  python -m studies.pretrained --data=/path/to/corpora

The folder has `superglue` and `wikitext2`. A finished run becomes a line of pretrained.jsonl. For
options and exit statuses, see studies.run. Models:

  untrained      SmolLM2
  bare           all its weights are trained
  engram         an Engram memory is added, and trained with all weights
  frozen_table   the same with random tables without training: a control
  memory_alone   the Engram memory alone is trained
  latent_engram  n-grams of clusters of hidden states
  unigrams       n-grams of one token, with as many rows: a control

The learning rate of fine-tuning is the better of two on CB, seed 0, for each model. `rte_long`, RTE
with three epochs instead of half of one, tunes it on the task itself. Continued training has an
untuned rate. The memories have ten times the rate of the weights, also untuned.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import json
import pathlib
from typing import Any

from ngrammer_jax.training.records import goodput
from studies import results, run

MODEL = 'smollm2_135m_instruct'
MEMORY = 'model.ngram_memories.0'
ENGRAM = {f'{MEMORY}.preset': 'engram'}
MODELS = {
  'untrained': {'training.steps': 1},  # at a rate that float32 rounds away
  'bare': {},
  'engram': ENGRAM,
  'frozen_table': ENGRAM | {f'{MEMORY}.optimizer': 'frozen'},
  'memory_alone': ENGRAM | {'optimizer.train': 'new'},
  'latent_engram': ENGRAM | {f'{MEMORY}.key': 'clusters'},
  'unigrams': ENGRAM | {f'{MEMORY}.orders': '(1,)', f'{MEMORY}.heads': 16},
}
TASKS = ('cb', 'copa', 'rte')
LONG = 'rte_long'  # three epochs of RTE
TASK_OF = dict(zip(TASKS, TASKS, strict=True)) | {LONG: 'rte'}
TUNING_TASK = 'cb'
TASK_RATES = (2e-5, 1e-4)
TASK_TOKENS = dict.fromkeys(TASKS, 150_000) | {LONG: 792_576}
ROW_LENGTHS = {'cb': 384, 'copa': 256, 'rte': 384, LONG: 384}  # those of configs/superglue.py
TASK_SEEDS = (0, 1, 2)
CONTINUED = 'continued'
TEXT_RATE = 3e-5
TEXT_LENGTH = 512  # of a row
TEXT_ROWS = 4
TEXT_STEPS = 49
TEXT_SEEDS = (0, 1)
FIRST_MODELS = ('bare', 'engram', 'frozen_table', 'memory_alone')
FACTOR = 10.0  # of the learning rate of a memory
NO_RATE = 1e-12


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    table: table of docs/results.md: a task, or CONTINUED.
    model: one of MODELS.
    seed: seed of the run.
    learning_rate: that of the weights.
  """

  table: str
  model: str
  seed: int
  learning_rate: float

  @property
  def name(self) -> str:
    """Name of the cell and of its workdir."""
    return f'{self.table}.{self.model}.lr{self.learning_rate:g}.seed{self.seed}'

  @property
  def has_memory(self) -> bool:
    """Whether the model has a memory."""
    return bool(ENGRAM.items() & MODELS[self.model].items())

  @property
  def is_task(self) -> bool:
    """Whether the run is a fine-tuning."""
    return self.table in TASK_TOKENS

  @property
  def changes(self) -> dict[str, Any]:
    """Keys of the config that are set."""
    changes = {'init_from': f'pretrained:{MODEL}'}
    if self.has_memory:
      changes |= {'optimizer.rates.0.part': 'ngram_memory_0', 'optimizer.rates.0.factor': FACTOR}
    if self.is_task:
      length = ROW_LENGTHS[self.table]
      rows = 8
      tokens = TASK_TOKENS[self.table]
      changes |= {'finetune.format': 'question', 'training.steps': tokens // (rows * length)}
      changes |= {'evaluation.max_examples': 8}  # during training; all of them afterwards
    else:
      length = TEXT_LENGTH
      rows = TEXT_ROWS
      changes |= {'data.corpus': 'wikitext', 'training.steps': TEXT_STEPS}
    changes |= MODELS[self.model]
    return changes | {
      'training.segment_length': length,
      'training.batch_size': rows,
      'optimizer.learning_rate': self.learning_rate,
      'optimizer.warmup_steps': 5,
      'seed': self.seed,
      **of_short_training(changes['training.steps']),
    }

  def commands(self, data: pathlib.Path, workdir: pathlib.Path) -> Iterator[list[str]]:
    """Yields the commands of the run."""
    path = f'--config.data.superglue_dir={data / "superglue"}'
    if not self.is_task:
      path = f'--config.data.path={data / "wikitext2"}'
    yield [*self.command, path, f'--workdir={workdir}']

  @property
  def command(self) -> list[str]:
    """The command that trains, without the data."""
    verb = 'train'
    config = f'pretrained:{MODEL}'
    if self.is_task:
      verb = 'finetune'
      config = f'configs/superglue.py:{TASK_OF[self.table]}'
    flags = (f'--config.{key}={value}' for key, value in self.changes.items())
    return [f'ngrammer_jax.{verb}', f'--config={config}', *flags]


def of_short_training(steps: int) -> dict[str, Any]:
  """Returns the keys of a training with one evaluation and one checkpoint, at its end."""
  return {
    'training.evaluate_every': 0,
    'training.checkpoint_every': steps,
    'training.keep_checkpoints': 1,
    'training.log_every': 10,
    'training.segments_per_call': 1,
  }


def describe(cell: Cell, workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the line of a finished run, with its scores on the whole validation split."""
  if cell.is_task:
    scores = json.loads((workdir / 'evaluation' / 'validation.json').read_text(encoding='utf-8'))
    names = 'n', 'accuracy', 'f1', 'majority_percent'
  else:
    lines = (workdir / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    scores = {key.removeprefix('validation/'): v for key, v in json.loads(lines[-1]).items()}
    names = 'tokens', 'nll_nats_per_token', 'bits_per_byte'
  return {
    'cell': cell.name,
    **{key: getattr(cell, key) for key in ('table', 'model', 'seed', 'learning_rate')},
    'command': f'python -m {" ".join(cell.command)}',
    'steps': cell.changes['training.steps'],
    'training_seconds': round(goodput.training_seconds(workdir), 1),
    **{name: scores[name] for name in names if name in scores},
  }


def best_rate(lines: Iterable[results.Result], model: str, task: str = TUNING_TASK) -> float | None:
  """Returns the better rate of a model on a task, the lower of equals; None before both."""
  accuracies = {
    line['learning_rate']: line['accuracy']
    for line in lines
    if (line['table'], line['model'], line['seed']) == (task, model, 0)
  }
  if not accuracies.keys() >= set(TASK_RATES):
    return None
  return max(TASK_RATES, key=lambda rate: (accuracies[rate], -rate))


def missing_cells(lines: Iterable[results.Result]) -> Iterator[Cell]:
  """Yields the cells that have no line and whose learning rates are known, the first ones first."""
  lines = list(lines)
  return results.without_line(_all_cells(lines), lines)


def _all_cells(lines: list[results.Result]) -> Iterator[Cell]:
  models = 'bare', 'engram'
  for model, rate in itertools.product(models, TASK_RATES):
    yield Cell(TUNING_TASK, model, 0, rate)
  for seed, task, model in itertools.product(TASK_SEEDS, TASKS, models):
    if (rate := best_rate(lines, model)) is not None:
      yield Cell(task, model, seed, rate)
  for model, rate in itertools.product(models, TASK_RATES):
    yield Cell(LONG, model, 0, rate)
  for seed, model in itertools.product(TASK_SEEDS[1:], models):
    if (rate := best_rate(lines, model, LONG)) is not None:
      yield Cell(LONG, model, seed, rate)
  yield Cell(CONTINUED, 'untrained', 0, NO_RATE)
  others = [model for model in MODELS if model not in ('untrained', *FIRST_MODELS)]
  for group in (FIRST_MODELS, others):
    for seed, model in itertools.product(TEXT_SEEDS, group):
      yield Cell(CONTINUED, model, seed, TEXT_RATE)


STUDY = run.Study(results.PRETRAINED, missing_cells, describe)

if __name__ == '__main__':
  run.main(STUDY, __doc__)
