"""The script that trains the studies: lines of finished runs, failures and signals."""

import dataclasses
import json
import pathlib
import queue
import subprocess
import threading
import types

import pytest

from ngrammer_jax import runs
from ngrammer_jax.training import recorder
from studies import cells, results, run

CELL = cells.Cell('main', 'engram', 0, results.Rates(0.008, 1.0))


def describe(cell, workdir):
  """Returns a line with the scores alone."""
  scores = {}
  for name, flags in cell.evaluations.items():
    scores[name] = run.read_evaluation(cells.evaluation_folder(workdir, name), flags)
  return {'cell': cell.name} | scores


@pytest.fixture
def runner(tmp_path, monkeypatch):
  """A runner on one core whose commands write evaluations, without any process."""
  monkeypatch.setattr(run, '_commit', lambda: 'abc')
  missing_cells = lambda lines: cells.missing_cells(lines)  # which tests replace
  study = run.Study(tmp_path / 'results.jsonl', missing_cells, describe)
  runner = run.Runner(study, tmp_path / 'data', tmp_path, [(0,)])

  def call(cores, cell, arguments):
    assert cores == (0,) and f'--workdir={tmp_path / cell.name}' in arguments
    runner.modules.append(arguments[0])
    if arguments[0] == 'ngrammer_jax.evaluate':
      (split,) = (a.removeprefix('--split=') for a in arguments if a.startswith('--split='))
      (output,) = (a.removeprefix('--output=') for a in arguments if a.startswith('--output='))
      folder = pathlib.Path(output)
      assert folder.parent == tmp_path / cell.name / 'evaluation'
      folder.mkdir(parents=True, exist_ok=True)
      result = {'bits_per_byte': len(split), 'tokens': len(runner.modules), 'step': 3}
      (folder / f'{split}.json').write_text(json.dumps(result))

  runner.modules = []
  monkeypatch.setattr(runner, '_call', call)
  return runner


def test_a_finished_run_becomes_a_line(runner):
  runner.run(CELL)
  scores = {
    'validation': {'bits_per_byte': 10, 'tokens': 2},
    'test': {'bits_per_byte': 4, 'tokens': 3},
  }
  (line,) = results.read(runner._study.path)
  assert line.pop('hardware').startswith('1 core of ') and line.pop('jax')
  assert line == {'cell': CELL.name, 'commit': 'abc'} | scores
  assert runner.modules == ['ngrammer_jax.train', *['ngrammer_jax.evaluate'] * 2]


def test_evaluations_of_one_split_do_not_overwrite_each_other(runner):
  evaluations = cells._memory_evaluations('memory')
  cell = dataclasses.replace(CELL, model='memory', config='context', evaluations=evaluations)
  runner.run(cell)
  (line,) = results.read(runner._study.path)
  assert [line[name]['tokens'] for name in evaluations] == [2, 3, 4, 5, 6, 7]


def test_a_failed_run_has_no_line_and_returns_its_core(runner, monkeypatch):
  def fail(*_):
    raise subprocess.CalledProcessError(2, ['train'])

  monkeypatch.setattr(runner, '_call', fail)
  monkeypatch.setattr(cells, 'missing_cells', lambda done: [CELL])
  assert runner.run_missing(1) == 1
  assert results.read(runner._study.path) == []
  with pytest.raises(queue.Empty):
    assert runner._cores.get_nowait() == (0,)
    runner._cores.get_nowait()


def test_a_loss_that_is_not_finite_is_a_result(runner, monkeypatch, tmp_path):
  log = tmp_path / f'{CELL.name}.log'
  status = run.BAD_INPUT

  def fail(*_):
    raise subprocess.CalledProcessError(status, ['train'])

  monkeypatch.setattr(runner, '_call', fail)
  study = runner._study._replace(describe_diverged=lambda cell: {'cell': cell.name, 'table': 'x'})
  monkeypatch.setattr(runner, '_study', study)
  log.write_text('error: training diverged at step 7' + 5000 * ' ' + 'error: no such file')
  with pytest.raises(subprocess.CalledProcessError):
    runner.run(CELL)  # the log is of an earlier start
  log.write_text('error: training diverged at step 7, between steps 0 and 10: loss is nan')
  status = 1
  with pytest.raises(subprocess.CalledProcessError):
    runner.run(CELL)
  assert results.read(study.path) == []
  status = run.BAD_INPUT
  runner.run(CELL)
  (line,) = results.read(study.path)
  assert line['cell'] == CELL.name and line['table'] == 'x' and line['commit'] == 'abc'


