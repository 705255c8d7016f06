"""Watches the other processes of a job: a lost one is named, and ends all the others.

Process 0 is connected to every other process, by TCP. The system closes the connections of a
process that ends, also of one that is killed: if it has not said `bye`, the others print its number
and exit. A process that is stopped, or whose machine fails, closes nothing. Its silence shows, but
only in training, where every process sends `alive` every few seconds: before that, a long call may
hold the lock of the interpreter.

Without this, a process waits in a collective until JAX ends it with a stack trace of C++ that names
nobody. JAX still does so if the connections cannot be made.

Messages are lines: `hello TOKEN INDEX`, `alive`, `quiet` (after training), `lost INDEX HOW`, `bye`.
"""

from collections.abc import Iterator
import contextlib
import os
import secrets
import selectors
import socket
import threading
import time

CONNECT_TIMEOUT = 30  # seconds for all processes to connect
BEAT_INTERVAL = 5  # seconds between two `alive`
SILENCE = 45  # seconds without `alive` after which a process is lost; less than the limit of JAX
# Seconds from the `bye` of one process to the end of training in all, which may still save.
LEAVE_TIMEOUT = 60
KILLED = 'was killed or failed'
SILENT = f'has not answered for {SILENCE} s'
LEFT = 'has ended before the others, see its log'


class Watch:
  """A thread that exchanges messages with other processes, and ends this one if any is lost.

  Args:
    connections: socket to each process, by its index.
  """

  def __init__(self, connections: dict[int, socket.socket]):
    self._connections = connections
    self._unread = dict.fromkeys(connections, b'')
    self._last_alive: dict[int, float] = {}  # time of the last `alive`, by index
    self._bye_times: dict[int, float] = {}
    self._is_training = self._has_left = False
    self._lock = threading.Lock()  # no `alive` may follow `quiet`: its end would look like silence
    self._selector = selectors.DefaultSelector()
    for index, connection in connections.items():
      self._selector.register(connection, selectors.EVENT_READ, index)
    self._thread = threading.Thread(target=self._run, name='peers', daemon=True)
    self._thread.start()

  @contextlib.contextmanager
  def training(self) -> Iterator[None]:
    """Sends `alive` during the block."""
    self._is_training = True
    try:
      yield
    finally:
      with self._lock:
        self._is_training = False
        self._send('quiet')

  def leave(self) -> None:
    """Says `bye`: this process ends in order, whatever the others do."""
    self._has_left = True
    self._send('bye')

  def _run(self) -> None:
    next_beat = 0.0
    while not self._has_left:
      for key, _ in self._selector.select(timeout=0.5):
        self._read(key.data)
      now = time.monotonic()
      if now >= next_beat:
        with self._lock:
          if self._is_training:
            self._send('alive')
            next_beat = now + BEAT_INTERVAL
      for index, last_alive in self._last_alive.items():
        if now - last_alive > SILENCE:
          self._lose(index, SILENT)
      for index, bye_time in self._bye_times.items():
        if self._is_training and now - bye_time > LEAVE_TIMEOUT:
          self._lose(index, LEFT)

  def _read(self, index: int) -> None:
    """Handles what a process has sent."""
    try:
      data = self._connections[index].recv(4096)
    except OSError:
      data = b''
    if not data:
      self._lose(index, KILLED)
    *lines, self._unread[index] = (self._unread[index] + data).split(b'\n')
    for line in lines:
      name, *arguments = line.decode().split(maxsplit=2)
      if name == 'alive':
        self._last_alive[index] = time.monotonic()
      elif name in ('quiet', 'bye'):
        self._last_alive.pop(index, None)
      elif name == 'lost':
        self._lose(*arguments)
      if name == 'bye':
        self._bye_times[index] = time.monotonic()
        self._selector.unregister(self._connections[index])

  def _lose(self, index: int | str, how: str) -> None:
    """Tells all processes of a lost one, and ends this one."""
    if self._has_left:
      return
    self._send(f'lost {index} {how}')
    self._end(index, how)

  def _end(self, index: int | str, how: str) -> None:
    # Not through logging: another thread may hold its lock.
    with contextlib.suppress(OSError):
      os.write(2, f'\n{describe(index, how)}\n'.encode())
    os._exit(1)

  def _send(self, message: str) -> None:
    for connection in self._connections.values():
      with contextlib.suppress(OSError):  # it has ended: `_read` finds out
        connection.send(f'{message}\n'.encode())


def describe(index: int | str, how: str) -> str:
  """Returns the sentence about a lost process."""
  return (
    f'error: process {index} {how}: rerun the same command in all processes to resume from the '
    f'last checkpoint'
  )


def listen() -> tuple[socket.socket, dict[str, object]]:
  """Returns a listening socket of process 0, and what the others need to connect to it."""
  has_ipv6 = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
  server = socket.create_server(('', 0), family=family, backlog=4096, dualstack_ipv6=has_ipv6)
  server.settimeout(CONNECT_TIMEOUT)
  return server, {'port': server.getsockname()[1], 'token': secrets.token_hex(16)}


def accept(server: socket.socket, token: str, count: int) -> dict[int, socket.socket]:
  """Returns the connections to all other processes of a job with `count` processes.

  Raises:
    OSError: a process has not connected in time.
  """
  connections: dict[int, socket.socket] = {}
  deadline = time.monotonic() + CONNECT_TIMEOUT
  while len(connections) < count - 1 and time.monotonic() < deadline:
    connection, _ = server.accept()
    connection.settimeout(CONNECT_TIMEOUT)
    try:
      line = _read_line(connection)
    except OSError:  # a stranger, such as a port scanner
      line = ''
    name, *arguments = line.split() or ['']
    if (name, *arguments[:1]) == ('hello', token) and len(arguments) == 2:
      connections[int(arguments[1])] = connection
    else:
      connection.close()  # not one of the job
  server.close()
  if len(connections) < count - 1:
    raise TimeoutError('not all processes have connected')
  return connections


def _read_line(connection: socket.socket) -> str:
  """Returns the first line, and leaves the others to be read."""
  line = b''
  while not line.endswith(b'\n') and len(line) < 200 and (byte := connection.recv(1)):
    line += byte
  return line.decode(errors='replace')


def connect(host: str, port: int, token: str, index: int) -> dict[int, socket.socket]:
  """Returns the connection of another process to process 0. Raises OSError if there is none."""
  connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
  connection.sendall(f'hello {token} {index}\n'.encode())
  return {0: connection}
