"""The runs of each table of docs/results.md, in the order of their training.

A cell is one run: a config, a seed, a learning rate, and another one for tables of n-grams. Rates
are tuned first, on seed 0, for a quarter of the steps. Of nearly equal rates the lowest is used,
because the best rate falls with the number of steps; the table `rates` tests the choice. The n-gram
memories have the rate of `plain`, and tuned rates of their tables. A control has the rates of its
method, a span the rate of the segment memory, any other run the rate of its config.

Controls, sizes, spans and combined memories have a quarter of the steps too: the runs of the tuning
with the tuned rates are their baselines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from dataclasses import field
import itertools
import pathlib
from typing import NamedTuple

from studies import context, ngram_memories, recurrent, state_of_the_union
from studies.results import Rates, Result, bits_per_byte, validation_nats, without_line

SEEDS = (0, 1, 2)
CONTROLLED = ('engram', 'ngrammer')  # with all controls
OTHER_CONTROLS = ('over_encoding_unigrams', 'latent_engram_wider_rows')
SCALED = ('ngrammer', 'over_encoding', 'engram')
WHOLE_SPLITS = {split: (f'--split={split}',) for split in ('validation', 'test')}
# The first 2^18 tokens of the validation split.
FIRST_TOKENS = {'validation': ('--split=validation', '--config.evaluation.max_tokens=262144')}
# The first 2^20 characters of the test split, with memories of 0 to 8 segments.
MEMORY_SEGMENTS = (0, 1, 2, 4, 8)
FIRST_CHARACTERS = ('--split=test', '--config.evaluation.max_tokens=1048576')
# data.path of a config file, in the folder of all texts. None: the text comes with a package.
DATA_PATHS = {'recurrent': 'wikitext2', 'state_of_the_union': None}

# In nats per token. Seeds of full runs differ by 0.001 to 0.011 (standard deviation), so a larger
# difference may be noise too; full runs with other rates tell.
TIE = 0.0015


class Tuning(NamedTuple):
  """The learning rates of the weights outside of tables that are tried."""

  methods: Sequence[str]
  learning_rates: Sequence[float]
  steps: int  # a quarter of those of a run


_TRANSFORMERS = (*ngram_memories.TRANSFORMERS, ngram_memories.LLAMA)
TUNING = {
  'ngram_memories': Tuning(_TRANSFORMERS, (4e-3, 8e-3, 1.6e-2), 500),
  'context': Tuning(('none', *context.MEMORIES), (2e-3, 4e-3, 8e-3), 1000),
}
# Tables of runs with as many steps as the tuning.
SHORT = ('baselines', 'controls', 'sizes', 'spans', 'combined')
TABLE_LEARNING_RATES = (1e-2, 3e-2, 1e-1, 3e-1, 1.0)
# Other learning rates, tried for all steps: of the dense weights, and of the tables.
OTHER_RATES = {'plain': (4e-3, 1.6e-2), 'wide': (4e-3,), 'engram': (4e-3,)}
OTHER_TABLE_RATES = {'over_encoding': (1e-1,), 'engram': (1e-1, 3e-1, 1.0)}
# Persistent vectors may need a lower one than the feed-forward that they replace.
OTHER_SPAN_RATES = {'all_attention': (5e-4, 1e-3, 2e-3), 'span_256': (2e-3,)}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    table: table of docs/results.md.
    model: variant of the config file.
    seed: seed of the run.
    rates: learning rates.
    steps: number of steps. None: that of the config.
    config: config file in this folder.
    evaluations: flags of each evaluation.
  """

  table: str
  model: str
  seed: int
  rates: Rates
  steps: int | None = None
  config: str = 'ngram_memories'
  evaluations: Mapping[str, Sequence[str]] = field(default_factory=lambda: WHOLE_SPLITS)

  @property
  def name(self) -> str:
    """Name of the cell and of its workdir."""
    tables = '' if self.rates.tables is None else f'.tables{self.rates.tables:g}'
    return f'{self.table}.{self.model}.lr{self.rates.dense:g}{tables}.seed{self.seed}'

  @property
  def flags(self) -> list[str]:
    """Flags of the training, without those of the machine."""
    changes = {'seed': self.seed, 'optimizer.learning_rate': self.rates.dense}
    if self.rates.tables is not None:
      changes['optimizer.table.learning_rate'] = self.rates.tables
    if self.steps is not None:
      changes['training.steps'] = self.steps
    overrides = [f'--config.{key}={value}' for key, value in changes.items()]
    return [f'--config=studies/{self.config}.py:{self.model}', *overrides]

  def commands(self, data: pathlib.Path, workdir: pathlib.Path) -> Iterator[list[str]]:
    """Yields the commands of the run, with texts in a folder with enwik8, text8 and wikitext2."""
    path = DATA_PATHS.get(self.config, '')
    of_data = [] if path is None else [f'--config.data.path={data / path}']
    yield ['ngrammer_jax.train', *self.flags, *of_data, f'--workdir={workdir}']
    for name, flags in self.evaluations.items():
      output = f'--output={evaluation_folder(workdir, name)}'
      yield ['ngrammer_jax.evaluate', f'--workdir={workdir}', output, *flags]


