"""Runs a command as a process: its logging, its exit status, its error message.

0: success. 1: another process was lost, or a bug. 2: bad input; do not retry. 128 + the number of a
signal: the command was stopped; rerun the same command to resume.
"""

import atexit
from collections.abc import Callable
import contextlib
import gc
import io
import logging
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any, NamedTuple, NoReturn

from ngrammer_jax import errors
from ngrammer_jax.system import file_errors, hosts, libtpu, progress, signals

# After an error that may come from a lost process, until JAX names it and ends this one.
LOST_PROCESS_SECONDS = hosts.HEARTBEAT_TIMEOUT + 15
LAST_SECONDS = 5  # for the other processes with the same error to end
# Imports and tracing make objects that stay, through which Python would search all the time.
OBJECTS_PER_COLLECTION = 100_000
MAX_MESSAGE = 1000  # characters of an error message


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
  """Runs a command, logs to standard error, and exits with the status of the command or its error.

  Args:
    main: the command. It gets the arguments of the command line and returns its exit status.
  """
  gc.set_threshold(OBJECTS_PER_COLLECTION)
  atexit.register(gc.freeze)  # or Python would search through all objects once more
  _use_utf8_names()
  libtpu.skip_without_tpu()
  _configure_logging()
  if isinstance(sys.stdout, io.TextIOWrapper):  # a result may have characters outside its encoding
    sys.stdout.reconfigure(errors='backslashreplace')
  try:
    signals.exit_on_signals()
    status = main(sys.argv[1:]) or 0
  except (Exception, KeyboardInterrupt) as error:
    row = _find_exit(error)
    if row is None:
      raise
    status = _report(error, row)
  if status in (1, 2) and hosts.is_multiprocess():
    _exit_alone(status)
  sys.exit(status)


class Exit(NamedTuple):
  """The exit of a command after an exception: a row of EXITS.

  Attributes:
    exception: class of the exception.
    status: the exit status, or a function from the exception to it.
    message: function from the exception to the line on standard error; None: no line.
    condition: predicate of exceptions of this class; None: all.
    prepare: called with the exception before the message is printed; None: no preparation.
    is_immediate: exits without the shutdown of Python.
  """

  exception: type[BaseException]
  status: int | Callable[[Any], int]
  message: Callable[[Any], str] | None
  condition: Callable[[Any], bool] | None = None
  prepare: Callable[[Any], None] | None = None
  is_immediate: bool = False


def _report(error: BaseException, row: Exit) -> int:
  """Prints the message of an exception and returns the exit status.

  The first process prints an exception raised by all (`is_shared`).
  """
  if row.prepare is not None:
    row.prepare(error)
  is_shared = getattr(error, 'is_shared', False)
  if row.message is not None and (hosts.is_primary() or not is_shared):
    with contextlib.suppress(OSError):
      print(f'{hosts.prefix()}{_one_line(row.message(error))}', file=sys.stderr, flush=True)
  status = row.status(error) if callable(row.status) else row.status
  if row.is_immediate:
    _exit_now(status)
  return status


def _find_exit(error: BaseException) -> Exit | None:
  """Returns the first matching row of EXITS; None for a bug."""
  for row in EXITS:
    if isinstance(error, row.exception) and (row.condition is None or row.condition(error)):
      return row
  return None


def _error_message(error: Exception) -> str:
  return f'error: {error}'


def _signal_status(error: errors.Interrupted) -> int:
  """Returns 128 + the number of the signal; signals may differ between processes."""
  number = signal.SIGTERM if hosts.is_multiprocess() else error.signal
  return 128 + number


def _interrupted_message(error: KeyboardInterrupt) -> str:
  del error
  return 'interrupted'


def _discard_output(error: BrokenPipeError) -> None:
  """Redirects closed standard output to the null device."""
  del error
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_too_many_open_files(error: Exception) -> bool:
  return 'Too many open files' in str(error)


def _open_files_message(error: Exception) -> str:
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return (
    f'error: too many open files ({error}): raise the limit, which is {limit:,}, with ulimit -n'
  )


def _is_out_of_memory(error: Exception) -> bool:
  return isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error)


