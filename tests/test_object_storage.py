"""A workdir in an object store is as good as one on a disk. The stores are emulators."""

import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from ngrammer_jax import analyze, evaluate, files, generate
from ngrammer_jax.training import checkpoints, loop, manifest, record, workdirs
from tests import fake_gcs
from tests.conftest import bad_input
from tests.training import test_checkpoints as small

STARTED = {}  # once for all tests: libraries remember where their store is


def free_port():
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    return found.getsockname()[1]


def start_gs():
  address = fake_gcs.start()
  return {
    'STORAGE_EMULATOR_HOST': address,  # for gcsfs
    'TENSORSTORE_GCS_HTTP_URL': address,
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # which asks another service first
  }


def start_s3():
  pytest.importorskip('s3fs')
  emulator = pytest.importorskip('moto.server')
  port = free_port()
  logging.getLogger('werkzeug').setLevel(logging.ERROR)
  emulator.ThreadedMotoServer('127.0.0.1', port, verbose=False).start()
  keys = ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY')
  region = {'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_ENDPOINT_URL': f'http://127.0.0.1:{port}'}
  return region | dict.fromkeys(keys, 'none')


@pytest.fixture
def bucket(request, tmp_path, monkeypatch):
  """The address of an empty folder of a store."""
  scheme = request.param
  if scheme not in STARTED:
    STARTED[scheme] = {'gs': start_gs, 's3': start_s3}[scheme]()
  for name, value in STARTED[scheme].items():
    monkeypatch.setenv(name, value)
  return f'{scheme}://bucket/{tmp_path.name}'


GS = pytest.mark.parametrize('bucket', ['gs'], indirect=True)
BOTH = pytest.mark.parametrize('bucket', ['gs', 's3'], indirect=True)


def arrays(workdir):
  """Dtype, shape and checksum of every array of the last checkpoint, each bit of it read."""
  return checkpoints.verify(workdir, checkpoints.steps(workdir)[-1]).leaves


def records(workdir):
  times = ('tokens_per_second', 'goodput')
  lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  return [{k: v for k, v in line.items() if k not in times} for line in lines]


def killed(*arguments, **options):
  raise small.Killed


def train_until_killed(monkeypatch, config, workdir, step):
  """What is still in this process is lost, as by SIGKILL."""
  add = record.Record.add

  def stop(self, done, metrics):
    add(self, done, metrics)
    if done == step:
      raise small.Killed

  with monkeypatch.context() as patch, pytest.raises(small.Killed):
    patch.setattr(record.Record, 'add', stop)
    patch.setattr(files.Growing, 'close', lambda self: None)
    loop.train(config, workdir)


@pytest.mark.parametrize(
  'bucket', ['gs', pytest.param('s3', marks=pytest.mark.slow)], indirect=True
)
def test_a_killed_run_goes_on_bit_identically(tiny, bucket, tmp_path, monkeypatch, capsys):
  whole, run = tmp_path / 'whole', files.path(f'{bucket}/run')
  loop.train(tiny(), whole)
  train_until_killed(monkeypatch, tiny(), run, 10)
  assert checkpoints.steps(run) == [4, 8] and records(run)[-1]['step'] == 8
  (run / 'checkpoints' / '12' / '_METADATA').write_text('half of a checkpoint')
  assert loop.train(tiny(), run)
  assert not loop.train(tiny(), run)
  assert arrays(run) == arrays(whole) and records(run) == records(whole)
  assert checkpoints.steps(run) == checkpoints.steps(whole)
  events = sorted(path.name for path in (run / 'tensorboard').iterdir())
  assert len(events) == 2

  assert not evaluate.main([f'--workdir={run}', '--split=validation'])
  assert not generate.main([f'--workdir={run}', '--prompt=the union', '--tokens=5'])
  for analysis in ('checkpoint', 'curve', 'clusters'):
    assert not analyze.main([analysis, f'--workdir={run}'])
  assert f'figure in {run}/clusters.png' in capsys.readouterr().out
  assert {path.name for path in run.iterdir()} == {
    *('checkpoints', 'evaluation', 'logs', 'tensorboard', 'metrics.jsonl', 'goodput.json'),
    *('config.json', 'corpus.json', 'vocabulary.json'),
    *('clusters.json', 'clusters.png', 'curve.png'),
  }
  assert 'tensorflow' not in sys.modules or 'seqio' in sys.modules
