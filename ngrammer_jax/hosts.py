"""Processes that train as one, each of the same program and with devices of its own.

The first of them writes what all share, and what one of them cannot do, none does.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import json
import logging
import os
from typing import Any

from ngrammer_jax import errors

HEARTBEAT = 60  # seconds after which a process that is not heard of counts as lost
HELLO = 300  # seconds that processes wait for each other at the start
GOODBYE = 20  # seconds that the first to end waits for the others
TASKS = 'SLURM_STEP_NUM_TASKS'  # how many Slurm has started
_known = {'number': 0, 'count': 1}  # of this process, and of all


def add_flags(parser: argparse.ArgumentParser) -> None:
  """The flags that `join` takes."""
  group = parser.add_argument_group('several processes (Slurm needs no flag)')
  group.add_argument(
    '--distributed', action='store_true', help='find the others: Cloud TPU, Kubernetes'
  )
  group.add_argument('--coordinator', metavar='HOST:PORT', help='where the first process listens')
  group.add_argument('--processes', type=int, metavar='N', help='how many there are')
  group.add_argument('--process_id', type=int, metavar='I', help='which this is, from 0')


def join(options: argparse.Namespace) -> None:
  """Finds the other processes, if there are. To be called before a device is touched.

  Raises:
    BadInput: the flags do not say where, how many and which.
  """
  keys = ('coordinator', 'processes', 'process_id')
  given = {key: getattr(options, key) for key in keys}
  said = [key for key, value in given.items() if value is not None]
  if said and len(said) < len(keys):
    missing = ', '.join(f'--{key}' for key in keys if key not in said)
    raise errors.BadInput(f'--{said[0]} is given, but not {missing}: all three or none')
  if said:
    _check(**given)
  elif not options.distributed and int(os.environ.get(TASKS) or 1) < 2:
    return
  numbers = (given['coordinator'], given['processes'], given['process_id'])
  waits = {'heartbeat_timeout_seconds': HEARTBEAT, 'shutdown_timeout_seconds': GOODBYE}
  which = f'process {given["process_id"]} of {given["processes"]}: ' if said else ''
  logging.info('%swaiting for the others, %d minutes at most', which, HELLO // 60)
  import jax  # here, because every verb imports this file, and --help need not wait for JAX

  try:
    jax.distributed.initialize(*numbers, initialization_timeout=HELLO, **waits)
  except ValueError as error:
    raise errors.BadInput(
      f'nothing here says where the other processes are ({error}): give --coordinator, --processes '
      f'and --process_id'
    ) from error
  except RuntimeError as error:
    raise errors.Lost(f'the other processes were not found: {error}') from error
  jax.devices()  # while all are here: later one may take longer than another
  # Kept, because a log line may ask while JAX holds its lock.
  _known.update(number=jax.process_index(), count=jax.process_count())


def _check(coordinator, processes, process_id):
  host, colon, port = coordinator.rpartition(':')
  if not (host and colon and port.isdecimal()):
    raise errors.BadInput(f'--coordinator={coordinator}: expected HOST:PORT')
  if processes < 1:
    raise errors.BadInput(f'--processes={processes} must be at least 1')
  if not 0 <= process_id < processes:
    raise errors.BadInput(f'--process_id={process_id} must be from 0 to {processes - 1}')


def several() -> bool:
  """Whether there are other processes."""
  return _known['count'] > 1


def number() -> int:
  """Of this process; the first is 0."""
  return _known['number']


def first() -> bool:
  """Whether this process writes what all share."""
  return number() == 0


def gathered(value: Any) -> list[Any]:
  """What each of the processes has, JSON values in their order. All have to call this.

  Nothing else may be under way on the devices.
  """
  if not several():
    return [value]
  from jax.experimental import multihost_utils
  import numpy as np

  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array(len(data))).reshape(-1)
  padded = np.pad(data, (0, int(sizes.max()) - len(data)))
  rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
  return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def agreed(value: Any) -> Any:
  """What the first process has, for all of them."""
  return gathered(value)[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
  """What one process cannot do, none does: all of them raise its BadInput.

  All wait for each other at the end.
  """
  mine = None
  try:
    yield
  except errors.BadInput as error:
    if not several():
      raise
    mine = error
  for of_process, said in enumerate(gathered(None if mine is None else str(mine))):
    if said is not None:
      prefix = '' if of_process == 0 else f'process {of_process}: '
      raise errors.BadInput(f'{prefix}{said}') from mine


def by_first(do: Callable[..., Any], *given: Any) -> None:
  """Has the first process do something for all, which wait for it."""
  with together():
    if first():
      do(*given)


class Named(logging.Filter):
  """Lets the first process speak, and of others what goes wrong, by their number."""

  def filter(self, record: logging.LogRecord) -> bool:
    if first():
      return True
    if record.levelno < logging.WARNING:
      return False
    record.msg = f'process {number()}: {record.msg}'
    return True
