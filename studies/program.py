"""Trains the missing runs of studies/program.md: python -m studies.program --data=/path/to/corpora

The folder has enwik8.gz. A finished run becomes a line of program.jsonl. For options and exit
statuses, see studies.run. The finished runs make a readable table at any time: all seeds of part A
of the claim come first, then the seeds of part B, then the other arms.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import pathlib
from typing import Any, NamedTuple

from studies import arms, results, run

# Arms of the parts of the claim. All seeds of a part are trained before the next part.
PART_A = ('value_embeddings', 'engram')
PART_B = ('untied', 'two_value_embeddings', 'value_embeddings_engram', 'engram_twice')
CLAIM = PART_A + PART_B
ARMS = (*CLAIM, *(arm for arm in (*arms.ONE_TABLE, *arms.TWO_TABLES) if arm not in CLAIM))
BASELINES = {**dict.fromkeys(arms.ONE_TABLE, 'value_embeddings')}
BASELINES |= dict.fromkeys(arms.TWO_TABLES, 'two_value_embeddings')

SEEDS = (1, 2, 3)
TRY_SEED = 100  # no seed of the table
STEPS = 2000
TRY_STEPS = 250
DECAY = 5  # the last fifth of the steps
LONGER = {  # arms that are trained for more steps too, and how many times as many
  'value_embeddings': (2, 4),
  'engram': (2, 4),
}
WHOLE_SPLITS = {split: (f'--split={split}',) for split in ('validation', 'test')}
FIRST_TOKENS = {'validation': ('--split=validation', '--config.evaluation.max_tokens=262144')}

MATRIX_RATES = (0.01, 0.02)
OWN_RATES = {
  'optimizer.learning_rate': (2e-3, 4e-3, 8e-3, 1.6e-2),  # of embeddings, head and norms
  'optimizer.table.learning_rate': (0.03, 0.1, 0.3, 1.0),
  'model.ngram_memories.0.learning_rate_factor': (1.0, 5.0, 25.0, 75.0),
}


class Tried(NamedTuple):
  """Learning rates that are tried: of the matrices, and one of the arm's own."""

  matrices: float
  own: float


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    table: tries, runs, or longer.
    arm: variant of studies/arms.py.
    seed: seed of the run.
    rates: learning rates.
    steps: number of steps.
  """

  table: str
  arm: str
  seed: int
  rates: Tried
  steps: int

  @property
  def name(self) -> str:
    """Name of the cell and of its workdir."""
    rates = f'muon{self.rates.matrices:g}.own{self.rates.own:g}'
    return f'{self.table}.{self.arm}.{rates}.steps{self.steps}.seed{self.seed}'

  @property
  def evaluations(self) -> dict[str, tuple[str, ...]]:
    """Flags of each evaluation."""
    return FIRST_TOKENS if self.table == 'tries' else WHOLE_SPLITS

  @property
  def flags(self) -> list[str]:
    """Flags of the training, without those of the machine."""
    changes = {
      'seed': self.seed,
      'optimizer.muon.learning_rate': self.rates.matrices,
      own_key(self.arm): self.rates.own,
      'training.steps': self.steps,
      'optimizer.decay_steps': self.steps // DECAY,
    }
    overrides = [f'--config.{key}={value}' for key, value in changes.items()]
    return [f'--config=studies/arms.py:{self.arm}', *overrides]

  def commands(self, data: pathlib.Path, workdir: pathlib.Path) -> Iterator[list[str]]:
    """Yields the commands of the run, with the texts in a folder."""
    path = f'--config.data.path={data / "enwik8.gz"}'
    yield ['ngrammer_jax.train', *self.flags, path, f'--workdir={workdir}']
    for flags in self.evaluations.values():
      yield ['ngrammer_jax.evaluate', f'--workdir={workdir}', *flags]


def own_key(arm: str) -> str:
  """Returns the key of the learning rate that an arm has of its own.

  It is that of its tables; without tables, that of the embeddings.
  """
  if arm == arms.ADAM:
    return 'model.ngram_memories.0.learning_rate_factor'
  if arms.has_table(arm):
    return 'optimizer.table.learning_rate'
  return 'optimizer.learning_rate'


def describe(cell: Cell, workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the line of a finished run."""
  return {
    'cell': cell.name,
    'table': cell.table,
    'model': cell.arm,
    'seed': cell.seed,
    'matrix_learning_rate': cell.rates.matrices,
    'own_learning_rate': cell.rates.own,
    'command': f'python -m ngrammer_jax.train {" ".join(cell.flags)}',
    **run.describe_model(workdir),
    **{name: run.read_evaluation(workdir, flags) for name, flags in cell.evaluations.items()},
  }


def tries(arm: str) -> Iterator[Cell]:
  """Yields the tries of an arm: two rates of the matrices by four of its own."""
  for matrices, own in itertools.product(MATRIX_RATES, OWN_RATES[own_key(arm)]):
    yield Cell('tries', arm, TRY_SEED, Tried(matrices, own), TRY_STEPS)


def best_rates(lines: Iterable[results.Result], arm: str) -> Tried | None:
  """Returns the rates of the try with the lowest loss; None before all have finished."""
  losses = {
    Tried(line['matrix_learning_rate'], line['own_learning_rate']): results.validation_nats(line)
    for line in lines
    if (line['table'], line['model']) == ('tries', arm)
  }
  if not losses.keys() >= {cell.rates for cell in tries(arm)}:
    return None
  return min(losses, key=losses.__getitem__)


def missing_cells(lines: Iterable[results.Result]) -> Iterator[Cell]:
  """Yields the cells that have no line and whose learning rates are known, the first ones first."""
  lines = list(lines)
  finished = {line['cell'] for line in lines}
  yield from (cell for cell in _all_cells(lines) if cell.name not in finished)


def _all_cells(lines: list[results.Result]) -> Iterator[Cell]:
  first, *other_seeds = SEEDS
  rates = {arm: best_rates(lines, arm) for arm in ARMS}
  for part in (PART_A, PART_B):
    for arm in part:
      yield from tries(arm)
    for seed, arm in itertools.product(SEEDS, part):
      yield from _runs(arm, seed, rates)
  others = [arm for arm in ARMS if arm not in CLAIM]
  for arm in others:
    yield from tries(arm)
    yield from _runs(arm, first, rates)
  for arm, factors in LONGER.items():
    for factor in factors:
      yield from _runs(arm, first, rates, factor)
  for seed, arm in itertools.product(other_seeds, others):
    yield from _runs(arm, seed, rates)
  for seed, (arm, factors) in itertools.product(other_seeds, LONGER.items()):
    for factor in factors:
      yield from _runs(arm, seed, rates, factor)


def _runs(arm: str, seed: int, rates: dict[str, Tried | None], factor: int = 1) -> Iterator[Cell]:
  """Yields the run of an arm, if its rates are known."""
  own = rates[arm]
  if own is not None:
    table = 'runs' if factor == 1 else 'longer'
    yield Cell(table, arm, seed, own, factor * STEPS)


STUDY = run.Study(results.PROGRAM, missing_cells, describe)

if __name__ == '__main__':
  run.main(STUDY, __doc__)
