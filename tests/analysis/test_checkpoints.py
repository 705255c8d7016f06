"""Table of checkpoints."""

import shutil

import pytest

from ngrammer_jax import analyze
from ngrammer_jax import config as experiment
from ngrammer_jax.analysis import checkpoints
from ngrammer_jax.checkpoints import manifest
from ngrammer_jax.checkpoints import reader as training_checkpoints
from tests.checks import bad_input


@pytest.fixture
def workdir(tmp_path, monkeypatch):
  """A run directory with the manifests of three checkpoints; the arrays of step 8 are corrupt."""
  experiment.save(experiment.Config(), tmp_path / 'config.json')
  for step, loss in ((4, 2.25), (8, 2.5), (12, None)):
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


def test_every_checkpoint_is_verified(workdir, capsys):
  checksum = manifest.read(workdir / 'checkpoints' / '4').checksum
  analyze.main(['checkpoint', f'--workdir={workdir}'])
  _, first, second, third = capsys.readouterr().out.splitlines()
  assert first.split() == ['4', '1.5', '2026-01-04T10:00:00', '2.2500', checksum, 'good,', 'best']
  assert second.split(maxsplit=1) == ['8', 'damaged: array has 3 bytes, expected 1,500,000']
  assert third.split()[:3] == ['12', '1.5', '2026-01-12T10:00:00'] and third.endswith('good')
  shutil.rmtree(workdir / 'checkpoints')
  with bad_input(f'--workdir={workdir} has no checkpoint'):
    checkpoints.format_table(workdir)


def test_arrays_of_a_checkpoint(workdir, capsys):
  suffix = '  params/embedding float32[257, 16]'
  for step, name in ((8, 8), (12, 'newest'), (4, 'best')):
    analyze.main(['checkpoint', f'--workdir={workdir}', f'--step={name}', '--arrays=params/emb'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[-1] == f'{step:016}{suffix}'
  with bad_input('--arrays=parms: no array begins so; parts: params/embedding'):
    checkpoints.format_table(workdir, 4, 'parms')
  with bad_input(f'--workdir={workdir} has no checkpoint of --step=7'):
    checkpoints.format_table(workdir, 7)
  (workdir / 'checkpoints' / '4' / manifest.FILE_NAME).write_text('{}')
  with bad_input('--step=4: checkpoint 4: manifest.json cannot be read'):
    checkpoints.format_table(workdir, 4)


def test_parts_of_a_checkpoint_fit_on_a_screen(workdir):
  """A row for all blocks together, whose checksum shows a change in any of their arrays."""
  folder = workdir / 'checkpoints' / '4'

  def rows(changed='b'):
    leaves = {'step': ('int32', [], 'a' * 16), 'params/norm/bias': ('float32', [8], 'b' * 16)}
    for layer in range(48):
      digest = (changed if layer == 7 else 'b') * 16
      leaves[f'params/layer_{layer}/attention/kernel'] = ('bfloat16', [1000, 50], digest)
      leaves[f'params/layer_{layer}/norm'] = ('float32', [50], 'b' * 16)
    manifest.write(folder, manifest.Manifest(4, '2026-01-04T10:00:00+00:00', None, {}, leaves))
    return [line.split() for line in checkpoints.format_table(workdir, 4).splitlines()[5:]]

  first, norm, layers, _ = rows()
  assert first == ['a' * 16, '1', '1', '0.0', 'step']
  assert norm == ['b' * 16, '1', '8', '0.0', 'params/norm']
  assert layers[1:] == ['96', '2,402,400', '4.8', 'params/layer_*']
  assert rows()[2] == layers
  assert rows('c')[2][0] != layers[0] and rows('c')[:2] == [first, norm]
