"""Trains the missing runs of the studies: python -m studies.run --data=/path/to/corpora

Two runs at a time, each on one core, at low priority; on a GPU, several share it. A finished run
becomes a line of results.jsonl. After Ctrl-C, SIGTERM or --minutes, with the exit statuses 130, 143
and 124, the same command resumes every run from its last checkpoint.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import json
import logging
import os
import pathlib
import platform
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple, Protocol

import jax

from ngrammer_jax import runs, sharding
from ngrammer_jax.models import model_variables
from ngrammer_jax.training import programs
from ngrammer_jax.training.records import goodput
from studies import cells, results

PRIORITY = 10  # nice value
TIME_IS_OVER = 124  # exit status, as of the command `timeout`
BAD_INPUT = 2  # exit status of a training that diverged, too
DIVERGED = 'training diverged at step'  # in the log of such a training
LOG_END = 4096  # bytes of a log that are searched for it


class Cell(Protocol):
  """One run: its name, and the commands that train and evaluate it."""

  name: str

  def commands(self, data: pathlib.Path, workdir: pathlib.Path) -> Iterator[list[str]]:
    """Yields modules with their arguments."""


class PlannedCell(Protocol):
  """One run, whose learning rates may have to be selected before."""

  name: str
  cost: float  # tokens of the training, and a third of the tokens that are scored


class Study(NamedTuple):
  """Runs that become lines of one file.

  Attributes:
    path: the file.
    missing_cells: returns the cells without a line that can be trained now, the first ones first.
    describe: returns the line of a cell and its workdir.
    planned_cells: returns all cells without a line, for forecasts and --list; None: no forecasts.
    describe_diverged: returns the line of a cell whose loss was not finite; None: such a run ends
      the study.
  """

  path: pathlib.Path
  missing_cells: Callable[[list[results.Result]], Iterable[Cell]]
  describe: Callable[[Any, pathlib.Path], dict]
  planned_cells: Callable[[list[results.Result]], Iterable[PlannedCell]] | None = None
  describe_diverged: Callable[[Any], dict] | None = None


class Runner:
  """Trains and evaluates the cells of a study, each in processes of its own.

  Args:
    study: the study.
    data: folder of the corpora.
    folder: folder of the workdirs.
    cores: cores of each run that is trained at the same time.
    keep: keep the workdir of a finished run.
    deadline: when all runs will be stopped, on the clock `time.monotonic`; None: never.
  """

  def __init__(
    self,
    study: Study,
    data: pathlib.Path,
    folder: pathlib.Path,
    cores: Iterable[Sequence[int]],
    keep: bool = True,
    deadline: float | None = None,
  ):
    self._study = study
    self._data = data
    self._folder = folder
    self._keep = keep
    self._deadline = deadline
    self._has_forecast = False
    self._cores: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    self._num_jobs = 0
    for own in cores:
      self._cores.put(own)
      self._num_jobs += 1
    self._processes: set[subprocess.Popen] = set()
    self._lock = threading.Lock()
    self.status: int | None = None  # exit status, once the processes have been stopped

  def stop(self, status: int) -> None:
    """Stops all processes: they save and end."""
    self.status = status if self.status is None else self.status
    for process in list(self._processes):
      process.send_signal(signal.SIGTERM)

  def run(self, cell: Cell) -> None:
    """Trains and evaluates a cell, and writes its result.

    Raises:
      CalledProcessError: a command failed, and not because of a loss that was not finite.
    """
    cores = self._cores.get()
    start = time.monotonic()
    workdir = self._folder / cell.name
    commit = _commit()
    has_diverged = False
    try:
      for command in cell.commands(self._data, workdir):
        self._call(cores, cell, command)
    except subprocess.CalledProcessError as error:
      has_diverged = self._has_diverged(cell, error.returncode)
      if not has_diverged:
        raise
    finally:
      self._cores.put(cores)
    with self._lock:
      if has_diverged:
        line = self._study.describe_diverged(cell)
      else:
        line = self._study.describe(cell, workdir)
      line |= {'hardware': hardware(len(cores))}
      results.append(self._study.path, line | {'jax': jax.__version__, 'commit': commit})
    if not self._keep:
      shutil.rmtree(workdir)
    if has_diverged:
      logging.warning('%s diverged, see its log', cell.name)
      return
    logging.info('finished %s', cell.name)
    # A resumed run took longer than this process knows.
    seconds = max(time.monotonic() - start, line.get('training_seconds', 0))
    self._forecast(cell, seconds)

  def run_missing(self, jobs: int) -> int:
    """Trains the missing cells, the first ones first. Returns the exit status."""
    running: dict[concurrent.futures.Future, str] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
      while True:
        if self.status is None:  # a result may make further cells ready
          for cell in self._study.missing_cells(results.read(self._study.path)):
            if len(running) < jobs and cell.name not in running.values():
              running[pool.submit(self.run, cell)] = cell.name
        if not running:
          return self.status or 0
        done, _ = concurrent.futures.wait(running, return_when='FIRST_COMPLETED')
        for future in done:
          name = running.pop(future)
          if future.exception() is not None and self.status is None:
            logging.error('%s failed, see its log: %s', name, future.exception())
            self.stop(1)

  def _forecast(self, cell: PlannedCell, seconds: float) -> None:
    """Logs, after the first run, which of the other ones the time is enough for."""
    with self._lock:
      if self._has_forecast or self._study.planned_cells is None:
        return
      self._has_forecast = True
    planned = list(self._study.planned_cells(results.read(self._study.path)))
    seconds_per_token = seconds / cell.cost / self._num_jobs
    seconds_left = None
    if self._deadline is not None:
      seconds_left = self._deadline - time.monotonic()
    logging.info('%.0f seconds for %s', seconds, cell.name)
    logging.info('%s', format_forecast(planned, seconds_per_token, seconds_left))

  def _has_diverged(self, cell: Cell, status: int) -> bool:
    """Returns whether a command ended because of a loss that was not finite."""
    if status != BAD_INPUT or self._study.describe_diverged is None:
      return False
    log = (self._folder / f'{cell.name}.log').read_bytes()
    return DIVERGED.encode() in log[-LOG_END:]

  def _call(self, cores: Sequence[int], cell: Cell, arguments: list[str]) -> None:
    command = [sys.executable, '-m', *arguments]
    with (self._folder / f'{cell.name}.log').open('a') as log:
      process = subprocess.Popen(command, stdout=log, stderr=log)
      os.sched_setaffinity(process.pid, cores)  # before it starts any thread
      os.setpriority(os.PRIO_PROCESS, process.pid, PRIORITY)
      self._processes.add(process)
      if self.status is not None:
        process.send_signal(signal.SIGTERM)
      status = process.wait()
      self._processes.discard(process)
    if status:
      raise subprocess.CalledProcessError(status, command)


def format_forecast(
  planned: Sequence[PlannedCell], seconds_per_token: float, seconds_left: float | None
) -> str:
  """Formats how many runs can be trained in a time, and the last one of them.

  Args:
    planned: the runs, the first ones first.
    seconds_per_token: seconds a token of all runs at the same time together.
    seconds_left: the time; None: any time.
  """
  hours = sum(cell.cost for cell in planned) * seconds_per_token / 3600
  text = f'the {len(planned)} planned runs need about {hours:.1f} hours'
  if seconds_left is None:
    return text
  seconds = 0.0
  fitting = []
  for cell in planned:
    seconds += cell.cost * seconds_per_token
    if seconds > seconds_left:
      break
    fitting.append(cell.name)
  text += f'; {len(fitting)} fit in the {seconds_left / 60:.0f} minutes that are left'
  if fitting:
    text += f', up to {fitting[-1]}'
  return text


def describe(cell: cells.Cell, workdir: pathlib.Path) -> dict:
  """Returns the line of results.jsonl of a finished run."""
  scores = {}
  for name, flags in cell.evaluations.items():
    scores[name] = read_evaluation(cells.evaluation_folder(workdir, name), flags)
  return {
    'cell': cell.name,
    'table': cell.table,
    'model': cell.model,
    'seed': cell.seed,
    'learning_rate': cell.rates.dense,
    'table_learning_rate': cell.rates.tables,
    'command': f'python -m ngrammer_jax.train {" ".join(cell.flags)}',
    **describe_model(workdir),
    **scores,
  }


def describe_model(workdir: pathlib.Path) -> dict[str, int]:
  """Returns the sizes of a trained model, and what its training took."""
  trained = runs.load_run(workdir)
  run = programs.Programs(trained.config, trained.vocabulary.size, sharding.make_mesh())
  leaves = jax.tree_util.tree_leaves_with_path(run.abstract.params)
  tables = [leaf for path, leaf in leaves if jax.tree_util.keystr(path[-1:]) == "['table']"]
  t = trained.config.training
  return {
    'steps': t.steps,
    'tokens': t.steps * t.tokens_per_step,
    'parameters': model_variables.count_elements(run.abstract.params),
    'table_bytes': sum(leaf.size * leaf.dtype.itemsize for leaf in tables),
    'flops_per_token': round(run.flops.forward()),
    'training_seconds': round(goodput.training_seconds(workdir)),
  }


def read_evaluation(folder: pathlib.Path, flags: Sequence[str]) -> dict[str, float]:
  """Returns the scores in a folder, of the split in the flags of an evaluation."""
  (split,) = (flag.removeprefix('--split=') for flag in flags if flag.startswith('--split='))
  result = json.loads((folder / f'{split}.json').read_text(encoding='utf-8'))
  names = 'bits_per_byte', 'bits_per_character', 'perplexity', 'nll_nats_per_token', 'tokens'
  return {name: result[name] for name in names if result.get(name) is not None}


def hardware(cores: int) -> str:
  """Returns the name of the processor or of the accelerator."""
  device = jax.devices()[0]
  if device.platform != 'cpu':
    return device.device_kind
  return f'{cores} core{"s" * (cores > 1)} of {_processor()}'


def _processor() -> str:
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    return next(line.partition(': ')[2] for line in lines if line.startswith('model name'))
  except (OSError, StopIteration):
    return platform.processor() or platform.machine()


def _commit() -> str:
  """Returns the commit of this checkout, with the suffix -dirty if its code has changed since."""
  git = ['git', '-C', str(pathlib.Path(__file__).parent)]
  command = [*git, 'rev-parse', '--short', 'HEAD']
  commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
  is_clean = subprocess.run([*git, 'diff', '--quiet', 'HEAD', '--', ':/*.py']).returncode == 0
  return commit if is_clean else f'{commit}-dirty'


STUDY = Study(results.RUNS, cells.missing_cells, describe)


def main(study: Study, doc: str) -> None:
  """Trains a study with the flags of the command line; see `train`.

  Args:
    study: the study.
    doc: help text of the command.
  """
  train(study, make_parser(doc).parse_args())


def make_parser(doc: str) -> argparse.ArgumentParser:
  """Returns the parser of the flags of all studies. `doc` is the help text of the command."""
  parser = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', type=pathlib.Path, required=True, help='folder of the corpora')
  parser.add_argument('--folder', type=pathlib.Path, default='runs/studies', help='workdirs')
  parser.add_argument('--jobs', type=int, default=2, help='runs at a time')
  parser.add_argument('--cores', type=int, default=1, help='cores of a run')
  parser.add_argument('--minutes', type=float, help='time after which all runs are stopped')
  parser.add_argument('--delete', action='store_true', help='delete the workdirs of finished runs')
  parser.add_argument('--list', action='store_true', help='print the missing runs, and exit')
  return parser


def train(study: Study, options: argparse.Namespace) -> None:
  """Trains until no run is missing, one fails, or the time is over.

  Args:
    study: the study.
    options: values of the flags of `make_parser`.
  """
  logging.basicConfig(level=logging.INFO, format='%(asctime)s %(message)s', datefmt='%H:%M')
  logging.getLogger('jax').setLevel(logging.WARNING)
  if options.list:
    list_cells = study.planned_cells or study.missing_cells
    for cell in list_cells(results.read(study.path)):
      print(cell.name)
    return
  # Runs that share a GPU: none may take most of its memory at its start.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  options.folder.mkdir(parents=True, exist_ok=True)
  cores = sorted(os.sched_getaffinity(0))
  starts = range(0, len(cores), options.cores)[: options.jobs]
  jobs = [cores[start : start + options.cores] for start in starts]
  deadline = None
  if options.minutes is not None:
    deadline = time.monotonic() + 60 * options.minutes
  keep = not options.delete
  runner = Runner(study, options.data, options.folder, jobs, keep, deadline)
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda received, _: runner.stop(128 + received))
  if options.minutes is not None:
    timer = threading.Timer(60 * options.minutes, runner.stop, [TIME_IS_OVER])
    timer.daemon = True
    timer.start()
  sys.exit(runner.run_missing(len(jobs)))


if __name__ == '__main__':
  main(STUDY, __doc__)
