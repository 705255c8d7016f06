"""Prefetching: the order of items, exceptions, and the end of the thread."""

import itertools
import threading
import time

import pytest

from ngrammer_jax.data import prefetch


@pytest.fixture(autouse=True)
def thread_ends():
  """Checks that no prefetch thread outlives a test."""
  yield
  assert not [t for t in threading.enumerate() if t.name.startswith('prefetch')]


def wait_for(condition):
  deadline = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < deadline, 'the condition was false for 10 s'
    time.sleep(0.001)


@pytest.mark.parametrize('depth', [1, 2, 100])
@pytest.mark.parametrize('count', [0, 1, 50])
def test_items_are_in_order(count, depth):
  with prefetch.run_ahead(iter(range(count)), depth) as items:
    assert list(items) == list(range(count))
    assert list(items) == []


def test_none_is_an_item():
  with prefetch.run_ahead(iter([None, 1, None])) as items:
    assert list(items) == [None, 1, None]


def test_items_are_prefetched_in_a_thread_up_to_the_depth():
  thread_names = []

  def generate_items():
    for i in range(100):
      thread_names.append(threading.current_thread().name)
      yield i

  with prefetch.run_ahead(generate_items(), depth=3) as items:
    for num_consumed in range(1, 20):
      next(items)
      # Three items wait, and the thread has computed one more.
      wait_for(lambda count=num_consumed: len(thread_names) == count + 4)
  assert set(thread_names) == {'prefetch_0'}
  assert len(thread_names) == 19 + 4


def test_exception_is_raised_in_place_of_its_item():
  def generate_items():
    yield 1
    yield 2
    raise KeyError('third')

  with prefetch.run_ahead(generate_items(), depth=5) as items:
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match='third'):
      next(items)


@pytest.mark.parametrize('num_consumed', [0, 1, 5])
def test_leaving_early_stops_the_thread(num_consumed):
  with prefetch.run_ahead(itertools.count(), depth=2) as items:
    assert list(itertools.islice(items, num_consumed)) == list(range(num_consumed))


def test_exception_of_the_caller_stops_the_thread():
  with pytest.raises(InterruptedError):
    with prefetch.run_ahead(itertools.count()) as items:
      next(items)
      raise InterruptedError
