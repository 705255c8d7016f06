"""Reads lines of standard input; a model continues or answers them."""

from collections.abc import Callable, Iterator
import contextlib
import logging
import signal
import sys
import types
import typing

from ngrammer_jax import errors

if typing.TYPE_CHECKING:
  from ngrammer_jax.inference.conversation import Conversation

MARK = '> '  # where a terminal waits for a line
PROMPT_HINT = 'one prompt per line; Ctrl-C ends a continuation, Ctrl-D the program'
CHAT_HINT = 'one message per line; Ctrl-C ends an answer, Ctrl-D the chat; /help lists the commands'
CHAT_HELP = """\
/system TEXT  replaces the system message; without TEXT: the one of the chat template, if any
/reset        removes all messages but the system message
/help         prints this
/exit         ends the chat
Put a space before a message that begins with a slash."""


def answer_lines(answer: Callable[[int, str], bool], hint: str) -> None:
  """Answers each line of standard input with a model loaded and compiled once.

  An invalid line is reported, and Ctrl-C ends an answer.

  Args:
    answer: function of the index of a line and the line; False ends the program.
    hint: first text on a terminal.
  """
  for i, line in enumerate(_read_lines(hint)):
    try:
      if not answer(i, line):
        return
    except errors.BadInput as error:
      print(f'error: {error}', file=sys.stderr)
    except KeyboardInterrupt:
      print()


def chat_in_lines(chat: 'Conversation') -> None:
  """Answers messages of standard input, one per line, and runs commands."""

  def answer(_: int, line: str) -> bool:
    if line.startswith('/'):
      return _follow_command(chat, line)
    if line.strip():
      _print_answer(chat, line)
    return True

  answer_lines(answer, CHAT_HINT)


def _follow_command(chat: 'Conversation', line: str) -> bool:
  """Runs a command; returns whether the chat continues. Raises BadInput for an unknown one."""
  name, _, argument = line.strip().partition(' ')
  if name == '/system':
    system = argument.strip() or None
    chat.set_system(system)
    if system:
      _print_note('the system message is replaced')
    else:
      _print_note('the chat template decides')
  elif name == '/reset':
    chat.reset()
    _print_note('all messages are removed')
  elif name == '/help':
    _print_note(CHAT_HELP)
  elif name != '/exit':
    raise errors.BadInput(
      f'there is no command {name}: expected /system, /reset, /help or /exit; a message that '
      f'begins with a slash needs a space before it'
    )
  return name != '/exit'


def _print_note(text: str) -> None:
  """Prints text other than answers."""
  print(text, file=sys.stderr)


def _print_answer(chat: 'Conversation', message: str) -> None:
  """Prints the answer to a message while it is generated; Ctrl-C ends it."""

  def print_new_text(_: int, new_text: str) -> None:
    print(new_text, end='', flush=True)

  with _delayed_interrupt() as is_interrupted:
    answer = chat.say(message, print_new_text, is_interrupted)
    print()
    if not answer.ended and not is_interrupted():
      logging.info('the answer is cut off after %s tokens, see --tokens', f'{len(answer.tokens):,}')


@contextlib.contextmanager
def _delayed_interrupt() -> Iterator[Callable[[], bool]]:
  """Delays Ctrl-C, so that tokens are read completely; yields whether it was pressed.

  The second Ctrl-C is not delayed.
  """
  was_pressed = False
  handler = signal.getsignal(signal.SIGINT)

  def delay(number: int, frame: types.FrameType | None) -> None:
    nonlocal was_pressed
    was_pressed = True
    signal.signal(signal.SIGINT, handler)

  def is_interrupted() -> bool:
    return was_pressed

  signal.signal(signal.SIGINT, delay)
  try:
    yield is_interrupted
  finally:
    signal.signal(signal.SIGINT, handler)


def _read_lines(hint: str) -> Iterator[str]:
  """Yields the lines of standard input, without line breaks. Ctrl-C discards a terminal line."""
  if not sys.stdin.isatty():
    while line := sys.stdin.readline():
      yield line.removesuffix('\n')
    return
  with contextlib.suppress(ImportError):
    import readline as readline  # lines of `input` can be edited then, and have a history
  _print_note(hint)
  while True:
    try:
      yield _read_terminal_line()
    except EOFError:
      print(file=sys.stderr)
      return
    except KeyboardInterrupt:
      print(file=sys.stderr)
      _print_note(hint)


def _read_terminal_line() -> str:
  """Returns a line of a terminal. Raises EOFError after Ctrl-D."""
  if sys.stdout.isatty():
    return input(MARK)
  print(MARK, end='', file=sys.stderr, flush=True)  # standard output has the answers alone
  line = sys.stdin.readline()
  if not line:
    raise EOFError
  return line.removesuffix('\n')
