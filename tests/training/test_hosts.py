"""Several processes on this machine train as one; they agree, stop together and go on exactly."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from ngrammer_jax.training import checkpoints, manifest
from tests.training.test_kills import flags

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ('-m', 'ngrammer_jax.train', '--config.evaluation.streams=4')


def start(processes, *arguments, devices=1):
  """Their launcher, and the flags of an environment without the devices of the tests."""
  command = [sys.executable, ROOT / 'launch' / 'local_processes.py', f'--processes={processes}']
  env = os.environ | {
    'XLA_FLAGS': os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=1')
  }
  return subprocess.Popen(
    [*command, f'--devices={devices}', '--', sys.executable, *map(str, arguments)],
    env=env | {'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def train(processes, workdir, devices=1, **training):
  process = start(processes, *TRAIN, f'--workdir={workdir}', *flags(**training), devices=devices)
  said, _ = process.communicate(timeout=500)
  assert process.returncode == 0, said
  return said


def losses(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  records = [r for r in map(json.loads, lines) if 'loss' in r or 'validation/tokens' in r]
  name = lambda r: 'loss' if 'loss' in r else 'validation/nll_nats_per_token'
  return {(r['step'], name(r)): r[name(r)] for r in records}


def sums(workdir, step):
  return manifest.verify(workdir / 'checkpoints' / str(step)).leaves


SHORT = {'steps': 20, 'evaluate_every': 10, 'checkpoint_every': 10}


def test_two_processes_train_as_one_and_one_goes_on(tmp_path, cache):
  """The same losses; what two have saved one restores, and the other way round."""
  said = train(2, tmp_path / 'two', **SHORT)
  assert said.count('step 20/20') == 1 and said.count('finished: 20 steps') == 1
  train(1, tmp_path / 'one', devices=2, **SHORT)
  expected = losses(tmp_path / 'one')
  assert len(expected) == 6 and losses(tmp_path / 'two') == pytest.approx(expected, rel=1e-5)
  assert (tmp_path / 'two' / 'logs' / 'process_1.log').exists()
  assert checkpoints.verify(tmp_path / 'two', 20).step == 20
  evaluate = start(2, '-m', 'ngrammer_jax.evaluate', f'--workdir={tmp_path}/one', '--split=test')
  said, _ = evaluate.communicate(timeout=300)
  assert evaluate.returncode == 0 and said.count('written to') == 1, said


@pytest.mark.slow
@pytest.mark.parametrize('processes', [1, 4])
def test_what_two_processes_saved_others_restore(tmp_path, cache, processes):
  train(1, tmp_path / 'whole', devices=4, **SHORT)
  process = start(2, *TRAIN, f'--workdir={tmp_path}/run', *flags(**SHORT))
  wait_for(process, tmp_path / 'run' / 'checkpoints' / '10')
  process.send_signal(signal.SIGTERM)
  said, _ = process.communicate(timeout=120)
  assert process.returncode == 143 and 'stopped by SIGTERM' in said, said
  assert 'restoring step' in train(processes, tmp_path / 'run', **SHORT)
  assert losses(tmp_path / 'run') == pytest.approx(losses(tmp_path / 'whole'), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_one_that_is_killed_stops_the_others_and_a_restart_is_exact(tmp_path, cache, victim):
  long = {'steps': 60, 'checkpoint_every': 10, 'evaluate_every': 30}
  train(2, tmp_path / 'whole', **long)
  process = start(2, *TRAIN, f'--workdir={tmp_path}/run', *flags(**long))
  wait_for(process, tmp_path / 'run' / 'checkpoints' / '10')
  began = time.monotonic()
  subprocess.run(['pkill', '-KILL', '-f', f'workdir={tmp_path}/run .*process_id={victim}$'])
  said, _ = process.communicate(timeout=120)
  assert process.returncode not in (0, 2) and time.monotonic() - began < 100
  assert f'process {victim} ended with SIGKILL' in said
  assert 'another process may be lost' in said or 'distributed service' in said, said
  assert 'restoring step' in train(2, tmp_path / 'run', **long)
  assert sums(tmp_path / 'run', 60) == sums(tmp_path / 'whole', 60)
  assert losses(tmp_path / 'run') == losses(tmp_path / 'whole')


def wait_for(process, folder):
  while not folder.exists():
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.05)


def test_what_one_process_cannot_do_none_does(tmp_path, cache):
  """The text is there for one of them only."""
  text = tmp_path / 'text.txt'
  text.write_text('the union of states is strong\n' * 400)
  given = (*flags(**SHORT), '--config.data.corpus=text', f'--config.data.path={text}')
  code = (
    'import pathlib, sys; from ngrammer_jax import flags, train\n'
    f'if sys.argv[-1] == "--process_id=1": sys.argv = [a.replace({str(text)!r}, "/none") '
    'for a in sys.argv]\nflags.run(train.main)'
  )
  process = start(2, '-c', code, f'--workdir={tmp_path}/run', *given)
  said, _ = process.communicate(timeout=120)
  assert process.returncode == 2 and said.count('error: process 1: data.path=/none') == 2, said
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'given, message',
  [
    (['--processes=2'], '--processes is given, but not --coordinator, --process_id: all three'),
    (['--coordinator=x', '--processes=2', '--process_id=0'], '--coordinator=x: expected HOST:PORT'),
    (
      ['--coordinator=x:1', '--processes=2', '--process_id=2'],
      '--process_id=2 must be from 0 to 1',
    ),
    (['--coordinator=x:1', '--processes=0', '--process_id=0'], '--processes=0 must be at least 1'),
  ],
)
def test_flags_that_do_not_say_where_the_others_are(tmp_path, given, message):
  from ngrammer_jax import errors
  from ngrammer_jax import train as verb

  with pytest.raises(errors.BadInput, match=re.escape(message)):
    verb.main([f'--workdir={tmp_path}/run', *flags(), *given])
