"""Trains the missing runs of studies/program.md: python -m studies.program --data=/path/to/corpora

The folder has enwik8.gz, and c_source as written by studies.c_source. A finished run becomes a line
of program.jsonl. For options and exit statuses, see studies.run. The finished runs make a readable
table at any time: all seeds of part A of the claim come first, then all seeds of part B, then the
other arms. The larger stages begin with one seed of three arms.

  --stage=S --text=enwik8    13M parameters, 28M tokens, 6 arms, 3 seeds
  --stage=S --text=c_source  the same on C source
  --stage=short              three of these arms on C source, 8M tokens, one seed: without a GPU
  --stage=M                  34M parameters, 60M tokens of C source, 3 arms, 2 seeds, rates of S

After its first run, the command logs seconds a run, and the runs that the --minutes are enough for.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import math
import pathlib
from typing import Any, NamedTuple

from ngrammer_jax import errors, flags
from studies import arms, results, run

# The two arms whose difference decides a part of the claim, and the arms that are read beside them.
# All seeds of a group are trained before the next group.
PART_A = ('value_embeddings', 'engram')
PART_B = ('two_value_embeddings', 'value_embeddings_engram')
BESIDE = ('untied', 'engram_twice')
CLAIM = PART_A + PART_B + BESIDE
ARMS = (*CLAIM, *(arm for arm in (*arms.ONE_TABLE, *arms.TWO_TABLES) if arm not in CLAIM))
BASELINES = {**dict.fromkeys(arms.ONE_TABLE, 'value_embeddings')}
BASELINES |= dict.fromkeys(arms.TWO_TABLES, 'two_value_embeddings')

LARGER_CLAIM = ('untied', 'value_embeddings', 'engram')  # the first arms of stages S and M
SEEDS = (1, 2, 3)
TRY_SEED = 100  # no seed of the table
DIVERGED = 'diverged'  # table of the lines of runs whose loss was not finite
STEPS = 2000
TRY_STEPS = 250
DECAY = 5  # the last fifth of the steps
LONGER = {  # arms that are trained for more steps too, and how many times as many
  'value_embeddings': (2, 4),
  'engram': (2, 4),
}
WHOLE_SPLITS = {split: (f'--split={split}',) for split in ('validation', 'test')}
FIRST_TOKENS = {'validation': ('--split=validation', '--config.evaluation.max_tokens=262144')}

ENWIK8 = 'enwik8'
C_SOURCE = 'c_source'
PATHS = {ENWIK8: 'enwik8.gz', C_SOURCE: 'c_source'}  # in the folder of the corpora
TOKENS_PER_STEP = 16 * 256  # batch and segment of studies/arms.py

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
    rates: learning rates; None before they have been selected.
    steps: number of steps.
    text: one of PATHS.
  """

  table: str
  arm: str
  seed: int
  rates: Tried | None
  steps: int
  text: str = ENWIK8

  @property
  def name(self) -> str:
    """Name of the cell and of its workdir."""
    arm = self.arm if self.text == ENWIK8 else f'{self.arm}.{self.text}'
    rates = 'rates_of_the_best_try'
    if self.rates is not None:
      rates = f'muon{self.rates.matrices:g}.own{self.rates.own:g}'
    return f'{self.table}.{arm}.{rates}.steps{self.steps}.seed{self.seed}'

  @property
  def cost(self) -> float:
    """Cost for forecasts, without the evaluation; see `run.PlannedCell`."""
    return self.steps * TOKENS_PER_STEP

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
    if self.text != ENWIK8:
      changes['data.corpus'] = 'text'
    overrides = [f'--config.{key}={value}' for key, value in changes.items()]
    return [f'--config=studies/arms.py:{self.arm}', *overrides]

  def commands(self, data: pathlib.Path, workdir: pathlib.Path) -> Iterator[list[str]]:
    """Yields the commands of the run, with the texts in a folder."""
    path = f'--config.data.path={data / PATHS[self.text]}'
    yield ['ngrammer_jax.train', *self.flags, path, f'--workdir={workdir}']
    for of_split in self.evaluations.values():
      yield ['ngrammer_jax.evaluate', f'--workdir={workdir}', *of_split]


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
  scores = {}
  for name, of_split in cell.evaluations.items():
    scores[name] = run.read_evaluation(workdir / 'evaluation', of_split)
  return {
    'cell': cell.name,
    'table': cell.table,
    'model': cell.arm,
    'seed': cell.seed,
    'text': cell.text,
    'matrix_learning_rate': cell.rates.matrices,
    'own_learning_rate': cell.rates.own,
    'command': f'python -m ngrammer_jax.train {" ".join(cell.flags)}',
    **run.describe_model(workdir),
    **scores,
  }


