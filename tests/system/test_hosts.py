"""What one process of several knows of the others."""

import argparse
import json
import logging

import jax
from jax._src import distributed
from jax.experimental import multihost_utils
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.system import hosts
from tests.checks import bad_input


@pytest.fixture
def others(monkeypatch):
  """Two other processes, after this one, which have what is told."""

  def tell(*values):
    payloads = [np.frombuffer(json.dumps(value).encode(), np.uint8) for value in values]

    def allgather(array):
      if array.ndim == 0:
        return np.array([array, *map(len, payloads)])
      size = len(array)
      return np.stack([array, *(np.pad(data, (0, size - len(data))) for data in payloads)])

    monkeypatch.setattr(multihost_utils, 'process_allgather', allgather)
    monkeypatch.setitem(hosts._process, 'count', 1 + len(values))

  return tell


def test_all_agree_with_the_first(others):
  assert hosts.all_gather({'a': 1}) == [{'a': 1}] and hosts.broadcast([4]) == [4]
  others([8, 'long'], None)
  assert hosts.all_gather([4]) == [[4], [8, 'long'], None]
  assert hosts.broadcast([4]) == [4]


def test_what_one_cannot_do_none_does(others):
  others(None, None)
  with hosts.collective_errors():
    pass
  others(None, 'the disk is full')
  with bad_input('process 2: the disk is full'), hosts.collective_errors():
    pass
  with bad_input('no such file'), hosts.collective_errors():
    raise errors.BadInput('no such file')


def test_the_first_does_it_for_all(others, monkeypatch):
  done = []
  others(None)
  hosts.on_primary(done.append, 'as the first')
  monkeypatch.setitem(hosts._process, 'index', 1)
  hosts.on_primary(done.append, 'as the second')
  assert done == ['as the first']


def test_a_log_record_is_prefixed_for_its_handler_alone(others, monkeypatch):
  def record(level):
    return logging.LogRecord('x', level, 'x.py', 1, 'step %s', (4,), None)

  form = logging.Formatter('%(prefix)s%(message)s')
  for index, shown in (0, ['step 4', 'warning: step 4']), (2, [None, 'process 2: warning: step 4']):
    monkeypatch.setitem(hosts._process, 'index', index)
    records = [record(logging.INFO), record(logging.WARNING)]
    kept = [hosts.prefix_record(each) for each in records]
    lines = [form.format(each) if keep else None for each, keep in zip(records, kept, strict=True)]
    assert lines == shown
    assert [each.getMessage() for each in records] == ['step 4', 'step 4']


def joined(monkeypatch, initialize):
  monkeypatch.setattr(jax.distributed, 'initialize', initialize)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(hosts, '_process', {'index': 0, 'count': 1})
  hosts.add_flags(parser := argparse.ArgumentParser())
  flags = ['--coordinator=localhost:1', '--processes=2', '--process_id=0']
  hosts.join(parser.parse_args(flags))


def test_what_to_do_about_a_lost_process_is_said_beforehand(monkeypatch, caplog):
  caplog.set_level(logging.INFO)
  told = {}
  joined(monkeypatch, lambda *where, **timeouts: told.update(timeouts))
  assert told['heartbeat_timeout_seconds'] == 30 and told['shutdown_timeout_seconds'] >= 60
  assert caplog.messages[-1] == (
    'if a process is lost, JAX ends all others after 30 s with status 134: then rerun the same '
    'command in all processes to resume from the last checkpoint'
  )


def test_others_that_do_not_connect(monkeypatch):
  def initialize(*where, **timeouts):
    raise RuntimeError('DEADLINE_EXCEEDED')

  with pytest.raises(errors.PeerLostError, match=r'\(DEADLINE_EXCEEDED\): rerun the same command'):
    joined(monkeypatch, initialize)


@pytest.mark.parametrize('step, is_warned', [(None, True), ('1', False)])
def test_a_job_of_several_tasks_without_srun(monkeypatch, caplog, step, is_warned):
  monkeypatch.setenv('SLURM_NTASKS', '16')
  monkeypatch.delenv(hosts.SLURM_TASKS, raising=False)
  if step:
    monkeypatch.setenv(hosts.SLURM_TASKS, step)
  hosts.add_flags(parser := argparse.ArgumentParser())
  hosts.join(parser.parse_args([]))
  assert caplog.messages == is_warned * [
    'this Slurm job has 16 tasks, and one process is used: start it with srun'
  ]


def test_a_mailbox_does_not_read_what_an_earlier_one_of_its_name_has_sent(monkeypatch):
  """The store of the processes refuses a key that exists."""
  stored = {}

  class Client:
    def key_value_set_bytes(self, key, content):
      assert key not in stored
      stored[key] = content

    def blocking_key_value_get_bytes(self, key, timeout):
      return stored[key]

    def key_value_delete(self, key):
      del stored[key]

  monkeypatch.setattr(distributed.global_state, 'client', Client())
  monkeypatch.setattr(hosts, 'is_multiprocess', lambda: True)
  for content in (b'first', b'second'):
    mailbox = hosts.Mailbox('name')
    assert mailbox.exchange(0, content) == mailbox.exchange(1, content) == [content]


def mailbox_with(monkeypatch, receive):
  """A mailbox of two processes, in process 0, whose keys are received by a function."""

  class Client:
    key_value_set_bytes = key_value_delete = lambda *_: None
    blocking_key_value_get_bytes = lambda self, key, timeout: receive(key)

  monkeypatch.setattr(distributed.global_state, 'client', Client())
  monkeypatch.setattr(hosts, 'is_multiprocess', lambda: True)
  monkeypatch.setitem(hosts._process, 'count', 2)
  return hosts.Mailbox('name')


def test_an_exchange_waits_for_a_busy_process_until_the_mailbox_is_closed(monkeypatch):
  """A process that stopped at the same step has not sent what is read ahead."""
  polls = []

  def receive(key):
    if key.endswith('/0'):
      return b'own'
    polls.append(key)
    if len(polls) == 3:
      mailbox.close()
    raise RuntimeError('DEADLINE_EXCEEDED: key not found')

  mailbox = mailbox_with(monkeypatch, receive)
  with pytest.raises(hosts.ClosedError):
    mailbox.exchange(0, b'own')
  assert len(polls) == 3


def test_an_exchange_ends_if_the_connection_is_lost(monkeypatch):
  def receive(key):
    raise RuntimeError('UNAVAILABLE: failed to connect')

  mailbox = mailbox_with(monkeypatch, receive)
  with pytest.raises(errors.PeerLostError, match=r'\(UNAVAILABLE: .*\): rerun the same command'):
    mailbox.exchange(0, b'own')
