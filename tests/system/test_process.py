"""Exit statuses and error messages of a command."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from ngrammer_jax import errors
from ngrammer_jax.system import hosts, process
from tests.loops import each

EXHAUSTED = 'RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.'


def refuse(argv):
  raise errors.BadInput('invalid')


def lose(argv):
  raise errors.PeerLostError('no answer from process 3')


def exhaust(argv):
  raise RuntimeError(f'{EXHAUSTED}\n[a page of XLA]')


def fill_disk(argv):
  raise OSError(28, 'No space left on device', 'runs/a')


def stop(argv):
  raise errors.Interrupted(signal.SIGTERM)


@each(
  'main, status, output',
  [
    (lambda argv: 0, 0, ''),
    (lambda argv: None, 0, ''),
    (lambda argv: 143, 143, ''),
    (refuse, 2, 'error: invalid\n'),
    (lose, 1, 'error: no answer from process 3\n'),  # another try may help
    (exhaust, 2, f'error: out of memory ({EXHAUSTED}): {errors.LESS_MEMORY}\n'),
    (
      fill_disk,
      2,
      'error: runs/a cannot be used: No space left on device; free some space, or use another '
      'path\n',
    ),
    (stop, 143, 'stopped by SIGTERM; rerun the same command to resume\n'),
  ],
)
def test_exit_status(monkeypatch, capsys, main, status, output):
  with pytest.raises(SystemExit) as caught:
    process.run(main)
  assert caught.value.code == status
  assert capsys.readouterr().err == output


def test_warnings_of_orbax_are_not_hidden(caplog):
  with pytest.raises(SystemExit):
    process.run(lambda argv: 0)
  absl = logging.getLogger('absl')
  absl.warning('nothing to merge')
  absl.error('raised as well')
  assert [record.message for record in caplog.records] == ['nothing to merge']


def test_other_exceptions_are_not_hidden():
  with pytest.raises(ZeroDivisionError):
    process.run(lambda argv: 1 // 0)


def fail(argv):
  raise ValueError('UNKNOWN: Gloo AllGather failed')


@each(
  'main, index, status, seconds, error',
  [
    (refuse, 0, 2, [5], 'error: invalid\n'),  # it ends after the others
    (refuse, 1, 2, [], 'process 1: error: invalid\n'),
    (
      fail,
      1,
      1,
      [45],
      'process 1: error: ValueError: UNKNOWN: Gloo AllGather failed; if another process is lost, '
      'rerun the same command in all processes to resume from the last checkpoint\n',
    ),
  ],
)
def test_one_of_several_fails_without_waiting_for_the_others(
  monkeypatch, capsys, main, index, status, seconds, error
):
  """But long enough for JAX to end it, and name a lost one."""
  slept = []
  monkeypatch.setattr(hosts, '_process', {'index': index, 'count': 2})
  monkeypatch.setattr(time, 'sleep', slept.append)
  monkeypatch.setattr(os, '_exit', sys.exit)
  with pytest.raises(SystemExit) as caught:
    process.run(main)
  assert (caught.value.code, slept) == (status, seconds)
  assert capsys.readouterr().err.endswith(error)


def test_subcommand_gets_the_command_line(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['subcommand', '--workdir', 'x'])
  seen = []
  with pytest.raises(SystemExit):
    process.run(seen.extend)
  assert seen == ['--workdir', 'x']


def refuse_lines(argv):
  raise errors.BadInput('first\n  second\x1b[31m' + 'x' * 5000 + 'the remedy')


def test_an_error_is_one_line_without_control_codes(capsys):
  """Files of others may have anything in them."""
  with pytest.raises(SystemExit):
    process.run(refuse_lines)
  error = capsys.readouterr().err
  assert error.startswith('error: first second\\x1b[31mxxx') and error.endswith('xthe remedy\n')
  assert error.count('\n') == 1 and len(error) < 1100


PROCESS = """
import atexit, os, signal, sys
from ngrammer_jax import errors
from ngrammer_jax.system import process

def main(argv):
  if argv == ['at_exit']:
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    return 0
  if argv[0].startswith('SIG'):
    os.kill(os.getpid(), signal.Signals[argv[0]])
  if argv == ['bad_input']:
    raise errors.BadInput('b cannot be written: Too many open files')
  raise OSError(24, 'Too many open files', 'a')

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
process.run(main)
"""


@each(
  'argument, status, message',
  [
    ('SIGTERM', 143, 'stopped by SIGTERM; rerun the same command\n'),
    ('SIGUSR1', 138, 'stopped by SIGUSR1; rerun the same command\n'),
    ('SIGHUP', 129, 'stopped by SIGHUP; rerun the same command\n'),
    ('at_exit', 143, 'stopped by SIGTERM; rerun the same command\n'),
    (
      'open',
      2,
      "error: too many open files ([Errno 24] Too many open files: 'a'): raise the limit",
    ),
    (
      'bad_input',
      2,
      'error: too many open files (b cannot be written: Too many open files): raise the limit',
    ),
  ],
)
def test_a_process_that_ends_at_once(argument, status, message):
  command = [sys.executable, '-c', PROCESS, argument]
  ended = subprocess.run(command, capture_output=True, text=True)
  assert (ended.returncode, ended.stderr[: len(message)]) == (status, message)
  assert ended.stderr.count('\n') == 1