def describe_diverged(cell: Cell) -> dict[str, Any]:
  """Returns the line of a run whose loss was not finite. It is in no table of losses."""
  return {
    'cell': cell.name,
    'table': DIVERGED,
    'model': cell.arm,
    'seed': cell.seed,
    'text': cell.text,
    'command': f'python -m ngrammer_jax.train {" ".join(cell.flags)}',
  }


def tries(arm: str, steps: int = TRY_STEPS, text: str = ENWIK8) -> Iterator[Cell]:
  """Yields the tries of an arm: two rates of the matrices by four of its own."""
  for matrices, own in itertools.product(MATRIX_RATES, OWN_RATES[own_key(arm)]):
    yield Cell('tries', arm, TRY_SEED, Tried(matrices, own), steps, text)


def best_rates(
  lines: Iterable[results.Result], arm: str, steps: int = TRY_STEPS, text: str = ENWIK8
) -> Tried | None:
  """Returns the rates of the try with the lowest loss; None before all have finished.

  Tries that diverged have an infinite loss.
  """
  losses = {}
  for line in lines:
    if line['table'] == 'tries':
      losses[line['cell']] = results.validation_nats(line)
    elif line['table'] == DIVERGED:
      losses[line['cell']] = math.inf
  tried = list(tries(arm, steps, text))
  if any(cell.name not in losses for cell in tried):
    return None
  return min(tried, key=lambda cell: losses[cell.name]).rates


def missing_cells(lines: Iterable[results.Result]) -> Iterator[Cell]:
  """Yields the cells that have no line and whose learning rates are known, the first ones first."""
  return _with_rates(planned_cells(lines))


def planned_cells(lines: Iterable[results.Result]) -> Iterator[Cell]:
  """Yields all cells that have no line, the first ones first."""
  lines = list(lines)
  return results.without_line(_all_cells(lines), lines)


def _with_rates(cells: Iterable[Cell]) -> Iterator[Cell]:
  for cell in cells:
    if cell.rates is not None:
      yield cell


def _all_cells(lines: list[results.Result]) -> Iterator[Cell]:
  first, *other_seeds = SEEDS
  rates = {arm: best_rates(lines, arm) for arm in ARMS}
  for group in (PART_A, PART_B, BESIDE):
    for arm in group:
      yield from tries(arm)
    for seed, arm in itertools.product(SEEDS, group):
      yield _run(arm, seed, rates)
  others = [arm for arm in ARMS if arm not in CLAIM]
  for arm in others:
    yield from tries(arm)
    yield _run(arm, first, rates)
  for seed, arm in itertools.product(other_seeds, others):
    yield _run(arm, seed, rates)
  for seed, (arm, factors) in itertools.product(SEEDS, LONGER.items()):
    for factor in factors:
      yield _run(arm, seed, rates, factor)


def _run(arm: str, seed: int, rates: dict[str, Tried | None], factor: int = 1) -> Cell:
  """Returns the run of an arm."""
  table = 'runs' if factor == 1 else 'longer'
  return Cell(table, arm, seed, rates[arm], factor * STEPS)


