"""A lost process is named in all the others; one that ends in order is not lost."""

import contextlib
import socket
import threading
import time

import pytest

from ngrammer_jax import peers
from ngrammer_jax.system import hosts


class Ended(Exception):
  """Takes the place of the end of the process."""


@pytest.fixture
def ends(monkeypatch):
  """What the threads that watch would have ended their process with."""
  found = []

  def end(self, index, how):
    found.append((int(index), how))
    raise Ended

  run = peers.Watch._run

  def run_to_end(self):
    with contextlib.suppress(Ended, OSError):
      run(self)

  monkeypatch.setattr(peers.Watch, '_end', end)
  monkeypatch.setattr(peers.Watch, '_run', run_to_end)
  return found


def pairs(count):
  """The connections of process 0, and those of each other process."""
  sockets = {index: socket.socketpair() for index in range(1, count)}
  own = {index: pair[0] for index, pair in sockets.items()}
  return own, [{0: pair[1]} for pair in sockets.values()]


def wait(condition):
  deadline = time.monotonic() + 20
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.01)
  assert condition()


def test_a_closed_connection_is_a_lost_process_in_all_others(ends):
  first, (second, third) = pairs(3)
  watches = [peers.Watch(first), peers.Watch(third)]
  second[0].close()
  wait(lambda: len(ends) == 2)
  assert ends == [(1, peers.KILLED)] * 2
  assert all(not watch._thread.is_alive() or watch._thread.join(5) is None for watch in watches)


def test_the_first_process_is_lost_too(ends):
  first, (second,) = pairs(2)
  peers.Watch(second)
  first[1].close()
  wait(lambda: ends)
  assert ends == [(0, peers.KILLED)]


def test_one_that_leaves_in_order_is_not_lost(ends):
  first, (second, third) = pairs(3)
  watches = [peers.Watch(first), peers.Watch(second), peers.Watch(third)]
  with watches[1].training():
    pass
  watches[1].leave()
  watches[1]._thread.join(5)
  second[0].close()
  assert watches[0]._thread.is_alive() and watches[2]._thread.is_alive()
  watches[0].leave()
  watches[2].leave()
  for watch in watches:
    watch._thread.join(5)
    assert not watch._thread.is_alive()
  assert not ends


def test_silence_counts_in_training_only(ends, monkeypatch):
  monkeypatch.setattr(peers, 'BEAT_INTERVAL', 0.01)
  monkeypatch.setattr(peers, 'SILENCE', 1.5)
  first, (second, third) = pairs(3)
  watch, other = peers.Watch(first), peers.Watch(third)
  with other.training():
    time.sleep(1.8)  # it says `alive`, and the second process says nothing
  assert not ends
  second[0].send(b'ali')
  second[0].send(b've\nalive\n')  # and then it is stopped
  start_time = time.monotonic()
  wait(lambda: len(ends) == 2)
  assert ends == [(1, peers.SILENT)] * 2 and time.monotonic() - start_time > 1.4
  assert not watch._thread.is_alive()


def test_who_leaves_while_others_train_is_named(ends, monkeypatch):
  monkeypatch.setattr(peers, 'LEAVE_TIMEOUT', 0)
  first, (second,) = pairs(2)
  watch = peers.Watch(first)
  second[0].send(b'bye\n')
  wait(lambda: watch._bye_times)
  time.sleep(0.6)
  assert not ends  # training is over here too
  with watch.training():
    wait(lambda: ends)
  assert ends == [(1, peers.LEFT)]


def test_connections_are_of_those_that_know_the_token():
  server, address = peers.listen()
  port, token = address['port'], address['token']
  connections = []
  thread = threading.Thread(target=lambda: connections.append(peers.accept(server, token, 3)))
  thread.start()
  stranger = peers.connect('localhost', port, 'guess', 1)
  second, third = (peers.connect('localhost', port, token, index) for index in (1, 2))
  second[0].send(b'alive\n')
  thread.join(20)
  assert sorted(connections[0]) == [1, 2] and connections[0][1].recv(100) == b'alive\n'
  third[0].send(b'bye\n')
  assert connections[0][2].recv(100) == b'bye\n' and stranger[0].recv(1) == b''
  for connection in (stranger[0], second[0], third[0], *connections[0].values()):
    connection.close()


def test_processes_that_do_not_connect_are_an_error(monkeypatch):
  monkeypatch.setattr(peers, 'CONNECT_TIMEOUT', 0.05)
  server, address = peers.listen()
  with pytest.raises(TimeoutError):
    peers.accept(server, address['token'], 2)
  server.close()
  with pytest.raises(OSError):
    peers.connect('localhost', address['port'], address['token'], 1)


def test_processes_that_cannot_connect_are_not_watched(monkeypatch, caplog):
  """None of them is, although the first two are connected."""
  told = []
  monkeypatch.setattr(hosts, '_process', {'index': 0, 'count': 2})
  monkeypatch.setattr(hosts, 'broadcast', lambda value: told.append(value) or value)
  monkeypatch.setattr(hosts, 'all_gather', lambda value: [value, 'process 1: refused'])
  monkeypatch.setattr(hosts.peers, 'accept', lambda server, token, count: server.close() or {})
  hosts._watch_peers('[::1]:5000')
  assert told[0][0] == '::1' and told[0][1]['port'] > 0
  assert not hosts._watch and 'for lack of a connection: process 1: refused' in caplog.text


def test_without_other_processes_nobody_is_told(ends):
  with hosts.heartbeats():
    hosts.leave()
  assert not ends


def test_the_sentence_names_the_process_and_the_remedy():
  assert peers.describe(3, peers.KILLED) == (
    'error: process 3 was killed or failed: rerun the same command in all processes to resume from '
    'the last checkpoint'
  )
