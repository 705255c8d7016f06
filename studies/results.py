"""Results of the runs: JSON lines, means over seeds, and differences of runs with equal seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from ngrammer_jax.system import json_files

RUNS = pathlib.Path(__file__).with_name('results.jsonl')
FREQUENCY = pathlib.Path(__file__).with_name('frequency.jsonl')
ZERO_SHOT = pathlib.Path(__file__).with_name('zero_shot.jsonl')
LONGER = pathlib.Path(__file__).with_name('longer.jsonl')
PROGRAM = pathlib.Path(__file__).with_name('program.jsonl')
PRETRAINED = pathlib.Path(__file__).with_name('pretrained.jsonl')

Result = Mapping[str, Any]  # a line
Loss = Callable[[Result], float]


class Rates(NamedTuple):
  """Learning rates of a run."""

  dense: float
  tables: float | None = None  # None: there are no tables, or they have no rate of their own

  @classmethod
  def of(cls, run: Result) -> 'Rates':
    """Returns the rates of a line."""
    return cls(run['learning_rate'], run.get('table_learning_rate'))

  def __str__(self) -> str:
    return f'{self.dense:g}' if self.tables is None else f'{self.dense:g}, tables {self.tables:g}'


def read(path: pathlib.Path) -> list[Result]:
  """Returns the lines of a file; none before the first result."""
  return list(json_files.read_lines(path)) if path.exists() else []


def append(path: pathlib.Path, result: Result) -> None:
  """Appends a line to a file."""
  json_files.append_line(path, dict(result))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
  """Returns the mean and its standard error; no error for a single value."""
  error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
  return statistics.fmean(values), error


def format_mean(values: Sequence[float]) -> str:
  """Formats the mean of values, and its standard error if there are several."""
  mean, error = mean_and_error(values)
  return f'{mean:.4f}' if error is None else f'{mean:.4f} ± {error:.4f}'


def bits_per_byte(run: Result, split: str = 'test') -> float:
  """Returns the bits per byte of a whole split."""
  return run[split]['bits_per_byte']


def validation_nats(run: Result) -> float:
  """Returns the nats per token of the tokens of the validation split that were scored."""
  return run['validation']['nll_nats_per_token']


def format_difference(
  runs: Iterable[Result], baseline: Iterable[Result], loss: Loss = bits_per_byte
) -> str:
  """Formats the mean difference of the losses of runs from those of a baseline with equal seeds.

  Returns '' if they have no seed in common.
  """
  scores, baselines = (_by_seed(group, loss) for group in (runs, baseline))
  differences = [scores[seed] - baselines[seed] for seed in scores if seed in baselines]
  return format_mean(differences) if differences else ''


def _by_seed(runs: Iterable[Result], loss: Loss) -> dict[int, float]:
  """Returns losses by seed. Raises ValueError if two runs have the same seed."""
  scores = {}
  for run in runs:
    if run['seed'] in scores:
      raise ValueError(f'{run["cell"]}: {run["model"]} has another run of seed {run["seed"]}')
    scores[run['seed']] = loss(run)
  return scores
