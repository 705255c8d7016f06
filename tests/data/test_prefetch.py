"""A thread that runs ahead: what arrives, and that it ends."""

import itertools
import threading
import time

import pytest

from ngrammer_jax.data import prefetch


@pytest.fixture(autouse=True)
def thread_ends():
  """No prefetch thread outlives a test."""
  yield
  assert not [t for t in threading.enumerate() if t.name == 'prefetch']


def wait_for(condition):
  deadline = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < deadline, 'nothing happened for 10 s'
    time.sleep(0.001)


@pytest.mark.parametrize('depth', [1, 2, 100])
@pytest.mark.parametrize('count', [0, 1, 50])
def test_items_come_in_order(count, depth):
  with prefetch.Prefetch(iter(range(count)), depth) as items:
    assert list(items) == list(range(count))
    assert list(items) == []


def test_none_is_an_item():
  with prefetch.Prefetch(iter([None, 1, None])) as items:
    assert list(items) == [None, 1, None]


def test_items_are_made_elsewhere_and_ahead_but_not_too_far():
  made = []

  def make():
    for i in range(100):
      made.append(threading.current_thread().name)
      yield i

  with prefetch.Prefetch(make(), depth=3) as items:
    for taken in range(1, 20):
      next(items)
      # Three wait in the queue and one in the hand of the thread.
      wait_for(lambda taken=taken: len(made) == taken + 4)
  assert set(made) == {'prefetch'}
  assert len(made) == 19 + 4


def test_exception_comes_in_the_place_of_its_item():
  def make():
    yield 1
    yield 2
    raise KeyError('third')

  with prefetch.Prefetch(make(), depth=5) as items:
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match='third'):
      next(items)


def test_exception_leaves_the_block():
  with pytest.raises(ZeroDivisionError):
    with prefetch.Prefetch(1 // i for i in (1, 0)) as items:
      list(items)


@pytest.mark.parametrize('taken', [0, 1, 5])
def test_leaving_early_ends_the_thread(taken):
  with prefetch.Prefetch(itertools.count(), depth=2) as items:
    assert list(itertools.islice(items, taken)) == list(range(taken))


def test_exception_of_the_user_ends_the_thread():
  with pytest.raises(InterruptedError):
    with prefetch.Prefetch(itertools.count()) as items:
      next(items)
      raise InterruptedError
