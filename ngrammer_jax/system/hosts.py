"""Distributed training: several processes run the same program, each with its own devices.

Process 0, the primary, writes the shared files. An input error of one process ends all of them. If
a process is lost, JAX ends the others: in each process a C++ thread sends heartbeats to process 0,
even while another thread compiles or holds the interpreter lock.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import functools
import itertools
import json
import logging
import os
import threading
from typing import Any

from ngrammer_jax import errors

HEARTBEAT_TIMEOUT = 30  # seconds without a heartbeat after which JAX ends all other processes
# Seconds that processes wait for each other, at the start and at the end. The last one may still
# write its results: JAX ends it too, if the first one has waited for so long.
WAIT_TIMEOUT = 300
MAILBOX_POLL = 1  # seconds after which an exchange that waits looks whether its mailbox is closed
SLURM_TASKS = 'SLURM_STEP_NUM_TASKS'  # environment variable: number of processes of a Slurm step
# A copy of the values of JAX: a log record may need them while JAX holds its lock.
_process = {'index': 0, 'count': 1}
_mailbox_numbers = itertools.count()


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of `join`."""
  group = parser.add_argument_group('several processes (Slurm needs no flag)')
  group.add_argument(
    '--distributed', action='store_true', help='detect the cluster: Cloud TPU, Kubernetes'
  )
  group.add_argument(
    '--coordinator', type=_address, metavar='HOST:PORT', help='address of process 0'
  )
  group.add_argument('--processes', type=int, metavar='N', help='number of processes')
  group.add_argument('--process_id', type=int, metavar='I', help='index of this process, from 0')


def _address(text: str) -> str:
  """Parses --coordinator: HOST:PORT."""
  host, _, port = text.rpartition(':')
  if not (host and port.isdecimal()):
    raise argparse.ArgumentTypeError(f'{text} is not HOST:PORT')
  return text


def join(options: argparse.Namespace) -> None:
  """Connects to the other processes, if any. Call it before touching a device.

  Raises:
    BadInput: the flags are incomplete, or the cluster cannot be detected.
    PeerLostError: the other processes did not connect in time.
  """
  is_listed = (options.coordinator, options.processes, options.process_id) != (None, None, None)
  has_slurm_tasks = int(os.environ.get(SLURM_TASKS) or 1) > 1
  if not (is_listed or options.distributed or has_slurm_tasks):
    _warn_of_unused_slurm_tasks()
    return
  name = ''
  if is_listed:
    name = f'process {options.process_id} of {options.processes}: '
  logging.info('%swaiting for the others, %d minutes at most', name, WAIT_TIMEOUT // 60)
  import jax  # not at the top: every command imports this module, and --help need not wait for JAX

  try:
    jax.distributed.initialize(
      options.coordinator,
      options.processes,
      options.process_id,
      initialization_timeout=WAIT_TIMEOUT,
      heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
      shutdown_timeout_seconds=WAIT_TIMEOUT,
    )
  except ValueError as error:
    raise errors.BadInput(
      f'cannot detect the cluster environment ({error}): set --coordinator, --processes and '
      f'--process_id'
    ) from error
  except RuntimeError as error:
    raise errors.PeerLostError(
      f'cannot connect to the other processes ({error}): {errors.RERUN_ALL}'
    ) from error
  jax.devices()  # now, while all processes are in step: this can take a different time in each
  _process.update(index=jax.process_index(), count=jax.process_count())
  if is_multiprocess():
    message = 'if a process is lost, JAX ends all others after %d s with status 134: then %s'
    logging.info(message, HEARTBEAT_TIMEOUT, errors.RERUN_ALL)


def _warn_of_unused_slurm_tasks() -> None:
  """Warns if a Slurm job of several tasks was started as one process."""
  tasks = os.environ.get('SLURM_NTASKS', '1')
  if tasks != '1' and SLURM_TASKS not in os.environ:
    logging.warning(
      'this Slurm job has %s tasks, and one process is used: start it with srun', tasks
    )


def is_multiprocess() -> bool:
  """Whether there are other processes."""
  return _process['count'] > 1


def process_index() -> int:
  """Returns the index of this process; the primary is 0."""
  return _process['index']


def process_count() -> int:
  """Returns the number of processes."""
  return _process['count']


def is_primary() -> bool:
  """Whether this process writes the shared files."""
  return process_index() == 0


def prefix() -> str:
  """Returns the message prefix of this process: its index, or nothing for the primary."""
  if is_primary():
    return ''
  return f'process {process_index()}: '


@functools.cache
def warn_once(message: str) -> None:
  """Logs a warning once in the primary process."""
  if is_primary():
    logging.warning(message)


def all_gather(value: Any) -> list[Any]:
  """Returns the JSON values of all processes, by process index.

  All processes have to call this, while no computation is in flight on the devices.
  """
  if not is_multiprocess():
    return [value]
  from jax.experimental import multihost_utils
  import numpy as np

  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array(len(data))).reshape(-1)
  padded = np.pad(data, (0, int(sizes.max()) - len(data)))
  rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
  return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def gather_arrays(tree: Any) -> Any:
  """Returns arrays sharded over the processes as whole NumPy arrays.

  All processes have to call this, while no computation is in flight on the devices.
  """
  import jax

  if not is_multiprocess():
    return jax.device_get(tree)
  from jax.experimental import multihost_utils

  return multihost_utils.process_allgather(tree, tiled=True)


