"""What one process of several knows of the others."""

import json

from jax.experimental import multihost_utils
import numpy as np
import pytest

from ngrammer_jax import errors, hosts
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
    monkeypatch.setitem(hosts._known, 'count', 1 + len(values))

  return tell


def test_all_agree_with_the_first(others):
  assert hosts.gathered({'a': 1}) == [{'a': 1}] and hosts.agreed([4]) == [4]
  others([8, 'long'], None)
  assert hosts.gathered([4]) == [[4], [8, 'long'], None]
  assert hosts.agreed([4]) == [4]


def test_what_one_cannot_do_none_does(others):
  others(None, None)
  with hosts.together():
    pass
  others(None, 'the disk is full')
  with bad_input('process 2: the disk is full'), hosts.together():
    pass
  with bad_input('no such file'), hosts.together():
    raise errors.BadInput('no such file')


def test_the_first_does_it_for_all(others, monkeypatch):
  done = []
  others(None)
  hosts.by_first(done.append, 'as the first')
  monkeypatch.setitem(hosts._known, 'number', 1)
  hosts.by_first(done.append, 'as the second')
  assert done == ['as the first']
