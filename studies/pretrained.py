"""SmolLM2 with memories: fine-tuning on SuperGLUE, and continued training on WikiText-2.

  python -m studies.pretrained --data=/path/to/corpora

The folder has `superglue` and `wikitext2`. A finished run becomes a line of pretrained.jsonl; the
options and the exit statuses are those of studies.run. Models:

  untrained      SmolLM2
  bare           all its weights are trained
  engram         an Engram memory is added, and trained with all weights
  frozen_table   the same with random tables that are not trained: a control
  memory_alone   the Engram memory alone is trained
  latent_engram  n-grams of clusters of hidden states
  unigrams       n-grams of one token, with as many rows: a control

Learning rates are tuned on seed 0: that of the weights on `bare` (on CB, of each model), that of
the memory, as a multiple of it, on `engram`.
"""

from collections.abc import Iterable, Iterator, Sequence
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
TUNING_TASK = 'cb'
TASK_RATES = (2e-5, 1e-4)
TASK_TOKENS = 150_000
ROW_LENGTHS = {'cb': 384, 'copa': 256, 'rte': 384}  # those of configs/superglue.py
TASK_SEEDS = (0, 1, 2)
TEXT_RATES = (1e-5, 3e-5, 1e-4)
FACTORS = (1.0, 10.0, 100.0)  # of the learning rate of the memory
TEXT_STEPS = {'continued': 49, 'continued longer': 490}  # of 4 rows of 512 tokens
TEXT_SEEDS = (0, 1)
LONGER = ('bare', 'engram', 'frozen_table', 'unigrams')
TASK_FACTOR = 10.0
NO_RATE = 1e-12


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    table: table of docs/results.md: a task, or one of TEXT_STEPS.
    model: one of MODELS.
    seed: seed of the run.
    learning_rate: that of the weights.
    factor: that of the memory is this many times as large.
  """

  table: str
  model: str
  seed: int
  learning_rate: float
  factor: float = 1.0

  @property
  def name(self) -> str:
    """Name of the cell and of its workdir."""
    rates = f'lr{self.learning_rate:g}' + (f'x{self.factor:g}' if self.has_memory else '')
    return f'{self.table}.{self.model}.{rates}.seed{self.seed}'.replace(' ', '_')

  @property
  def has_memory(self) -> bool:
    """Whether the model has a memory."""
    return bool(ENGRAM.items() & MODELS[self.model].items())

  @property
  def is_task(self) -> bool:
    """Whether the run is a fine-tuning."""
    return self.table in TASKS

  @property
  def changes(self) -> dict[str, Any]:
    """Keys of the config that are set."""
    changes = {'init_from': f'pretrained:{MODEL}'}
    if self.has_memory and self.factor != 1:
      changes |= {
        'optimizer.rates.0.part': 'ngram_memory_0',
        'optimizer.rates.0.factor': self.factor,
      }
    if self.is_task:
      length, rows = ROW_LENGTHS[self.table], 8
      changes |= {'finetune.format': 'question', 'training.steps': TASK_TOKENS // (rows * length)}
    else:
      length, rows = 512, 4
      changes |= {'data.corpus': 'wikitext', 'training.steps': TEXT_STEPS[self.table]}
    changes |= MODELS[self.model]
    return changes | {
      'training.segment_length': length,
      'training.batch_size': rows,
      'training.evaluate_every': 0,
      'training.checkpoint_every': changes['training.steps'],
      'training.keep_checkpoints': 1,
      'training.log_every': 10,
      'training.segments_per_call': 1,
      'evaluation.max_tokens': 65_536,
      'optimizer.learning_rate': self.learning_rate,
      'optimizer.warmup_steps': 5,
      'seed': self.seed,
    }

  def commands(self, data: pathlib.Path, workdir: pathlib.Path) -> Iterator[list[str]]:
    """Yields the commands of the run."""
    path = f'--config.data.superglue_dir={data / "superglue"}'
    if not self.is_task:
      path = f'--config.data.path={data / "wikitext2"}'
    yield [*self.command, path, f'--workdir={workdir}']
    if not self.is_task:
      whole = '--config.evaluation.max_tokens=None'
      yield ['ngrammer_jax.evaluate', f'--workdir={workdir}', '--split=test', whole]

  @property
  def command(self) -> list[str]:
    """The command that trains, without the data."""
    verb, config = 'train', f'pretrained:{MODEL}'
    if self.is_task:
      verb, config = 'finetune', f'configs/superglue.py:{self.table}'
    flags = (f'--config.{key}={value}' for key, value in self.changes.items())
    return [f'ngrammer_jax.{verb}', f'--config={config}', *flags]


def describe(cell: Cell, workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the line of a finished run."""
  read = lambda name: json.loads((workdir / 'evaluation' / name).read_text(encoding='utf-8'))
  names = ('n', 'accuracy', 'f1', 'majority_percent') if cell.is_task else ('nll_nats_per_token',)
  names += () if cell.is_task else ('bits_per_byte', 'tokens')
  scores = read('validation.json' if cell.is_task else 'test.json')
  lines = (workdir / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
  losses = [json.loads(line) for line in lines]
  key = 'validation/nll_nats_per_token'
  validation = [line[key] for line in losses if key in line]
  return {
    'cell': cell.name,
    **{key: getattr(cell, key) for key in ('table', 'model', 'seed', 'learning_rate', 'factor')},
    'command': f'python -m {" ".join(cell.command)}',
    'steps': cell.changes['training.steps'],
    'validation': validation[-1] if validation else None,
    'training_seconds': round(goodput.training_seconds(workdir), 1),
    **{name: scores[name] for name in names if name in scores},
  }


def best_rate(
  lines: Iterable[results.Result], table: str, model: str, grid: Sequence[float], key: str
) -> float | None:
  """Returns the best value of a key on seed 0, the lowest of equals; None before all are tried."""
  score = lambda line: -line['accuracy'] if table in TASKS else line['validation']
  scores = {
    line[key]: score(line)
    for line in lines
    if (line['table'], line['model'], line['seed']) == (table, model, 0)
  }
  if not scores.keys() >= set(grid):
    return None
  return min(grid, key=lambda rate: (scores[rate], rate))


def missing_cells(lines: Iterable[results.Result]) -> Iterator[Cell]:
  """Yields the cells that have no line and whose learning rates are known, the first ones first."""
  lines = list(lines)
  finished = {line['cell'] for line in lines}
  yield from (cell for cell in _all_cells(lines) if cell.name not in finished)


def _all_cells(lines: list[results.Result]) -> Iterator[Cell]:
  tuned = {}
  for model in ('bare', 'engram'):
    factor = TASK_FACTOR if model == 'engram' else 1.0
    yield from (Cell(TUNING_TASK, model, 0, rate, factor) for rate in TASK_RATES)
    tuned[model] = best_rate(lines, TUNING_TASK, model, TASK_RATES, 'learning_rate')
  yield from (Cell('continued', 'bare', 0, rate) for rate in TEXT_RATES)
  for seed, task, model in itertools.product(TASK_SEEDS, TASKS, tuned):
    if (rate := tuned[model]) is not None:
      yield Cell(task, model, seed, rate, TASK_FACTOR if model == 'engram' else 1.0)
  if (rate := best_rate(lines, 'continued', 'bare', TEXT_RATES, 'learning_rate')) is None:
    return
  yield from (Cell('continued', 'engram', 0, rate, factor) for factor in FACTORS)
  if (factor := best_rate(lines, 'continued', 'engram', FACTORS, 'factor')) is None:
    return
  yield Cell('continued', 'untrained', 0, NO_RATE)
  of_tables = {'continued': [model for model in MODELS if model != 'untrained']}
  of_tables |= {'continued longer': LONGER}
  for table, models in of_tables.items():
    for seed, model in itertools.product(TEXT_SEEDS, models):
      yield Cell(table, model, seed, rate, factor if model != 'bare' else 1.0)


STUDY = run.Study(results.PRETRAINED, missing_cells, describe)

if __name__ == '__main__':
  run.main(STUDY, __doc__)
