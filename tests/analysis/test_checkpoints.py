"""Table of checkpoints."""

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax.analysis import checkpoints
from ngrammer_jax.training import checkpoints as training_checkpoints
from ngrammer_jax.training import manifest
from tests.checks import bad_input


@pytest.fixture
def workdir(tmp_path, monkeypatch):
  """A run directory with the manifests of three checkpoints; the arrays of step 8 are corrupt."""
  experiment.save(experiment.Config(), tmp_path / 'config.json')
  for step, loss in ((4, 2.5), (8, 2.25), (12, None)):
    folder = tmp_path / 'checkpoints' / str(step)
    folder.mkdir(parents=True)
    leaves = {'params/embedding': ('float32', [257, 16], f'{step:016}')}
    saved_at = f'2026-01-{step:02}T10:00:00+00:00'
    files = {'array': (1_500_000, '')}
    manifest.write(folder, manifest.Manifest(step, saved_at, loss, files, leaves))

  def verify(workdir, step):
    if step == 8:
      raise manifest.CorruptError('array has 3 bytes, expected 1,500,000')
    return manifest.read(workdir / 'checkpoints' / str(step))

  monkeypatch.setattr(training_checkpoints, 'verify', verify)
  return tmp_path


def test_every_checkpoint_is_verified(workdir):
  checksum = manifest.read(workdir / 'checkpoints' / '4').checksum
  _, first, second, third = checkpoints.format_table(workdir).splitlines()
  assert first.split() == ['4', '1.5', '2026-01-04T10:00:00', '2.5000', checksum, 'good']
  assert second.split(maxsplit=1) == ['8', 'damaged: array has 3 bytes, expected 1,500,000']
  assert third.split()[:3] == ['12', '1.5', '2026-01-12T10:00:00'] and third.endswith('good')


def test_arrays_of_a_checkpoint(workdir):
  suffix = '  params/embedding float32[257, 16]'
  for step, name in ((4, 4), (12, 'newest'), (8, 'best')):
    lines = checkpoints.format_table(workdir, name).splitlines()
    assert len(lines) == 5 and lines[-1] == f'{step:016}{suffix}'
  with bad_input(f'--workdir={workdir} has no checkpoint of --step=7'):
    checkpoints.format_table(workdir, 7)
  (workdir / 'checkpoints' / '4' / manifest.FILE_NAME).write_text('{}')
  with bad_input('--step=4: checkpoint 4: manifest.json cannot be read'):
    checkpoints.format_table(workdir, 4)
