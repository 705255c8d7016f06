"""Checkpoints of today's format restore, and the losses that follow are those of then."""

import json
import pathlib
import shutil

import pytest

from tests.goldens import runs

FOLDER = pathlib.Path(__file__).parent / 'checkpoints'


@pytest.mark.parametrize('row', runs.ROWS)
def test_a_checkpoint_resumes_with_the_losses_of_then(
  row, one_device, cache, tmp_path, monkeypatch
):
  from ngrammer_jax import train

  monkeypatch.chdir(tmp_path)
  runs.write_text(tmp_path / 'text.txt')
  shutil.copytree(FOLDER / row / 'run', tmp_path / 'run')
  train.main([f'--config={FOLDER.parent}/runs.py:{row}', '--workdir=run'])
  expected = json.loads((FOLDER / row / 'losses.json').read_text())
  assert list(expected['loss']) == [str(step) for step in range(runs.RESTORED + 1, runs.STEPS + 1)]
  found = runs.losses(tmp_path / 'run')
  assert found['loss'] == pytest.approx(expected['loss'], rel=1e-6)
  assert found['validation'] == pytest.approx(expected['validation'], rel=1e-6)
