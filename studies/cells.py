"""The runs of each table of docs/results.md, in the order in which they are trained.

A cell is one run: a config, a seed and a learning rate. Learning rates are tuned first, alike for
all methods: on seed 0, for a quarter of the steps. Of rates that are nearly equal the lowest is
used, because the best rate falls with the number of steps; the table `rates` tests the choice. A
control has the rate of its method, a span that of the segment memory, the others that of their
config.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from dataclasses import field
import itertools
import pathlib
from typing import NamedTuple

from studies import context, ngram_memories, recurrent, state_of_the_union
from studies.results import Result

SEEDS = (0, 1, 2)
CONTROLLED = ('engram', 'ngrammer')
SCALED = ('ngrammer', 'over_encoding', 'engram')
WHOLE_SPLITS = {split: (f'--split={split}',) for split in ('validation', 'test')}
# The first 2^18 tokens of the validation split.
FIRST_TOKENS = {'validation': ('--split=validation', '--config.evaluation.max_tokens=262144')}
# The first 2^20 characters of the test split, with memories of 0 to 8 segments.
MEMORY_SEGMENTS = (0, 1, 2, 4, 8)
FIRST_CHARACTERS = ('--split=test', '--config.evaluation.max_tokens=1048576')
# data.path of a config file, in the folder of all texts. None: the text comes with a package.
DATA_PATHS = {'recurrent': 'wikitext2', 'state_of_the_union': None}


TIE = 0.0015  # nats per token; seeds of full runs differ by 0.003 to 0.011, standard deviation
RATES = {'plain': (4e-3, 1.6e-2), 'wide': (4e-3,), 'engram': (4e-3,), 'latent_engram': (1.6e-2,)}


class Tuning(NamedTuple):
  """The learning rates that are tried with each method of a config."""

  methods: Sequence[str]
  learning_rates: Sequence[float]
  steps: int  # a quarter of those of a run


TUNING = {
  'ngram_memories': Tuning(ngram_memories.METHODS, (4e-3, 8e-3, 1.6e-2), 500),
  'context': Tuning(('none', *context.MEMORIES), (2e-3, 4e-3, 8e-3), 1000),
}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    table: table of docs/results.md.
    model: variant of the config file.
    seed: seed of the run.
    learning_rate: learning rate of the dense weights.
    steps: number of steps. None: that of the config.
    config: config file in this folder.
    evaluations: flags of each evaluation.
  """

  table: str
  model: str
  seed: int
  learning_rate: float
  steps: int | None = None
  config: str = 'ngram_memories'
  evaluations: Mapping[str, Sequence[str]] = field(default_factory=lambda: WHOLE_SPLITS)

  @property
  def name(self) -> str:
    """Name of the cell and of its workdir."""
    return f'{self.table}.{self.model}.lr{self.learning_rate:g}.seed{self.seed}'

  @property
  def flags(self) -> list[str]:
    """Flags of the training, without those of the machine."""
    changes = {'seed': self.seed, 'optimizer.learning_rate': self.learning_rate}
    if self.steps is not None:
      changes['training.steps'] = self.steps
    overrides = [f'--config.{key}={value}' for key, value in changes.items()]
    return [f'--config=studies/{self.config}.py:{self.model}', *overrides]

  def data_flags(self, folder: pathlib.Path) -> list[str]:
    """Returns the flag of the text, in a folder with enwik8, text8 and a folder wikitext2."""
    path = DATA_PATHS.get(self.config, '')
    return [] if path is None else [f'--config.data.path={folder / path}']


def best_learning_rate(
  results: Iterable[Result], method: str, learning_rates: Sequence[float]
) -> float | None:
  """Returns the lowest rate with a loss at most `TIE` above the best; None before all are tried."""
  losses = {
    result['learning_rate']: result['validation']['nll_nats_per_token']
    for result in results
    if (result['table'], result['model']) == ('tuning', method)
  }
  if not losses.keys() >= set(learning_rates):
    return None
  return min(rate for rate, loss in losses.items() if loss <= min(losses.values()) + TIE)