@dataclasses.dataclass(frozen=True)
class Stage:
  """The runs of a larger stage on one text.

  Attributes:
    size: one of arms.SIZES.
    text: one of PATHS.
    tokens: tokens of a run.
    arms: arms without the size in their name, those of LARGER_CLAIM first.
    seeds: seeds.
    tuned_by: the stage whose tries select the rates; None: this one.
  """

  size: str
  text: str
  tokens: int
  arms: tuple[str, ...]
  seeds: tuple[int, ...]
  tuned_by: 'Stage | None' = None

  @property
  def steps(self) -> int:
    """Steps of a run."""
    return self.tokens // TOKENS_PER_STEP

  def tries(self, arm: str) -> list[Cell]:
    """Returns the tries of an arm: an eighth of a run, as in stage 0."""
    return list(tries(f'{self.size}_{arm}', self.steps // 8, self.text))

  def best_rates(self, lines: Iterable[results.Result], arm: str) -> Tried | None:
    """Returns the rates of the best try of an arm; None before all have finished."""
    tuned_by = self.tuned_by or self
    name = f'{tuned_by.size}_{arm}'
    return best_rates(lines, name, tuned_by.steps // 8, tuned_by.text)

  def missing_cells(self, lines: Iterable[results.Result]) -> Iterator[Cell]:
    """Yields the cells that have no line and whose learning rates are known."""
    return _with_rates(self.planned_cells(lines))

  def planned_cells(self, lines: Iterable[results.Result]) -> Iterator[Cell]:
    """Yields all cells that have no line: one seed of the claim, of the others, other seeds."""
    lines = list(lines)
    return results.without_line(self._all_cells(lines), lines)

  def _all_cells(self, lines: list[results.Result]) -> Iterator[Cell]:
    first, *other_seeds = self.seeds
    others = tuple(arm for arm in self.arms if arm not in LARGER_CLAIM)
    for group in (LARGER_CLAIM, others):
      if self.tuned_by is None:
        for arm in group:
          yield from self.tries(arm)
      for arm in group:
        yield self._run(lines, arm, first)
    for seed, arm in itertools.product(other_seeds, self.arms):
      yield self._run(lines, arm, seed)

  def _run(self, lines: list[results.Result], arm: str, seed: int) -> Cell:
    rates = self.best_rates(lines, arm)
    return Cell('runs', f'{self.size}_{arm}', seed, rates, self.steps, self.text)


_S = Stage('s', ENWIK8, 28_000_000, arms.LARGER_ARMS, SEEDS)
_S_OF_C = dataclasses.replace(_S, text=C_SOURCE)
STAGES = {
  ('S', ENWIK8): _S,
  ('S', C_SOURCE): _S_OF_C,
  ('short', C_SOURCE): Stage('s', C_SOURCE, 8_000_000, LARGER_CLAIM, (1,)),
  ('M', C_SOURCE): Stage('m', C_SOURCE, 60_000_000, LARGER_CLAIM, (1, 2), tuned_by=_S_OF_C),
}
STUDY = run.Study(results.PROGRAM, missing_cells, describe, planned_cells, describe_diverged)


def find_stage(name: str, text: str | None) -> Stage | None:
  """Returns a larger stage; None for stage 0.

  Args:
    name: 0, S, short or M.
    text: one of PATHS; None: the first text of the stage.

  Raises:
    BadInput: the stage has no runs on this text.
  """
  texts = [ENWIK8]
  if name != '0':
    texts = [of_stage for stage, of_stage in STAGES if stage == name]
  text = text or texts[0]
  if text not in texts:
    raise errors.BadInput(
      f'--text={text}: --stage={name} has no runs on this text; use {" or ".join(texts)}'
    )
  return STAGES.get((name, text))


def check_tuned(stage: Stage, lines: list[results.Result]) -> None:
  """Raises BadInput if a stage needs tries of another one that have no line."""
  if stage.tuned_by is None:
    return
  untuned = [arm for arm in stage.arms if stage.best_rates(lines, arm) is None]
  if untuned:
    raise errors.BadInput(
      f'--stage=M has the learning rates of stage S, whose tries on {stage.text} are missing for '
      f'{", ".join(untuned)}: first run `python -m studies.program --stage=S --text={stage.text}`'
    )


def main(argv: list[str]) -> None:
  """Trains the missing runs of a stage."""
  parser = run.make_parser(__doc__)
  names = ['0', *dict.fromkeys(name for name, _ in STAGES)]
  parser.add_argument('--stage', choices=names, default='0', help='size of the models')
  parser.add_argument('--text', choices=PATHS, help='text of stage S; default: enwik8')
  options = parser.parse_args(argv)
  study = STUDY
  stage = find_stage(options.stage, options.text)
  if stage is not None:
    if not options.list:
      check_tuned(stage, results.read(results.PROGRAM))
    study = STUDY._replace(missing_cells=stage.missing_cells, planned_cells=stage.planned_cells)
  run.train(study, options)


if __name__ == '__main__':
  flags.run(main)
