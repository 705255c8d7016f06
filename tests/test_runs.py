"""The verbs that look at a run."""

import json
import os
import subprocess
import sys

import pytest

from ngrammer_jax import analyze, evaluate, runs
from ngrammer_jax.training import loop
from tests.checks import bad_input


@pytest.fixture
def run(tiny, tmp_path):
  loop.train(tiny(training={'steps': 4, 'evaluate_every': 2}), tmp_path / 'run')
  return tmp_path / 'run'


def test_evaluate_writes_json_and_a_table_and_curve_a_figure(run, capsys):
  evaluate.main([f'--workdir={run}', '--split=test'])
  kept = json.loads((run / 'evaluation' / 'test.json').read_text())
  tokens = runs.token_cache.prepare(runs.load_run(run).config.data).splits['test'].tokens
  assert kept['tokens'] == len(tokens)
  assert kept['step'] == 4
  assert {'nll_nats_per_token', 'perplexity', 'bits_per_byte', 'top1_accuracy', 'protocol'} < set(
    kept
  )
  out = capsys.readouterr().out
  assert f'{kept["bits_per_byte"]:.4f}' in out
  analyze.main(['curve', f'--workdir={run}'])
  assert (run / 'curve.png').read_bytes().startswith(b'\x89PNG')
  evaluate.main([f'--workdir={run}', '--config.evaluation.max_tokens=40'])
  assert json.loads((run / 'evaluation' / 'test.json').read_text())['tokens'] == 40
  evaluate.main([f'--workdir={run}', '--config.evaluation.protocol=transformer_xl'])
  read = json.loads((run / 'evaluation' / 'test.json').read_text())
  assert read['protocol']['name'] == 'transformer_xl' and read['tokens'] < len(tokens)
  with bad_input('--config.model.width: of a trained run only evaluation.* can be changed here'):
    evaluate.main([f'--workdir={run}', '--config.model.width=8'])
  with bad_input('--split=tset is not one of: train, validation, test'):
    evaluate.main([f'--workdir={run}', '--split=tset'])


def test_a_folder_that_is_no_run(tmp_path):
  with bad_input(
    f'--workdir={tmp_path} holds no config.json: not a run of ngrammer_jax.train, or none yet'
  ):
    runs.load_run(tmp_path)
  with bad_input(f'--workdir={tmp_path} holds no metrics.jsonl: not a run, or not begun'):
    analyze.main(['curve', f'--workdir={tmp_path}'])


def test_a_run_without_a_checkpoint(run):
  for path in (run / 'checkpoints').iterdir():
    path.rename(run / path.name)
  with bad_input(f'--workdir={run} has no checkpoint yet'):
    runs.load_run(run).evaluate('test')


def test_a_checkpoint_of_another_model(run, tiny):
  other = tiny(model={'width': 32})
  with bad_input(
    f'{run}/checkpoints/4 is of another model: codebook/ngrammer/quantizer/centroids is '
    'float32[2, 8, 8], expected float32[2, 8, 16]'
  ):
    runs.Run(run, other).evaluate('test')


def test_another_text_is_not_evaluated(run, tmp_path):
  (tmp_path / 'text.txt').write_text('something else entirely. ' * 1000)
  with pytest.raises(runs.errors.BadInput, match='was started on another text'):
    runs.load_run(run).evaluate('test')


def test_any_number_of_devices_evaluates(tiny, tmp_path):
  """Trained on 8 devices; the mesh of the config does not fit 3, nor does the batch."""
  loop.train(tiny(training={'steps': 2, 'evaluate_every': 0}), tmp_path / 'run')
  expected = runs.load_run(tmp_path / 'run').evaluate('test')
  flags = '--xla_force_host_platform_device_count=3'
  subprocess.run(
    [sys.executable, '-m', 'ngrammer_jax.evaluate', f'--workdir={tmp_path}/run'],
    env=os.environ | {'XLA_FLAGS': flags},
    check=True,
    capture_output=True,
  )
  result = json.loads((tmp_path / 'run' / 'evaluation' / 'test.json').read_text())
  assert result['nll_nats_per_token'] == pytest.approx(expected['nll_nats_per_token'], rel=1e-6)
