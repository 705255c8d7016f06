"""Prefetches batches in a background thread while the device computes."""

import collections
from collections.abc import Iterator
from concurrent import futures
from typing import Any

_END = object()


class Prefetcher:
  """Runs an iterator ahead in a thread. A context manager, whose exit stops the thread.

  An exception of the iterator is raised in place of the item.

  Args:
    items: the iterator.
    depth: maximum number of items that wait while the thread computes the next one.
  """

  def __init__(self, items: Iterator[Any], depth: int = 2):
    self._items, self._depth = items, depth
    self._executor = futures.ThreadPoolExecutor(1, thread_name_prefix='prefetch')
    self._pending: collections.deque[futures.Future] = collections.deque()

  def __enter__(self) -> Iterator[Any]:
    for _ in range(self._depth + 1):
      self._submit()
    return self._iterate()

  def __exit__(self, *exception) -> None:
    self._executor.shutdown(cancel_futures=True)

  def _submit(self) -> None:
    self._pending.append(self._executor.submit(next, self._items, _END))

  def _iterate(self) -> Iterator[Any]:
    while True:
      item = self._pending.popleft().result()
      if item is _END:
        return
      self._submit()
      yield item
