"""Lines of standard input: commands of a chat, and Ctrl-C."""

import io
import os
import signal
import sys

import pytest

from ngrammer_jax import errors, generate, interactive
from ngrammer_jax.inference.text import Completion
from tests.checks import bad_input


class Chat:
  """Stands for a conversation; answers with the message, letter by letter."""

  def __init__(self):
    self.calls = []

  def say(self, message, on_text, should_stop):
    self.calls.append(message)
    if message == 'too long':
      raise errors.BadInput('it is too long')
    if message == 'stop':
      os.kill(os.getpid(), signal.SIGINT)
    said = ''
    for letter in message:
      on_text(0, letter)
      said += letter
      if should_stop():
        break
    return Completion(message, said, [1] * len(said), message != 'cut', 0)

  def set_system(self, system):
    self.calls.append(('system', system))

  def reset(self):
    self.calls.append('reset')


@pytest.fixture
def answer(monkeypatch, capsys):
  """Returns the calls, standard output and standard error of a chat with these lines."""

  def answer(*lines):
    monkeypatch.setattr(sys, 'stdin', io.StringIO(''.join(f'{line}\n' for line in lines)))
    chat = Chat()
    interactive.chat_in_lines(chat)
    return chat.calls, *capsys.readouterr()

  return answer


def test_lines_are_messages_and_commands(answer):
  calls, out, _ = answer(
    'hello', '', '  ', ' /usr', '/system Be  short. ', '/system', '/reset', 'a'
  )
  assert calls == ['hello', ' /usr', ('system', 'Be  short.'), ('system', None), 'reset', 'a']
  assert out == 'hello\n /usr\na\n'


def test_exit_help_and_unknown_commands(answer):
  calls, out, err = answer('/help', '/quit now', 'a', '/exit', 'b')
  assert (calls, out) == (['a'], 'a\n')
  assert err == interactive.CHAT_HELP + (
    '\nerror: there is no command /quit: expected /system, /reset, /help or /exit; a message that '
    'begins with a slash needs a space before it\n'
  )


def test_an_error_and_ctrl_c_do_not_end_the_chat(answer, caplog):
  caplog.set_level('INFO')
  handler = signal.getsignal(signal.SIGINT)
  calls, out, err = answer('too long', 'stop', 'cut')
  assert calls == ['too long', 'stop', 'cut']
  assert (out, err) == ('s\ncut\n', 'error: it is too long\n')
  assert caplog.messages == ['the answer is cut off after 3 tokens, see --tokens']
  assert signal.getsignal(signal.SIGINT) is handler


def test_the_second_ctrl_c_is_not_delayed():
  with interactive._delayed_interrupt() as is_interrupted:
    assert not is_interrupted()
    os.kill(os.getpid(), signal.SIGINT)
    assert is_interrupted()
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


def test_a_system_message_is_for_a_chat():
  with bad_input(
    'a system message (--system) comes before the messages of a chat, but the prompts are texts to '
    'continue: set chat=True (--chat), or leave it out'
  ):
    generate.main(['--workdir=none', '--prompt=a', '--system=b'])