def best_method(results: Iterable[Result]) -> str | None:
  """Returns the n-gram memory with the best validation of seed 0; None before all have one."""
  losses = {
    result['model']: result['validation']['bits_per_byte']
    for result in results
    if (result['table'], result['seed']) == ('main', 0) and result['model'] in ngram_memories.ROWS
  }
  return (
    min(losses, key=losses.__getitem__) if losses.keys() == ngram_memories.ROWS.keys() else None
  )


def missing_cells(results: Iterable[Result]) -> Iterator[Cell]:
  """Yields the cells that have no result and whose learning rate is known, the first ones first."""
  results = list(results)
  done = {result['cell'] for result in results}
  yield from (cell for cell in _all_cells(results) if cell.name not in done)


def _all_cells(results: list[Result]) -> Iterator[Cell]:
  """Yields all runs, those of the first seed before the other seeds of controls and memory."""
  rates = {
    method: best_learning_rate(results, method, tuning.learning_rates)
    for tuning in TUNING.values()
    for method in tuning.methods
  }

  def tuned_cells(table: str, models: Mapping[str, str], seed: int = 0) -> Iterator[Cell]:
    """Yields a run of each model, if the learning rate of its method is known."""
    for model, method in models.items():
      rate = rates[method]
      if rate is None:
        continue
      if table in ('memory', 'spans'):
        evaluations = _memory_evaluations(table, model)
        yield Cell(table, model, seed, rate, config='context', evaluations=evaluations)
      else:
        yield Cell(table, model, seed, rate)

  main, memory = ({method: method for method in tuning.methods} for tuning in TUNING.values())
  for model in state_of_the_union.METHODS:
    rate = state_of_the_union.LEARNING_RATE
    yield Cell('state_of_the_union', model, 0, rate, config='state_of_the_union')
  yield from _tuning_cells('ngram_memories')
  yield from tuned_cells('main', main)
  if None not in (rates[method] for method in main):
    for method, others in RATES.items():
      yield from (Cell('rates', method, 0, rate) for rate in others)
  yield from _tuning_cells('context')
  yield from tuned_cells('memory', memory)
  for seed in SEEDS[1:]:
    yield from tuned_cells('main', main, seed)
  engram_controls = ('plain_join', 'half_gate', 'kv_plus_one')  # of its gate and its rows
  yield from tuned_cells('controls', {f'engram_{control}': 'engram' for control in engram_controls})
  repeated_controls = _controls('few_rows', 'frozen', 'unigrams')
  yield from tuned_cells('controls', repeated_controls)
  yield from tuned_cells('controls', _controls('displaced', 'adam'))
  for scale in ngram_memories.SCALES:
    yield from tuned_cells('sizes', {f'{method}_{scale}': method for method in SCALED})
  yield from tuned_cells('spans', dict.fromkeys(context.SPANNED, 'memory'))
  for seed in SEEDS[1:]:
    yield from tuned_cells('controls', repeated_controls, seed)
  for seed in SEEDS[1:]:
    yield from tuned_cells('memory', memory, seed)
  for model in recurrent.MODELS:
    yield Cell('recurrent', model, 0, recurrent.LEARNING_RATE, config='recurrent')
  if (best := best_method(results)) is not None:
    for method in (best, 'wide'):
      for seed in SEEDS:
        yield from tuned_cells('combined', {f'{method}_{ngram_memories.COMBINED}': method}, seed)


def _tuning_cells(config: str) -> Iterator[Cell]:
  tuning = TUNING[config]
  for method, rate in itertools.product(tuning.methods, tuning.learning_rates):
    yield Cell('tuning', method, 0, rate, tuning.steps, config, FIRST_TOKENS)


def _controls(*names: str) -> dict[str, str]:
  """Returns the method of each controlled model."""
  return {f'{method}_{control}': method for control in names for method in CONTROLLED}


def _memory_evaluations(table: str, model: str) -> dict[str, Sequence[str]]:
  """Returns the evaluations of a run on text8, by the memory in segments if it has one."""
  evaluations = {'test': FIRST_CHARACTERS}
  if table == 'memory' and model != 'none':
    for segments in MEMORY_SEGMENTS:
      length = f'--config.evaluation.memory.length={segments * context.SEGMENT}'
      evaluations[f'test, memory {segments}'] = (*FIRST_CHARACTERS, length)
  return evaluations
