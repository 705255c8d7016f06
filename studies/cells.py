"""The runs of each table of docs/results.md, in the order in which they are trained.

A cell is one run: a config, a seed and a learning rate. Learning rates are tuned first, alike for
all methods: on seed 0, for a quarter of the steps. A control has that of its method, a span that of
the segment memory, an attention LSTM that of its config.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from dataclasses import field
from typing import Any

from studies import context, ngram_memories, recurrent

LEARNING_RATES = (2e-3, 4e-3, 8e-3)
# Models whose learning rate is tuned, for a quarter of the steps.
TUNED = {'ngram_memories': ngram_memories.METHODS, 'context': ('none', *context.MEMORIES)}
TUNING_STEPS = {'ngram_memories': 500, 'context': 1000}
SEEDS = (0, 1, 2)
CONTROLLED = ('engram', 'ngrammer')
SCALED = ('ngrammer', 'over_encoding', 'engram')
WHOLE_SPLITS = {split: (f'--split={split}',) for split in ('validation', 'test')}
# The first 2^18 tokens of the validation split.
FIRST_TOKENS = {'validation': ('--split=validation', '--config.evaluation.max_tokens=262144')}
# The first 2^20 characters of the test split, with memories of 0 to 8 segments.
MEMORY_SEGMENTS = (0, 1, 2, 4, 8)
FIRST_CHARACTERS = ('--split=test', '--config.evaluation.max_tokens=1048576')

Result = Mapping[str, Any]  # a line of results.jsonl


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


def tuned(results: Iterable[Result], method: str) -> float | None:
  """Returns the best learning rate of a method; None before all have been tried."""
  losses = {
    result['learning_rate']: result['validation']['nll_nats_per_token']
    for result in results
    if (result['table'], result['model']) == ('tuning', method)
  }
  return min(losses, key=losses.__getitem__) if losses.keys() >= set(LEARNING_RATES) else None


def missing(results: Iterable[Result]) -> Iterator[Cell]:
  """Yields the cells that have no result and whose learning rate is known, the first ones first."""
  results = list(results)
  done = {result['cell'] for result in results}
  yield from (cell for cell in _all(results) if cell.name not in done)


def _all(results: list[Result]) -> Iterator[Cell]:
  for config, methods in TUNED.items():
    for method in methods:
      for rate in LEARNING_RATES:
        yield Cell('tuning', method, 0, rate, TUNING_STEPS[config], config, FIRST_TOKENS)
  rates = {method: tuned(results, method) for methods in TUNED.values() for method in methods}
  for model in recurrent.MODELS:
    yield Cell('recurrent', model, 0, recurrent.LEARNING_RATE, config='recurrent')
  for config, table, method, model, seed in _trained():
    if rates[method] is not None:
      evaluations = WHOLE_SPLITS if config == 'ngram_memories' else _by_memory(table, model)
      yield Cell(table, model, seed, rates[method], None, config, evaluations)


def _by_memory(table: str, model: str) -> dict[str, Sequence[str]]:
  """Returns the evaluations of a run on text8, by the memory in segments if it has one."""
  evaluations = {'test': FIRST_CHARACTERS}
  if table == 'memory' and model != 'none':
    for segments in MEMORY_SEGMENTS:
      length = f'--config.evaluation.memory.length={segments * context.SEGMENT}'
      evaluations[f'test, memory {segments}'] = (*FIRST_CHARACTERS, length)
  return evaluations


def _trained() -> Iterator[tuple[str, str, str, str, int]]:
  """Yields config, table, tuned method, model and seed of all runs with a tuned learning rate."""
  for seed in SEEDS:
    for method in ngram_memories.METHODS:
      yield 'ngram_memories', 'main', method, method, seed
    for model in TUNED['context']:
      yield 'context', 'memory', model, model, seed
  for seed in SEEDS:
    for control in ('few_rows', 'frozen', 'unigrams'):
      for method in CONTROLLED:
        yield 'ngram_memories', 'controls', method, f'{method}_{control}', seed
  for model in context.SPANNED:
    yield 'context', 'spans', 'memory', model, 0
  for control in ('displaced', 'half_gate', 'plain_join', 'kv_plus_one', 'adam'):
    for method in CONTROLLED:
      if method == 'engram' or control in ('displaced', 'adam'):  # the others are of the gate
        yield 'ngram_memories', 'controls', method, f'{method}_{control}', 0
  for scale in ngram_memories.SCALES:
    for method in SCALED:
      yield 'ngram_memories', 'sizes', method, f'{method}_{scale}', 0
