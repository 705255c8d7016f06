"""Twenty kills and disks that are really full; minutes long."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from ngrammer_jax.checkpoints import reader
from tests.training.helpers import arrays, records

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
  'data.vocabulary': 'bytes',
  'data.vocabulary_size': None,
  'model.layers': 2,
  'model.width': 48,
  'model.heads': 2,
  'model.feed_forward_width': 96,
  'model.ngram.clusters': 16,
  'model.ngram.vocabulary_size': 256,
  'evaluation.max_tokens': 2000,
  'training.steps': 60,
  'training.batch_size': 8,
  'training.segment_length': 32,
  'training.segments_per_call': 5,
  'training.log_every': 5,
  'training.evaluate_every': 30,
  'training.checkpoint_every': 10,
}


def flags(**training):
  keys = SMALL | {f'training.{key}': value for key, value in training.items()}
  return [
    f'--config={ROOT}/configs/quickstart.py',
    *(f'--config.{key}={value}' for key, value in keys.items()),
  ]


def start(workdir, **training):
  command = [sys.executable, '-m', 'ngrammer_jax.train', f'--workdir={workdir}', *flags(**training)]
  return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def disk(tmp_path):
  """A disk of its own of 5 MB."""
  place = tmp_path / 'disk'
  place.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', 'size=5m', 'none', place]
  if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
    pytest.skip('may not mount a disk')
  yield place
  subprocess.run(['umount', place], check=True)


def test_twenty_kills_change_no_bit(tmp_path, cache):
  command = [sys.executable, '-m', 'tests.campaigns.kill_campaign', '--kills=20']
  command += [f'--folder={tmp_path}/kills', *flags()]
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0, done
  *_, last = done.stdout.splitlines()
  assert re.fullmatch(r'20 kills, \d+ runs, 0 differences in [1-9]\d+ arrays', last)


def test_kills_with_tables_in_host_memory_change_no_bit(tmp_path, cache):
  """One process, whose tables are changed by a thread while a checkpoint may be written."""
  memory = {'preset': 'engram', 'heads': 2, 'rows': 509, 'width': 8, 'layers': 0}
  memory |= {'optimizer': 'row_adagrad', 'table_memory': 'host'}
  keys = [f'--config.model.ngram_memories.0.{name}={value}' for name, value in memory.items()]
  command = [sys.executable, '-m', 'tests.campaigns.kill_campaign', '--kills=4']
  command += [f'--folder={tmp_path}/kills', *flags(), '--config.model.ngram=None', *keys]
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0, done
  *_, last = done.stdout.splitlines()
  assert re.fullmatch(r'4 kills, \d+ runs, 0 differences in [1-9]\d+ arrays', last)


def test_a_mixture_in_buckets_on_two_processes(tmp_path):
  """It is killed while it trains; the rows are those of one process."""
  pytest.importorskip('s3fs')
  pytest.importorskip('moto')
  from tests.campaigns import corpora

  steps = {'steps': 60, 'checkpoint_every': 20, 'evaluate_every': 30, 'log_every': 5}
  more = [f'--config.training.{key}={value}' for key, value in steps.items()]

  def command(workdir, processes=1):
    train = [sys.executable, '-m', 'ngrammer_jax.train', f'--workdir={workdir}']
    launcher = [sys.executable, f'{ROOT}/launch/local_processes.py', f'--processes={processes}']
    launcher = [*launcher, f'--devices={2 // processes}', '--'] if processes > 1 else []
    return [*launcher, *train, *arguments, *more]

  variables = mock.patch.dict(os.environ, JAX_NUM_CPU_DEVICES='2')
  with variables, corpora.emulated_stores():
    combination = corpora.COMBINATIONS['mixture of Parquet in s3 and zst in gs, shuffled']
    arguments = combination.arguments(tmp_path / 'data')
    subprocess.run(command(tmp_path / 'one'), check=True, capture_output=True)
    process = subprocess.Popen(
      command(tmp_path / 'two', 2), stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not reader.steps(tmp_path / 'two'):
      assert process.poll() is None and time.sleep(0.05) is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert max(reader.steps(tmp_path / 'two')) < 60
    subprocess.run(command(tmp_path / 'two', 2), check=True, capture_output=True)
  assert arrays(tmp_path / 'two') == arrays(tmp_path / 'one')
  assert records(tmp_path / 'two') == records(tmp_path / 'one')


def test_a_full_disk_costs_nothing_but_time(disk, tmp_path, cache):
  training = {'checkpoint_every': 5, 'keep_checkpoints': 20}
  process = start(disk / 'run', **training)
  _, output = process.communicate()
  good = reader.steps(disk / 'run')
  assert process.returncode == 2, output
  assert 2 <= len(good) < 12
  assert re.fullmatch(  # and nothing after it, no traceback of a library before
    rf'error: --workdir={disk}/run: the disk is full: no room for step {good[-1] + 5} of '
    rf'\d\.\d MB, \d\.\d MB left\. Last checkpoint: step {good[-1]}\. '
    r'Free some space, then rerun the same command to resume',
    output.splitlines()[-1],
  )
  assert 'Traceback' not in output
  process = start(tmp_path / 'reference', **training)
  _, reference_output = process.communicate()
  assert process.returncode == 0, reference_output
  for step in good:
    assert arrays(disk / 'run', step) == arrays(tmp_path / 'reference', step)

  subprocess.run(['mount', '-o', 'remount,size=50m', disk], check=True)
  process = start(disk / 'run', **training)
  _, output = process.communicate()
  assert process.returncode == 0, output
  assert f'restoring step {good[-1]} from' in output
  for step in range(5, 65, 5):
    assert arrays(disk / 'run', step) == arrays(tmp_path / 'reference', step)
  assert records(disk / 'run') == records(tmp_path / 'reference')