def evaluation_folder(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the folder of the scores of an evaluation.

  Each evaluation has a folder of its own, since a later one of the same split would overwrite it.
  """
  return workdir / 'evaluation' / name.replace(', ', '_').replace(' ', '_')


def baselines(results: Iterable[Result]) -> list[Result]:
  """Returns the baselines of short runs: for the first seed, the tuning with the tuned rates."""
  results = list(results)
  tuning = [r for r in results if r['table'] == 'tuning']
  rates = {method: tuned_rates(results, method) for method in {r['model'] for r in tuning}}
  first = [r for r in tuning if Rates.of(r) == rates[r['model']]]
  return first + [r for r in results if r['table'] == 'baselines']


def tuned_rates(results: Sequence[Result], method: str) -> Rates | None:
  """Returns the learning rates of a method; None before all of its grid have been tried."""
  if method in ngram_memories.ROWS:
    if (plain := tuned_rates(results, 'plain')) is None:
      return None
    results = [result for result in results if result['learning_rate'] == plain.dense]
    tables = best_rate(results, method, TABLE_LEARNING_RATES, 'table_learning_rate')
    return None if tables is None else Rates(plain.dense, tables)
  (tuning,) = (tuning for tuning in TUNING.values() if method in tuning.methods)
  dense = best_rate(results, method, tuning.learning_rates)
  return None if dense is None else Rates(dense)


def best_rate(
  results: Iterable[Result], method: str, grid: Sequence[float], key: str = 'learning_rate'
) -> float | None:
  """Returns the lowest rate with a loss at most `TIE` above the best; None before all are tried."""
  losses = {
    result[key]: validation_nats(result)
    for result in results
    if (result['table'], result['model']) == ('tuning', method)
  }
  if not losses.keys() >= set(grid):
    return None
  return min(rate for rate, loss in losses.items() if loss <= min(losses.values()) + TIE)


def best_method(results: Iterable[Result]) -> str | None:
  """Returns the n-gram memory with the best validation of seed 0; None before all have one."""
  losses = {
    result['model']: bits_per_byte(result, 'validation')
    for result in results
    if (result['table'], result['seed']) == ('main', 0) and result['model'] in ngram_memories.ROWS
  }
  return (
    min(losses, key=losses.__getitem__) if losses.keys() == ngram_memories.ROWS.keys() else None
  )


def missing_cells(results: Iterable[Result]) -> Iterator[Cell]:
  """Yields the cells that have no result and whose learning rate is known, the first ones first."""
  results = list(results)
  return without_line(_all_cells(results), results)


def _all_cells(results: list[Result]) -> Iterator[Cell]:
  """Yields all runs, those of the first seed before the other seeds of controls and memory."""
  main = ngram_memories.METHODS
  memory = TUNING['context'].methods
  methods = *main, ngram_memories.LLAMA, *memory
  rates = {method: tuned_rates(results, method) for method in methods}

  def tuned_cells(table: str, models: Iterable[str], seed: int = 0) -> Iterator[Cell]:
    """Yields a run of each model, if the learning rates of its method are known."""
    for model in models:
      if (own := rates[method_of(model)]) is None:
        continue
      if own.tables is not None and not ngram_memories.has_table_learning_rate(model):
        own = own._replace(tables=None)
      config = 'context' if model in context.VARIANTS else 'ngram_memories'
      steps = None
      evaluations = WHOLE_SPLITS
      if table in SHORT:
        steps = TUNING[config].steps
        evaluations = FIRST_TOKENS
      elif table == 'memory':
        evaluations = _memory_evaluations(model)
      yield Cell(table, model, seed, own, steps, config, evaluations)

  for model, table_rates in state_of_the_union.TABLE_LEARNING_RATES.items():
    for tables in table_rates:
      own = Rates(state_of_the_union.LEARNING_RATE, tables)
      yield Cell('state_of_the_union', model, 0, own, config='state_of_the_union')
  yield from _tuning_cells('ngram_memories')
  if rates['plain'] is not None:
    yield from _table_tuning_cells(rates['plain'].dense)
  yield from tuned_cells('main', main)
  repeated_controls = _controls(CONTROLLED, 'few_rows', 'frozen', 'unigrams')
  yield from tuned_cells('controls', repeated_controls)
  engram = ('engram',)
  yield from tuned_cells('long_controls', _controls(engram, 'few_rows', 'frozen', 'unigrams'))
  joins = 'plain_join', 'unigrams_plain_join', 'half_gate', 'kv_plus_one'
  yield from tuned_cells('controls', _controls(engram, *joins))
  yield from tuned_cells('controls', _controls(CONTROLLED, 'displaced', 'adam'))
  others = 'adam_times_5', 'frozen_unit', 'token_ids', 'with_unigrams'
  yield from tuned_cells('controls', _controls(engram, *others))
  yield from tuned_cells('controls', ('ngrammer_wider_rows', *OTHER_CONTROLS))
  yield from tuned_cells('long_controls', _controls(engram, 'with_unigrams'))
  yield from tuned_cells('sizes', _controls(SCALED, *ngram_memories.SCALES))
  for seed in SEEDS[1:]:
    yield from tuned_cells('main', main, seed)
  yield from _tuning_cells('context')
  yield from tuned_cells('memory', memory)
  yield from tuned_cells('spans', context.SPANS)
  if (own := rates['memory']) is not None:
    yield from _span_rate_cells(own)
  for seed in SEEDS[1:]:
    yield from tuned_cells('baselines', ('plain', 'wide', *CONTROLLED), seed)
    yield from tuned_cells('controls', [*repeated_controls, 'engram_with_unigrams'], seed)
  for seed in SEEDS[1:]:
    yield from tuned_cells('memory', memory, seed)
  if (best := best_method(results)) is not None:
    for seed in SEEDS:
      models = _controls((best, 'wide'), *ngram_memories.MEMORY_LENGTHS)
      yield from tuned_cells('combined', models, seed)
  yield from tuned_cells('present_day', ('untied', 'engram'))
  for seed in SEEDS:
    yield from tuned_cells('present_day', ngram_memories.PRESENT_DAY, seed)
  for model in recurrent.VARIANTS:
    yield Cell('recurrent', model, 0, Rates(recurrent.LEARNING_RATE), config='recurrent')
  yield from _rate_cells(rates)


def method_of(model: str) -> str:
  """Returns the method whose learning rates a model has."""
  if model in ngram_memories.VARIANTS:
    return ngram_memories.VARIANTS[model][0]
  return model if model in TUNING['context'].methods else 'memory'


def _tuning_cells(config: str) -> Iterator[Cell]:
  tuning = TUNING[config]
  for method, rate in itertools.product(tuning.methods, tuning.learning_rates):
    yield Cell('tuning', method, 0, Rates(rate), tuning.steps, config, FIRST_TOKENS)


def _table_tuning_cells(dense_rate: float) -> Iterator[Cell]:
  steps = TUNING['ngram_memories'].steps
  for method, rate in itertools.product(ngram_memories.ROWS, TABLE_LEARNING_RATES):
    yield Cell('tuning', method, 0, Rates(dense_rate, rate), steps, evaluations=FIRST_TOKENS)


def _rate_cells(rates: Mapping[str, Rates | None]) -> Iterator[Cell]:
  """Yields runs of all steps with other learning rates than the tuned ones."""
  for method, others in OTHER_RATES.items():
    if (own := rates[method]) is not None:
      other_rates = (own._replace(dense=rate) for rate in others if rate != own.dense)
      yield from (Cell('rates', method, 0, other) for other in other_rates)
  for method, others in OTHER_TABLE_RATES.items():
    if (own := rates[method]) is not None:
      other_rates = (own._replace(tables=rate) for rate in others if rate != own.tables)
      yield from (Cell('rates', method, 0, other) for other in other_rates)


def _span_rate_cells(tuned: Rates) -> Iterator[Cell]:
  """Yields runs of spans with other learning rates than the tuned one."""
  steps = TUNING['context'].steps
  for model, others in OTHER_SPAN_RATES.items():
    own = (tuned._replace(dense=rate) for rate in others if rate != tuned.dense)
    yield from (Cell('spans', model, 0, rates, steps, 'context', FIRST_TOKENS) for rates in own)


def _controls(methods: Iterable[str], *names: str) -> list[str]:
  """Returns the variants of methods with each control."""
  return [f'{method}_{name}' for name in names for method in methods]


def _memory_evaluations(model: str) -> dict[str, Sequence[str]]:
  """Returns the evaluations of a run on text8, by the memory in segments if it has one."""
  evaluations = {'test': FIRST_CHARACTERS}
  if model != 'none':
    for segments in MEMORY_SEGMENTS:
      length = f'--config.evaluation.memory.length={segments * context.SEGMENT}'
      evaluations[f'test, memory {segments}'] = (*FIRST_CHARACTERS, length)
  return evaluations
