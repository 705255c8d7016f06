"""A domain learned by a trained model: SmolLM2 learns C source. The plan is studies/domain.md.

  python -m studies.domain --data=/path/to/corpora

The folder has c_source as written by studies.c_source, and enwik8.gz. A finished run becomes a line
of domain.jsonl. For options and exit statuses, see studies.run. --tokens=1000000 is for a GPU.
After its first run, the command logs seconds a run, and the runs that the --minutes are enough for.
Models:

  untrained         SmolLM2
  all               all its weights are trained
  engram            an Engram memory is added, and trained alone
  value_embeddings  a row of each token in the values of every second block, trained alone
  unigrams          Engram with n-grams of one token, with as many rows as `engram`, trained alone
  head              embedding and output layer, which are one array, are trained alone, and the norm
  frozen_table      `engram` with random rows without training: a control
"""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import pathlib
from typing import Any

from ngrammer_jax import flags
from ngrammer_jax.system import json_files
from ngrammer_jax.training.records import goodput
from studies import domain_scores, pretrained, results, run

NEW = {'optimizer.train': 'new'}
MODELS = {
  'untrained': pretrained.MODELS['untrained'],
  'all': {},
  'engram': pretrained.ENGRAM | NEW,
  'value_embeddings': {f'{pretrained.MEMORY}.preset': 'value_embeddings'} | NEW,
  'unigrams': pretrained.MODELS['unigrams'] | NEW,
  'head': {'optimizer.train': "('embedding','head')"},
  'frozen_table': pretrained.MODELS['frozen_table'] | NEW,
}
# New weights start at zero or at random, and have higher rates than trained ones.
RATES = {
  'all': (3e-5, 1e-4),
  'engram': (1e-3, 4e-3),
  'value_embeddings': (1e-3, 4e-3),
  'unigrams': (1e-3, 4e-3),
  'head': (1e-4, 1e-3),
  'frozen_table': (1e-3, 4e-3),
}
SEEDS = {'all': (1, 2, 3), 'engram': (1, 2, 3)}
FIRST_SEED = 1
TRY_SEED = 100
TOKENS = 150_000
TRY_SHARE = 8
TOKENS_PER_STEP = pretrained.TEXT_ROWS * pretrained.TEXT_LENGTH


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    table: tries or runs.
    model: one of MODELS.
    seed: seed of the new weights and of the order of the documents.
    learning_rate: learning rate; None before it has been selected.
    steps: number of steps.
  """

  table: str
  model: str
  seed: int
  learning_rate: float | None
  steps: int

  @property
  def name(self) -> str:
    """Name of the cell and of its workdir."""
    rate = 'rate_of_the_best_try'
    if self.learning_rate is not None:
      rate = f'lr{self.learning_rate:g}'
    return f'{self.table}.{self.model}.{rate}.steps{self.steps}.seed{self.seed}'

  @property
  def tokens(self) -> int:
    """Tokens of the training."""
    return self.steps * TOKENS_PER_STEP

  @property
  def texts(self) -> tuple[str, ...]:
    """Texts that are scored after the training."""
    if self.table == 'tries':
      return (domain_scores.VALIDATION,)
    return (domain_scores.C_SOURCE, domain_scores.ENWIK8)

  @property
  def cost(self) -> float:
    """Cost for forecasts; see `run.PlannedCell`."""
    scored = sum(domain_scores.TOKENS[text] for text in self.texts)
    return self.tokens + scored / 3

  @property
  def changes(self) -> dict[str, Any]:
    """Keys of the config that are set."""
    return {
      'init_from': f'pretrained:{pretrained.MODEL}',
      'data.corpus': 'shards',
      'data.shuffle': self.seed,
      'training.steps': self.steps,
      'training.segment_length': pretrained.TEXT_LENGTH,
      'training.batch_size': pretrained.TEXT_ROWS,
      'optimizer.learning_rate': self.learning_rate,
      'optimizer.warmup_steps': max(self.steps // 15, 1),
      'evaluation.max_tokens': 8192,  # at the end of the training; `texts` are scored afterwards
      'seed': self.seed,
      **pretrained.of_short_training(self.steps),
      **MODELS[self.model],
    }

  @property
  def command(self) -> list[str]:
    """The command that trains, without the data."""
    overrides = [f'--config.{key}={value}' for key, value in self.changes.items()]
    return ['ngrammer_jax.train', f'--config=pretrained:{pretrained.MODEL}', *overrides]

  def commands(self, data: pathlib.Path, workdir: pathlib.Path) -> Iterator[list[str]]:
    """Yields the commands of the run, with the texts in a folder."""
    path = f'--config.data.path={data / "c_source"}'
    yield [*self.command, path, f'--workdir={workdir}']
    texts = f'--texts={",".join(self.texts)}'
    yield ['studies.domain_scores', f'--workdir={workdir}', f'--data={data}', texts]


def describe(cell: Cell, workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the line of a finished run."""
  return {
    'cell': cell.name,
    'table': cell.table,
    'model': cell.model,
    'seed': cell.seed,
    'learning_rate': cell.learning_rate,
    'command': f'python -m {" ".join(cell.command)}',
    'steps': cell.steps,
    'tokens': cell.tokens,
    'training_seconds': round(goodput.training_seconds(workdir), 1),
    **json_files.read(workdir / domain_scores.FILE),
  }


