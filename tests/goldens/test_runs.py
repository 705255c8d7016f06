"""Checkpoints of this format restore, and the losses that follow are as recorded."""

import json
import pathlib
import shutil

import pytest

from tests.checks import rest_is_slow
from tests.goldens import runs

FOLDER = pathlib.Path(__file__).parent / 'checkpoints'
QUICK = ('ngrammer',)  # with a codebook


def forget_later_steps(path):
  """Drops the metrics after the restored step: they are what the test is about."""
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(line for line in lines if json.loads(line)['step'] <= runs.RESTORED))


@pytest.mark.full
@pytest.mark.parametrize('row', rest_is_slow(runs.ROWS, QUICK))
def test_a_checkpoint_resumes_with_the_recorded_losses(
  row, one_device, cache, tmp_path, monkeypatch
):
  from ngrammer_jax import train

  monkeypatch.chdir(tmp_path)
  runs.write_text(tmp_path / 'text.txt')
  shutil.copytree(FOLDER / row / 'run', tmp_path / 'run')
  forget_later_steps(tmp_path / 'run' / 'metrics.jsonl')
  assert not train.main([f'--config={FOLDER.parent}/runs.py:{row}', '--workdir=run'])
  assert (tmp_path / 'run' / 'checkpoints' / str(runs.STEPS)).is_dir()
  expected = json.loads((FOLDER / row / 'losses.json').read_text())
  assert list(expected['loss']) == [str(step) for step in range(runs.RESTORED + 1, runs.STEPS + 1)]
  found = runs.losses(tmp_path / 'run')
  assert found['loss'] == pytest.approx(expected['loss'], rel=1e-6)
  assert found['validation'] == pytest.approx(expected['validation'], rel=1e-6)
