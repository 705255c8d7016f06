"""Exit statuses and error messages of a verb."""

import signal
import sys

import pytest

from ngrammer_jax import errors, flags
from tests.loops import each


def refuse(argv):
  raise errors.BadInput('invalid')


def lose(argv):
  raise errors.PeerLostError('no answer from process 3')


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
    (stop, 143, 'stopped by SIGTERM; rerun the same command to resume\n'),
  ],
)
def test_exit_status(monkeypatch, capsys, main, status, output):
  with pytest.raises(SystemExit) as caught:
    flags.run(main)
  assert caught.value.code == status
  assert capsys.readouterr().err == output


def test_other_exceptions_are_not_hidden():
  with pytest.raises(ZeroDivisionError):
    flags.run(lambda argv: 1 // 0)


def test_verb_gets_the_command_line(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['verb', '--workdir', 'x'])
  seen = []
  with pytest.raises(SystemExit):
    flags.run(seen.extend)
  assert seen == ['--workdir', 'x']
