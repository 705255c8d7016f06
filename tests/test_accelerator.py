"""The benchmark of accelerators, in small sizes on a CPU."""

import argparse
import json
import sys

import pytest

from benchmarks import accelerator, accelerator_cases, accelerator_measures
from ngrammer_jax import command_line

OPTIONS = argparse.Namespace(steps=2, warmup=1, tiny=True, trace=True)


@pytest.mark.slow
def test_a_step_is_measured():
  case = 'n-grammer'
  result = accelerator_measures.measure_step(case, OPTIONS)
  assert result['tokens'] == 2 * 32 * int(result['device'].split()[0])
  assert len(result['all_seconds']) >= 3 and result['seconds'] > 0 and result['peak_bytes'] > 2**20
  parts = {'feed-forward', 'other attention', 'cross-entropy', 'optimizer', 'table'}
  assert parts <= set(result['parts'])
  predicted = {case: {'train': {'bound': 0.2396, 'cycles': 0.3347}}}
  result['case'] = case
  results = {'transformer': result | {'seconds': 2 * result['seconds']}, case: result}
  line = accelerator.format_line(result, results, predicted)
  assert '0.500 of transformer' in line and 'predicted 239.6 ms, cycles 334.7 ms' in line


@pytest.mark.slow
def test_a_training_is_measured(monkeypatch):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '2')  # of the two rows
  result = accelerator_measures.measure_run('tables', OPTIONS)
  assert result['seconds'] > 0 and result['tokens'] == 64


def test_a_random_text_has_as_many_different_pairs_as_a_text():
  words = accelerator_measures.random_text(2**14).split()
  pairs = {*zip(words, words[1:], strict=False)}
  assert 0.6 < len(pairs) / len(words) < 0.7


def test_every_case_has_a_config():
  for case in accelerator_cases.CASES.values():
    for is_tiny in (False, True):
      changes, rows = accelerator_cases.changes_of(case, is_tiny)
      changes = [(key, str(value)) for key, value in changes.items()]
      assert rows > 1 and command_line.resolve(case.config, changes).model.layers > 1


@pytest.fixture
def queue(tmp_path, monkeypatch, capsys):
  """Runs the queue with children that only say how long they take, by a clock of our own."""
  clock = {'now': 0.0}
  monkeypatch.setattr(accelerator.time, 'monotonic', lambda: clock['now'])
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  path = tmp_path / 'results.jsonl'
  ran = []

  def run(cases, minutes=None, failing=()):
    def child(command, timeout, env, **_):
      case = command[command.index('--cases') + 1]
      seconds = 60 * cases[case]
      assert ('=False ' in env['XLA_FLAGS']) == ('not deterministic' in case)
      assert (env.get('JAX_PLATFORMS') == 'cpu') == ('torch' in case)
      if timeout and seconds > timeout:
        clock['now'] += timeout
        raise accelerator.subprocess.TimeoutExpired(command, timeout)
      clock['now'] += seconds
      ran.append(case)
      result = {'seconds': 0.5, 'floor': 0.25, 'tokens': 10, 'peak_bytes': 2**30, 'kernels': {}}
      output = f'a line of the compiler\n{json.dumps(result)}\n'
      failed = case in failing
      return accelerator.subprocess.CompletedProcess(
        command, int(failed), '' if failed else output, 'out of memory' if failed else ''
      )

    ran.clear()
    monkeypatch.setattr(accelerator.subprocess, 'run', child)
    flags = ['--cases', *cases, f'--json={path}', *([f'--minutes={minutes}'] if minutes else [])]
    monkeypatch.setattr(sys, 'argv', ['accelerator', *flags])
    before = clock['now']
    status = accelerator.main()
    return status, list(ran), (clock['now'] - before) / 60, capsys.readouterr().out

  run.path = path
  return run


def test_a_case_that_fails_is_named_and_the_others_are_written(queue):
  status, ran, _, printed = queue({'engram': 1, 'llama': 1}, failing=['engram'])
  assert status == 1 and ran == ['engram', 'llama']
  assert 'engram: failed\nout of memory' in printed and 'MFU  50.0%' in printed
  lines = [json.loads(line) for line in queue.path.read_text().splitlines()]
  assert [line['case'] for line in lines] == ran and 'failed' in lines[0]
  assert queue({'engram': 1, 'llama': 1})[1] == []  # it is not tried again


def test_the_queue_stops_before_the_limit_and_goes_on(queue):
  cases = {'transformer': 3, 'llama': 3, 'engram': 3, 'torch, not deterministic': 2}
  status, ran, minutes, printed = queue(cases, minutes=7)
  assert (status, ran, minutes) == (1, ['transformer', 'llama'], 6)
  assert "2 cases are left, from 'engram' on" in printed
  with queue.path.open('a') as file:
    file.write('{"case": "engram", "min')  # a process that ended while it wrote
  status, ran, minutes, _ = queue(cases, minutes=7)
  assert (status, ran, minutes) == (0, ['engram', 'torch, not deterministic'], 5)
  assert queue(cases, minutes=7)[:2] == (0, [])


def test_a_case_that_never_fits_does_not_stop_the_others(queue):
  cases = {'transformer': 1, 'llama': 30, 'engram': 1}
  status, ran, minutes, _ = queue(cases, minutes=9)
  assert (status, ran, minutes) == (1, ['transformer'], 9)  # the limit of the call
  status, ran, minutes, printed = queue(cases, minutes=9)
  assert (status, ran, minutes) == (1, [], 9) and 'llama: failed\ntakes longer' in printed
  assert queue(cases, minutes=9)[:2] == (1, ['engram'])
