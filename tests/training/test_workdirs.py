"""One process to a workdir."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.training import loop, workdirs
from tests.checks import bad_input

HOLD = """
import pathlib, sys, time
from ngrammer_jax.training import workdirs
workdir = pathlib.Path(sys.argv[1])
with (workdir / 'lock').open('a+') as file:
  workdirs._lock(workdir, file)
  print('held', flush=True)
  time.sleep(600)
"""


@contextlib.contextmanager
def held(workdir):
  with (workdir / 'lock').open('a+') as file:
    workdirs._lock(workdir, file)
    yield


def test_a_second_process_is_refused_until_the_first_is_gone(tiny, tmp_path):
  run = tmp_path / 'run'
  config = tiny(training={'steps': 2, 'evaluate_every': 0})
  assert loop.train(config, run)
  holder = subprocess.Popen([sys.executable, '-c', HOLD, run], stdout=subprocess.PIPE)
  try:
    assert holder.stdout.readline() == b'held\n'
    for _ in range(2):  # whoever is refused leaves the name of the holder
      with bad_input(
        f'--workdir={run} is in use by process {holder.pid} on {socket.gethostname()}: '
        'wait for it, stop it, or use another workdir'
      ):
        loop.train(config, run)
  finally:
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
  with held(run):
    assert (run / 'lock').read_text() == f'process {os.getpid()} on {socket.gethostname()}\n'
    with bad_input(
      f'--workdir={run} is in use by process {os.getpid()} on {socket.gethostname()}: '
      'wait for it, stop it, or use another workdir'
    ):
      loop.train(config, run)
  assert not loop.train(config, run)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
  def fails(file, operation):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(fcntl, 'flock', fails)
  with held(tmp_path):
    pass
  assert caplog.messages == [
    f'{tmp_path} cannot be locked: No locks available; start no second process'
  ]


def test_a_run_of_another_version(tiny, tmp_path):
  path = tmp_path / 'config.json'
  experiment.save(tiny(), path)
  path.write_text(path.read_text().replace('"epsilon"', '"epsilom"', 1))
  said = 'has a config.json that this version of ngrammer_jax cannot read: unknown config key'
  with pytest.raises(errors.BadInput, match=said):
    workdirs.load_config(tmp_path)
