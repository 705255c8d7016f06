"""A run goes on from whatever a crash, a bad disk or another machine left of it."""

import errno
import json
import os
import shutil
import signal
import types

import jax
import numpy as np
import pytest

from ngrammer_jax import errors, mesh_config, runs
from ngrammer_jax.training import checkpoints, loop, manifest, record
from tests.checks import bad_input

TRAINED = []


def undisturbed(tiny, tmp_path_factory):
  """A finished run of 12 steps with checkpoints of 4, 8 and 12, trained once for all tests."""
  if not TRAINED:
    workdir = tmp_path_factory.mktemp('trained') / 'run'
    loop.train(tiny(), workdir)
    TRAINED.append(workdir)
  return TRAINED[0]


@pytest.fixture
def whole(tiny, tmp_path_factory):
  return undisturbed(tiny, tmp_path_factory)


@pytest.fixture
def run(whole, tmp_path):
  """A copy of the finished run."""
  return shutil.copytree(whole, tmp_path / 'run')


def arrays(workdir, step=None):
  """Dtype, shape and checksum of every array of a checkpoint, of the last one if none is named."""
  step = checkpoints.steps(workdir)[-1] if step is None else step
  return manifest.verify(workdir / 'checkpoints' / str(step)).leaves


def records(workdir):
  lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  return [
    {k: v for k, v in line.items() if k not in ('tokens_per_second', 'goodput')} for line in lines
  ]


def assert_close(run, whole):
  """Within rounding, and not without any."""
  states = [jax.device_get(runs.load_run(workdir).state) for workdir in (run, whole)]
  assert states[0].step == states[1].step == 12
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *states)
  assert arrays(run) != arrays(whole)


def damage(checkpoint):
  """Flips a bit of the largest file; returns its name and what it holds then."""
  path = max(checkpoint.rglob('d/*'), key=lambda path: path.stat().st_size)
  content = bytearray(path.read_bytes())
  content[len(content) // 3] ^= 16
  path.write_bytes(content)
  return path.relative_to(checkpoint), bytes(content)


def names(workdir):
  return sorted(path.name for path in (workdir / 'checkpoints').iterdir())


def test_a_damaged_checkpoint_costs_some_steps_and_no_bit(tiny, run, whole, caplog):
  for place in ('12.damaged', '12.damaged-2'):
    name, content = damage(run / 'checkpoints' / '12')
    assert loop.train(tiny(), run)
    assert arrays(run) == arrays(whole) and records(run) == records(whole)
    assert (run / 'checkpoints' / place / name).read_bytes() == content
    assert f'12 is damaged: {name} was changed: wrong checksum; trying' in caplog.text
  assert names(run) == ['12', '12.damaged', '12.damaged-2', '4', '8']


def test_two_damaged_checkpoints_cost_more_steps_and_no_bit(tiny, run, whole):
  for step in (8, 12):
    damage(run / 'checkpoints' / str(step))
  assert loop.train(tiny(), run)
  assert arrays(run) == arrays(whole) and records(run) == records(whole)
  assert arrays(run, 8) == arrays(whole, 8)
  assert names(run) == ['12', '12.damaged', '4', '8', '8.damaged']


def test_training_never_starts_again_from_scratch_by_itself(tiny, run):
  before = (run / 'metrics.jsonl').read_bytes()
  (run / 'checkpoints' / '12' / 'manifest.json').unlink()
  name, _ = damage(run / 'checkpoints' / '8')
  (run / 'checkpoints' / '4' / '_METADATA').write_bytes(b'')
  size = manifest.read(run / 'checkpoints' / '4').files['_METADATA'][0]
  for _ in range(2):
    with bad_input(
      f'--workdir={run} has no good checkpoint (step 12: manifest.json is missing; '
      f'step 8: {name} was changed: wrong checksum; '
      f'step 4: _METADATA has 0 bytes, expected {size:,}): '
      'bring back a copy of its checkpoints, or start again with another --workdir'
    ):
      loop.train(tiny(), run)
    assert names(run) == ['12', '4', '8']
    assert (run / 'metrics.jsonl').read_bytes() == before


def stop_after(monkeypatch, step):
  """A signal in the call that ends with a step."""
  add = record.Record.add

  def signalled(self, done, metrics):
    add(self, done, metrics)
    if done == step:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(record.Record, 'add', signalled)


def train_in_turn(monkeypatch, workdir, first, second):
  """Two steps with a config, four with another, the rest with the first again."""
  for config, stop in (first, 2), (second, 6):
    with monkeypatch.context() as patch, pytest.raises(errors.Interrupted):
      stop_after(patch, stop)
      loop.train(config, workdir)
  assert checkpoints.steps(workdir) == [2, 4, 6]
  assert loop.train(first, workdir)


def test_scanned_and_unrolled_runs_share_checkpoints(tiny, tmp_path, whole, monkeypatch):
  assert tiny().model.scan_layers
  train_in_turn(monkeypatch, tmp_path / 'both', tiny(), tiny(model={'scan_layers': False}))
  assert_close(tmp_path / 'both', whole)


def test_another_mesh_goes_on_within_rounding(tiny, tmp_path, whole, monkeypatch):
  mesh = mesh_config.MeshConfig(data=2, fsdp=2, model=2)
  train_in_turn(monkeypatch, tmp_path / 'both', tiny(), tiny(mesh=mesh))
  assert_close(tmp_path / 'both', whole)


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(tiny, tmp_path, whole, monkeypatch):
  write = manifest.write

  def fails(folder, content):
    if content.step == 8:
      raise OSError(errno.ENOSPC, 'No space left on device')
    write(folder, content)

  with (
    bad_input(
      f'--workdir={tmp_path}/run: the disk is full: no room for step 8, 7.5 MB left. '
      'Last checkpoint: step 4. Free some space, then the same command goes on from there'
    ),
    monkeypatch.context() as patch,
  ):
    patch.setattr(manifest, 'write', fails)
    patch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=7.5e6))
    loop.train(tiny(), tmp_path / 'run')
  assert checkpoints.steps(tmp_path / 'run') == [4]
  assert arrays(tmp_path / 'run', 4) == arrays(whole, 4)
  assert loop.train(tiny(), tmp_path / 'run')
  assert arrays(tmp_path / 'run') == arrays(whole) and records(tmp_path / 'run') == records(whole)


def test_a_disk_without_room_is_refused_before_training(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=1e4))
  with pytest.raises(errors.BadInput, match=r'no room for a checkpoint of 1\.\d MB, 0\.0 MB left'):
    loop.train(tiny(), tmp_path / 'run')