class ClosedError(Exception):
  """A mailbox was closed while an exchange waited."""


class Mailbox:
  """Exchanges bytes between processes over the host network instead of the device network.

  Any thread can use it, also while the devices compute.

  A process may be busy for long, and JAX ends all processes if one is lost: an exchange waits until
  the mailbox is closed. Close it in this process when it stops, as the others may have stopped
  before they sent what it waits for.

  Args:
    name: name of this mailbox, the same in all processes.
  """

  def __init__(self, name: str):
    # Mailboxes are made in the same order in all processes. A number of its own keeps what an
    # earlier mailbox with this name has sent out of this one.
    self._name = f'{name}/{next(_mailbox_numbers)}'
    self._last: str | None = None
    self._is_closed = threading.Event()

  def close(self) -> None:
    """Ends the exchange that waits, in another thread, with ClosedError; and all later ones."""
    self._is_closed.set()

  def exchange(self, number: int, content: bytes) -> list[bytes]:
    """Returns the bytes sent by each process with a number; use each number once.

    Raises:
      ClosedError: the mailbox is closed.
      PeerLostError: the processes have lost their connection.
    """
    if not is_multiprocess():
      return [content]
    # JAX has no public interface to its own key-value store.
    from jax._src import distributed

    client = distributed.global_state.client
    own = f'{self._name}/{number}/{process_index()}'
    client.key_value_set_bytes(own, content)
    received = []
    for index in range(_process['count']):
      received.append(self._receive(client, f'{self._name}/{number}/{index}'))
    if self._last is not None:
      # All have sent this number, so all have read the one before.
      client.key_value_delete(self._last)
    self._last = own
    return received

  def _receive(self, client: Any, key: str) -> bytes:
    """Returns the value of a key, once there is one."""
    while not self._is_closed.is_set():
      try:
        return client.blocking_key_value_get_bytes(key, 1000 * MAILBOX_POLL)
      except RuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise errors.PeerLostError(
            f'cannot receive from another process ({error}): {errors.RERUN_ALL}'
          ) from error
    raise ClosedError(f'mailbox {self._name} is closed')


def broadcast(value: Any) -> Any:
  """Returns the JSON value of the primary process. All processes have to call this."""
  return all_gather(value)[0]


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
  """Raises a BadInput of one process in all of them. All processes wait for each other at the end.

  Other exceptions are raised in their own process only, without waiting.
  """
  own_error = None
  try:
    yield
  except errors.BadInput as error:
    if not is_multiprocess():
      raise
    own_error = error
  own_message = None
  if own_error is not None:
    own_message = str(own_error)
  messages = all_gather(own_message)
  for index, message in enumerate(messages):
    if message is not None:
      if index > 0:
        message = f'process {index}: {message}'
      error = errors.BadInput(message)
      error.is_shared = True
      raise error from own_error


def on_primary(function: Callable[..., Any], *args: Any) -> None:
  """Calls a function in the primary process; the others wait for it, and share its BadInput."""
  with collective_errors():
    if is_primary():
      function(*args)


def prefix_record(record: logging.LogRecord) -> bool:
  """Filters log records: drops those below WARNING in all processes but the primary.

  It sets `prefix` for the format of the handler: the index of one of several processes, and a mark
  for warnings.
  """
  record.prefix = prefix() + 'warning: ' * (record.levelno == logging.WARNING)
  return is_primary() or record.levelno >= logging.WARNING
