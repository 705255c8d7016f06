"""Prefetches batches in a background thread while the device computes."""

import collections
from collections.abc import Iterator
from concurrent import futures
import contextlib
from typing import TypeVar

Item = TypeVar('Item')
_END = object()


@contextlib.contextmanager
def run_ahead(items: Iterator[Item], depth: int = 2) -> Iterator[Iterator[Item]]:
  """Runs an iterator ahead in a thread, until the end of the `with` statement.

  An exception of the iterator is raised in place of the item.

  Args:
    items: the iterator.
    depth: maximum number of items that wait while the thread computes the next one.
  """
  executor = futures.ThreadPoolExecutor(1, thread_name_prefix='prefetch')
  pending = collections.deque(executor.submit(next, items, _END) for _ in range(depth + 1))

  def iterate() -> Iterator[Item]:
    while (item := pending.popleft().result()) is not _END:
      pending.append(executor.submit(next, items, _END))
      yield item

  try:
    yield iterate()
  finally:
    executor.shutdown(cancel_futures=True)
