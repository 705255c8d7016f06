"""The benchmark of accelerators, in small sizes on a CPU."""

import json
import sys

import pytest

from benchmarks import accelerator


@pytest.mark.slow
def test_a_case_is_measured():
  case = 'n-grammer'
  result = accelerator.measure(case, steps=2, warmup=1, is_tiny=True)
  assert result['tokens'] == 2 * 32 * int(result['device'].split()[0])
  assert len(result['all_seconds']) >= 3 and result['seconds'] > 0 and result['peak_bytes'] > 2**20
  predicted = {case: {'train': {'bound': 0.2396, 'cycles': 0.3347}}}
  results = {'transformer': result | {'seconds': 2 * result['seconds']}, case: result}
  line = accelerator.format_line(result, results, predicted)
  assert '0.500 of transformer' in line and 'predicted 239.6 ms, cycles 334.7 ms' in line


def test_a_case_that_fails_is_named_and_the_others_are_written(tmp_path, monkeypatch, capsys):
  result = dict(case='llama', seconds=0.5, floor=0.25, tokens=10, peak_bytes=2**30, kernels={})
  children = {
    'engram': (1, '', 'out of memory'),
    'llama': (0, f'a line of the compiler\n{json.dumps(result)}\n', ''),
  }

  def run(command, **_):
    status, stdout, stderr = children[command[command.index('--cases') + 1]]
    return accelerator.subprocess.CompletedProcess(command, status, stdout, stderr)

  monkeypatch.setattr(accelerator.subprocess, 'run', run)
  path = tmp_path / 'results.json'
  flags = ['--cases', 'engram', 'llama', f'--json={path}']
  monkeypatch.setattr(sys, 'argv', ['accelerator', *flags])
  assert accelerator.main() == 1
  printed = capsys.readouterr().out
  assert 'engram: failed\nout of memory' in printed and 'MFU  50.0%' in printed
  assert json.loads(path.read_text()) == [result]