def tries(model: str, steps: int) -> list[Cell]:
  """Returns the tries of a model, an eighth of `steps`."""
  return [Cell('tries', model, TRY_SEED, rate, steps // TRY_SHARE) for rate in RATES[model]]


def best_rate(lines: Iterable[results.Result], model: str, steps: int) -> float | None:
  """Returns the learning rate with the lowest loss; None before all tries have finished."""
  losses = {}
  for line in lines:
    if line['table'] == 'tries':
      losses[line['cell']] = line[domain_scores.VALIDATION]['nll_nats_per_token']
  tried = tries(model, steps)
  if any(cell.name not in losses for cell in tried):
    return None
  return min(tried, key=lambda cell: losses[cell.name]).learning_rate


def missing_cells(steps: int, lines: Iterable[results.Result]) -> Iterator[Cell]:
  """Yields the cells that have no line and whose learning rates are known, the first ones first.

  Args:
    steps: steps of a run.
    lines: lines of domain.jsonl.
  """
  for cell in planned_cells(steps, lines):
    if cell.learning_rate is not None:
      yield cell


def planned_cells(steps: int, lines: Iterable[results.Result]) -> Iterator[Cell]:
  """Yields all cells that have no line: tries, one seed of each model, the other seeds."""
  lines = list(lines)
  return results.without_line(_all_cells(steps, lines), lines)


def _all_cells(steps: int, lines: list[results.Result]) -> Iterator[Cell]:
  yield Cell('runs', 'untrained', FIRST_SEED, pretrained.NO_RATE, 1)
  rates = {}
  for model in RATES:
    yield from tries(model, steps)
    rates[model] = best_rate(lines, model, steps)
  for model, rate in rates.items():
    yield Cell('runs', model, FIRST_SEED, rate, steps)
  for model, seeds in SEEDS.items():
    for seed in seeds:
      if seed != FIRST_SEED:
        yield Cell('runs', model, seed, rates[model], steps)


def main(argv: list[str]) -> None:
  """Trains the missing runs."""
  parser = run.make_parser(__doc__)
  parser.add_argument('--tokens', type=int, default=TOKENS, help='tokens of a run')
  options = parser.parse_args(argv)
  steps = options.tokens // TOKENS_PER_STEP
  missing = functools.partial(missing_cells, steps)
  planned = functools.partial(planned_cells, steps)
  run.train(run.Study(results.DOMAIN, missing, describe, planned), options)


if __name__ == '__main__':
  flags.run(main)