def test_the_error_of_a_training_that_diverged_has_the_words_of_the_study():
  source = pathlib.Path(recorder.__file__).read_text(encoding='utf-8')
  assert run.DIVERGED in source


def test_every_missing_run_is_trained_once(runner, monkeypatch):
  others = [cells.Cell('main', 'plain', seed, results.Rates(0.008)) for seed in range(3)]

  def missing_cells(lines):
    finished = {line['cell'] for line in lines}
    return [cell for cell in others if cell.name not in finished]

  monkeypatch.setattr(cells, 'missing_cells', missing_cells)
  assert runner.run_missing(1) == 0
  assert [line['cell'] for line in results.read(runner._study.path)] == [
    cell.name for cell in others
  ]


def test_the_status_says_why_the_runs_stopped(runner, monkeypatch):
  is_training, is_stopped = threading.Event(), threading.Event()

  def train(*_):
    is_training.set()
    assert is_stopped.wait(60)
    raise subprocess.CalledProcessError(143, ['train'])

  def stop():
    assert is_training.wait(60)
    runner.stop(143)
    runner.stop(124)  # later reasons do not count
    is_stopped.set()

  monkeypatch.setattr(runner, '_call', train)
  monkeypatch.setattr(cells, 'missing_cells', lambda done: [CELL])
  thread = threading.Thread(target=stop)
  thread.start()
  assert runner.run_missing(1) == 143
  thread.join()


def planned(*sizes):
  """Returns cells with costs."""
  return [types.SimpleNamespace(name=f'run{i}', cost=cost) for i, cost in enumerate(sizes)]


def test_a_forecast_says_which_runs_fit():
  cells_of_hours = planned(3600, 3600, 7200, 3600)
  text = run.format_forecast(cells_of_hours, 1.0, 2.5 * 3600)
  assert text == (
    'the 4 planned runs need about 5.0 hours; 2 fit in the 150 minutes that are left, up to run1'
  )
  assert run.format_forecast(cells_of_hours, 0.5, None).endswith('runs need about 2.5 hours')
  assert run.format_forecast(cells_of_hours, 1.0, 60).endswith(
    '; 0 fit in the 1 minutes that are left'
  )


def test_the_first_finished_run_of_a_process_gives_a_forecast(runner, monkeypatch, caplog):
  caplog.set_level('INFO')
  names = iter(['first', 'second'])
  times = iter([0.0, 100.0, 1000.0, 1005.0])  # starts and ends
  monkeypatch.setattr(run.time, 'monotonic', lambda: next(times))
  study = runner._study._replace(planned_cells=lambda lines: planned(1000, 2000))
  monkeypatch.setattr(runner, '_study', study)
  for name in names:
    cell = types.SimpleNamespace(
      name=name, cost=500, commands=lambda *_: [], evaluations={}, table='main'
    )
    runner.run(cell)
  messages = [record.message for record in caplog.records]
  assert messages == [
    'finished first',
    '100 seconds for first',
    'the 2 planned runs need about 0.2 hours',
    'finished second',
  ]


@pytest.mark.full
def test_the_line_of_a_run_has_its_sizes(trained):
  cell = dataclasses.replace(CELL, evaluations={})
  trained_run, line = runs.load_run(trained), run.describe(cell, trained)
  t, n = trained_run.config.training, trained_run.config.model.ngram
  assert line['cell'] == CELL.name and line['tokens'] == 12 * t.batch_size * t.segment_length
  assert line['table_bytes'] == 4 * trained_run.config.model.heads * n.vocabulary_size * n.dim
  assert line['command'].endswith('--config.optimizer.table.learning_rate=1.0')
  assert line['training_seconds'] >= 0 and line['flops_per_token'] > 0
