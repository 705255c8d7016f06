"""Results of the runs: JSON lines, their learning rates and losses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

from ngrammer_jax.system import json_files

RUNS = pathlib.Path(__file__).with_name('results.jsonl')
FREQUENCY = pathlib.Path(__file__).with_name('frequency.jsonl')
ZERO_SHOT = pathlib.Path(__file__).with_name('zero_shot.jsonl')
LONGER = pathlib.Path(__file__).with_name('longer.jsonl')
PROGRAM = pathlib.Path(__file__).with_name('program.jsonl')
LONG_DOCUMENTS = pathlib.Path(__file__).with_name('long_documents.jsonl')
PRETRAINED = pathlib.Path(__file__).with_name('pretrained.jsonl')
DOMAIN = pathlib.Path(__file__).with_name('domain.jsonl')

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


class Lines(NamedTuple):
  """The lines of all files."""

  runs: Sequence[Result] = ()
  frequency: Sequence[Result] = ()
  zero_shot: Sequence[Result] = ()
  longer: Sequence[Result] = ()
  program: Sequence[Result] = ()
  long_documents: Sequence[Result] = ()
  pretrained: Sequence[Result] = ()
  domain: Sequence[Result] = ()


def read_all() -> Lines:
  """Returns the lines of all files."""
  return Lines(
    runs=read(RUNS),
    frequency=read(FREQUENCY),
    zero_shot=read(ZERO_SHOT),
    longer=read(LONGER),
    program=read(PROGRAM),
    long_documents=read(LONG_DOCUMENTS),
    pretrained=read(PRETRAINED),
    domain=read(DOMAIN),
  )


def append(path: pathlib.Path, result: Result) -> None:
  """Appends a line to a file."""
  json_files.append_line(path, dict(result))


def without_line(cells: Iterable[Any], lines: Iterable[Result]) -> Iterator[Any]:
  """Yields the cells of a study whose name is in no line."""
  finished = {line['cell'] for line in lines}
  for cell in cells:
    if cell.name not in finished:
      yield cell


def bits_per_byte(run: Result, split: str = 'test') -> float:
  """Returns the bits per byte of a whole split."""
  return run[split]['bits_per_byte']


def validation_nats(run: Result) -> float:
  """Returns the nats per token of the tokens of the validation split that were scored."""
  return run['validation']['nll_nats_per_token']