def _out_of_memory_message(error: Exception) -> str:
  reason = str(error).partition('\n')[0]  # XLA adds pages
  return f'error: out of memory ({reason}): {errors.LESS_MEMORY}'


def _place_message(error: OSError) -> str:
  reason = f'{error.strerror}; {file_errors.remedy(error)}'
  if error.filename:
    return f'error: {error.filename} cannot be used: {reason}'
  return f'error: {reason}'


def _is_in_multiprocess(error: Exception) -> bool:
  del error
  return hosts.is_multiprocess()


def _lost_process_message(error: Exception) -> str:
  reason = f'{type(error).__name__}: {error}'
  return f'error: {reason}; if another process is lost, {errors.RERUN_ALL}'


# The first row that fits an exception counts.
EXITS = (
  # Also where it is the reason of another error. Without open files, threads of the libraries hang
  # while Python shuts down.
  Exit(Exception, 2, _open_files_message, _has_too_many_open_files, is_immediate=True),
  Exit(errors.BadInput, 2, _error_message),
  Exit(errors.Interrupted, _signal_status, str),
  Exit(errors.PeerLostError, 1, _error_message),
  # XLA may be compiling, and would crash while Python shuts down.
  Exit(KeyboardInterrupt, 130, _interrupted_message, is_immediate=True),
  Exit(BrokenPipeError, 128 + signal.SIGPIPE, None, prepare=_discard_output),
  Exit(Exception, 2, _out_of_memory_message, _is_out_of_memory),
  Exit(OSError, 2, _place_message, file_errors.is_unusable_path),
  # A collective of JAX fails with any exception.
  Exit(Exception, 1, _lost_process_message, _is_in_multiprocess, traceback.print_exception),
)


def _configure_logging() -> None:
  """Logs to standard error, and hides library log lines of errors that are also raised."""
  line_format = '%(prefix)s%(message)s'
  logging.basicConfig(level=logging.INFO, format=line_format, handlers=[progress.LogHandler()])
  for handler in logging.getLogger().handlers:
    handler.addFilter(hosts.prefix_record)
  logging.getLogger('jax').setLevel(logging.WARNING)  # reports every missing backend
  for name in ('gcsfs', 'fsspec', 'google', 'asyncio'):
    logging.getLogger(name).setLevel(logging.CRITICAL)  # their logged errors are also raised
  absl = logging.getLogger('absl')
  absl.setLevel(logging.WARNING)  # Orbax logs warnings, but raises its errors
  absl.addFilter(lambda record: record.levelno < logging.ERROR)


def _use_utf8_names() -> None:
  """Starts Python again in UTF-8 mode if its locale has another encoding.

  C++ libraries write file names in UTF-8, or cannot open names in other encodings. Standard output
  keeps its encoding.
  """
  if sys.getfilesystemencoding() != 'utf-8' and os.environ.get('PYTHONUTF8') != '1':
    os.environ.setdefault('PYTHONIOENCODING', getattr(sys.stdout, 'encoding', 'utf-8'))
    os.environ['PYTHONUTF8'] = '1'
    os.execv(sys.executable, sys.orig_argv)


def _one_line(message: str) -> str:
  """Returns a message in one line, without line breaks and control codes from foreign files."""
  text = ' '.join(line.strip() for line in message.splitlines() if line.strip())
  text = ''.join(c if c.isprintable() else repr(c)[1:-1] for c in text)
  if len(text) <= MAX_MESSAGE:
    return text
  return f'{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}'


def _exit_alone(status: int) -> NoReturn:
  """Exits one of several processes without waiting for the others.

  While waiting, JAX would end all of them with 134. Process 0 exits last: it receives the
  heartbeats, and the others end as soon as it does.
  """
  with contextlib.suppress(OSError):
    sys.stdout.flush()
  if status == 1:  # a collective fails if a process is lost
    time.sleep(LOST_PROCESS_SECONDS)
  if hosts.is_primary():
    time.sleep(LAST_SECONDS)
  os._exit(status)


def _exit_now(status: int) -> NoReturn:
  """Exits without the shutdown of Python."""
  with contextlib.suppress(OSError):
    sys.stdout.flush()
  os._exit(status)
